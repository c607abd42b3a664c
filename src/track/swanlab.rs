//! SwanLab: an offline run for each stage with figures, which `swanlab sync` sends.
//!
//! The file is what SwanLab's own client (0.10) writes with `mode="offline"`: a log of its `Record`s
//! (`swanlab/proto` in its sources), and the configuration beside it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use stages::data::protobuf::Message;

use super::offline::{Log, id, run_folder, timestamp};
use super::story::{Ended, Millis, StageStory, Story, by_step};

/// Where the runs of a project go.
pub(super) struct Swanlab<'a> {
    pub project: &'a str,
    pub workspace: Option<&'a str>,
    pub tags: &'a [String],
}

// Fields of `Record`, each of which is one kind of record, and the numbers of those that are not counted.
const START: (u32, i64) = (10, -1);
const FINISH: (u32, i64) = (11, -2);
const CONFIG: (u32, i64) = (20, -3);
const COLUMN: u32 = 12;
const SCALAR: u32 = 13;

// Values of its enumerations.
const CLASS_CUSTOM: i64 = 1;
const TYPE_SCALAR: i64 = 1;
const SECTION_PUBLIC: i64 = 3;
const SAVE_CONFIG: i64 = 1;
const FINISHED: i64 = 1;
const CRASHED: i64 = 2;

impl Swanlab<'_> {
    /// Writes each run, whole; gives their folders.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub(super) fn write(&self, story: &Story) -> io::Result<Vec<PathBuf>> {
        let folder = std::path::absolute(story.folder.join("swanlog"))?;
        story
            .tracked()
            .map(|(at, stage)| {
                let id = id(story, &story.plan.stages[at].id);
                let folder = run_folder(&folder, "run", stage.started, &id)?;
                let config = folder.join("files").join("config.yaml");
                fs::create_dir_all(folder.join("files"))?;
                super::replace(&config, configuration(story, at).to_string().as_bytes())?;
                self.log(story, at, stage, &id, &config).write(&folder.join(format!("run-{id}.swanlab")))?;
                Ok(folder)
            })
            .collect()
    }

    fn log(&self, story: &Story, at: usize, stage: &StageStory, id: &str, config: &Path) -> Log {
        let mut log = Log::new(*b":SWL", 0xe1d6, 2);
        let record = |number: i64, time: Millis| Message::new().int(1, number).message(2, &timestamp(time));
        let (plan, planned) = (&story.plan, &story.plan.stages[at]);
        let start = Message::new()
            .text(1, self.project)
            .text_if(2, self.workspace)
            .text(4, &planned.id)
            .texts(6, self.tags)
            .text(7, &plan.run)
            .text(8, &planned.kind)
            .text(10, id)
            .message(12, &timestamp(stage.started));
        log.add(record(START.1, stage.started).message(START.0, &start));
        let config = Message::new().text(1, "config").text(2, &config.to_string_lossy()).int(5, SAVE_CONFIG);
        log.add(record(CONFIG.1, stage.started).message(CONFIG.0, &config));
        let (mut number, mut columns) = (0, BTreeSet::new());
        let steps = by_step(&stage.figures);
        let figures = steps
            .iter()
            .flat_map(|(step, (time, figures))| figures.iter().map(move |(name, value)| (*name, *value, *step, *time)));
        let ended = stage.ended.or(story.ended.map(|(_, time)| (Ended::Failed, time)));
        let end = ended.map_or(stage.started, |(_, time)| time);
        let results = stage.results.iter().map(|(name, value)| (name.as_str(), *value, 0, end));
        for (name, value, step, time) in figures.chain(results) {
            let mut next = || {
                number += 1;
                record(number, time)
            };
            if columns.insert(name.to_owned()) {
                let section = name.split_once('/').map_or("result", |(section, _)| section);
                let column = Message::new().int(1, CLASS_CUSTOM).int(2, TYPE_SCALAR).text(3, name).text(5, section);
                log.add(next().message(COLUMN, &column.int(6, SECTION_PUBLIC)));
            }
            let scalar = Message::new().text(1, name).int(2, step).int(3, TYPE_SCALAR).message(4, &timestamp(time));
            log.add(next().message(SCALAR, &scalar.message(5, &Message::new().double(1, value))));
        }
        if let Some((how, time)) = ended {
            let state = if how == Ended::Done { FINISHED } else { CRASHED };
            let finish = Message::new().int(1, state).message(3, &timestamp(time));
            log.add(record(FINISH.1, time).message(FINISH.0, &finish));
        }
        log
    }
}

/// The parameters of a stage in the form of its `config.yaml`; JSON is YAML.
fn configuration(story: &Story, at: usize) -> Value {
    let planned = &story.plan.stages[at];
    let empty = serde_json::Map::new();
    let parameters = planned.parameters.as_object().unwrap_or(&empty);
    let of_stage = parameters.iter().map(|(name, value)| (name.clone(), value.clone())).chain(planned.axes.clone());
    let all = std::iter::once(("pipeline".to_owned(), story.origin(at))).chain(of_stage).enumerate();
    all.map(|(sort, (name, value))| (name, json!({ "desc": "", "sort": sort, "value": value }))).collect()
}
