//! Weights & Biases: an offline run for each stage with figures, which `wandb sync` sends.
//!
//! The file is what W&B's own client writes with `mode="offline"`: a log of `wandb_internal.Record`s
//! (`wandb/proto/wandb_internal.proto` in its sources). The form is documented in those sources alone;
//! `tests/program/track.rs` reads it back with the messages of W&B's own package.

use std::io;
use std::path::PathBuf;

use serde_json::{Value, json};
use stages::data::protobuf::Message;

use super::offline::{Log, id, run_folder, timestamp};
use super::story::{Ended, StageStory, Story, by_step};

/// Where the runs of a project go.
pub(super) struct Wandb<'a> {
    pub project: &'a str,
    pub entity: Option<&'a str>,
    pub tags: &'a [String],
}

/// The oldest server that the client of whose form this is can be used with.
const OLDEST_SERVER: &str = "0.70.0";

// Fields of `Record`, each of which is one kind of record.
const HISTORY: u32 = 2;
const SUMMARY: u32 = 3;
const RUN: u32 = 17;
const EXIT: u32 = 18;
const HEADER: u32 = 21;
const NUMBER: u32 = 1;

impl Wandb<'_> {
    /// Writes each run, whole; gives their folders.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub(super) fn write(&self, story: &Story) -> io::Result<Vec<PathBuf>> {
        let folder = story.folder.join("wandb");
        story
            .tracked()
            .map(|(at, stage)| {
                let id = id(story, &story.plan.stages[at].id);
                let folder = run_folder(&folder, "offline-run", stage.started, &id)?;
                self.log(story, at, stage, &id).write(&folder.join(format!("run-{id}.wandb")))?;
                Ok(folder)
            })
            .collect()
    }

    fn log(&self, story: &Story, at: usize, stage: &StageStory, id: &str) -> Log {
        let mut log = Log::new(*b":W&B", 0xbee1, 0);
        let mut number = 0;
        let mut add = |kind: u32, message: &Message| {
            number += 1;
            log.add(Message::new().int(NUMBER, number).message(kind, message));
        };
        let producer = format!("pipeline {}", story.plan.program);
        let version = Message::new().text(1, &producer).text(2, OLDEST_SERVER);
        add(HEADER, &Message::new().message(1, &version));
        add(RUN, &self.run(story, at, stage, id));
        for (step, (time, figures)) in by_step(&stage.figures) {
            let seconds = time as f64 / 1000.0;
            let runtime = time.saturating_sub(stage.started) as f64 / 1000.0;
            let own = [("_step", json!(step)), ("_timestamp", json!(seconds)), ("_runtime", json!(runtime))];
            let told = figures.into_iter().map(|(name, value)| (name, json!(value)));
            let row = told.chain(own).fold(Message::new(), |row, (name, value)| row.message(1, &item(name, &value)));
            add(HISTORY, &row.message(2, &Message::new().int(1, step)));
        }
        let results = stage.results.iter();
        let results = results.fold(Message::new(), |all, (name, value)| all.message(1, &item(name, &json!(value))));
        add(SUMMARY, &results);
        let ended = stage.ended.or(story.ended.map(|(_, time)| (Ended::Failed, time)));
        if let Some((how, time)) = ended {
            let seconds = time.saturating_sub(stage.started) / 1000;
            add(EXIT, &Message::new().int(1, i64::from(how == Ended::Failed)).int(2, seconds.cast_signed()));
        }
        log
    }

    fn run(&self, story: &Story, at: usize, stage: &StageStory, id: &str) -> Message {
        let (plan, planned) = (&story.plan, &story.plan.stages[at]);
        let empty = serde_json::Map::new();
        let parameters = planned.parameters.as_object().unwrap_or(&empty);
        let axes = planned.axes.iter().map(|(name, value)| (name.as_str(), value));
        let all = parameters.iter().map(|(name, value)| (name.as_str(), value)).chain(axes);
        let config = |name: &str, value: &Value| Message::new().text(1, name).text(16, &value.to_string());
        let first = Message::new().message(1, &config("_wandb", &json!({})));
        let first = first.message(1, &config("pipeline", &story.origin(at)));
        let config = all.fold(first, |update, (name, value)| update.message(1, &config(name, value)));
        Message::new()
            .text(1, id)
            .text_if(2, self.entity)
            .text(3, self.project)
            .message(4, &config)
            .text(6, &plan.run)
            .text(7, &planned.kind)
            .text(8, &planned.id)
            .texts(10, self.tags)
            .text(13, &plan.host.name)
            .message(17, &timestamp(stage.started))
    }
}

/// A named value, as JSON.
fn item(name: &str, value: &Value) -> Message {
    Message::new().text(2, name).text(16, &value.to_string())
}
