//! A run's folder: `run.json` (what was to be done), `events.jsonl` (what happened), and a folder per stage.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cache::{Digest, ResultRecord, regular};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::events::{EVENTS_FILE, TimedEvent};
use super::host::Host;
use crate::artifact::Output;
use crate::execute::ProcessExit;
use crate::explain::CPU_SECONDS;
use crate::plan::{Plan, ResolvedInput};
use crate::protocol::WorkerEvent;
use crate::run::clock::Moment;
use crate::run::event::RunEvent;
use crate::track::Tracker;

/// Progress is kept at most this often for a stage; everything else is kept in full.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// The plan of a run.
pub(super) const PLAN_FILE: &str = "run.json";

/// The copy of a result's record in the folder of the stage that made it.
pub const RESULT_FILE: &str = "result.json";

/// What a stage's process was told, in the folder of the stage.
pub const JOB_FILE: &str = "job.json";

/// What a stage's processes printed, in the folder of the stage.
pub const LOG_FILE: &str = "log";

/// The totals of where the time of a stage's process went, in the folder of the stage.
pub const PROFILE_FILE: &str = "profile.json";

/// A trace: of the run in its folder, of a stage in the stage's while the run goes on.
pub const TRACE_FILE: &str = "trace.json";

/// How the names of traces end that programs of a stage have written, in the folder of the stage.
const OWN_TRACE: &str = ".trace.json";

/// The traces that programs of a stage have written into its folder, as PyTorch's profiler does.
pub fn own_traces(stage_folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(stage_folder).into_iter().flatten().flatten();
    let is_trace = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(OWN_TRACE));
    let mut traces: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_trace).collect();
    traces.sort();
    traces
}

/// The content of `run.json`: the resolved plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunPlan {
    /// The run's id.
    pub run: String,
    /// The pipeline's name.
    pub pipeline: String,
    /// The pipeline file, as it was named.
    pub file: PathBuf,
    /// When the run began.
    pub started: String,
    /// The version of this program.
    pub program: String,
    /// The folder of the pipeline file, absolute: what the paths in parameters are relative to.
    #[serde(default)]
    pub folder: PathBuf,
    /// The machine.
    #[serde(default)]
    pub host: Host,
    /// Who is told of the run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub track: Vec<Tracker>,
    /// The stages in the order of the plan.
    pub stages: Vec<RunStage>,
}

/// A stage of a run's plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunStage {
    pub id: String,
    /// The id under which the file declares it, where that is another: of a child of a sweep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declared: Option<String>,
    /// The values that make it this child of a sweep, by axis.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub axes: Vec<(String, Value)>,
    pub kind: String,
    /// Its parameters, after variables and overrides.
    pub parameters: Value,
    /// The version of its kind; 0 in records of earlier versions of this program, as all that follows is empty in
    /// them.
    #[serde(default)]
    pub version: u32,
    /// What it makes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<Output>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inputs: Vec<RunInput>,
    /// Stages that it waits for without reading them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<String>,
}

/// An input of a stage in a run's plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RunInput {
    /// The stage that makes it.
    pub stage: String,
    pub output: String,
    /// The artefact's kind.
    pub kind: String,
}

/// The id of a run that begins at a moment. Runs are ordered by their ids, so it is behind those of all runs that are
/// recorded: also where the clock was set back since, the newest run is the one that was recorded last.
pub(crate) fn new_run_id(runs: &Path, started: Moment) -> String {
    let recorded = fs::read_dir(runs).into_iter().flatten().flatten();
    started.behind(recorded.filter_map(|run| Moment::of_run_id(run.file_name().to_str()?))).run_id()
}

/// What a file of a run's folder contains; `None` where it does not exist or cannot be read.
pub(super) fn read_json<T: DeserializeOwned>(file: &Path) -> Option<T> {
    serde_json::from_slice(&regular::read(file).ok()?).ok()
}

/// Where, when and at what cost a process of a run came to its end. `host` is this machine, where the process does not
/// say another.
pub(crate) fn circumstances(run: &str, host: &str, exit: &ProcessExit) -> Map<String, Value> {
    let known = json!({
        "program": env!("CARGO_PKG_VERSION"),
        "run": run,
        "host": exit.host.as_deref().unwrap_or(host),
        "finished": Moment::now().rfc3339(),
        "seconds": exit.ran.as_secs_f64(),
        "peak_memory_bytes": exit.peak_memory_bytes,
        CPU_SECONDS: exit.cpu.as_secs_f64(),
    });
    let Value::Object(known) = known else { unreachable!("an object was written above") };
    known
}

impl RunPlan {
    /// That of the run in a folder, where it is readable.
    pub fn read(folder: &Path) -> Option<Self> {
        read_json(&folder.join(PLAN_FILE))
    }

    /// What is to be kept of a plan.
    pub fn new(run: &str, plan: &Plan, started: Moment) -> Self {
        let input = |input: &ResolvedInput| RunInput {
            stage: input.stage.clone(),
            output: input.output.clone(),
            kind: input.kind.clone(),
        };
        let stages = plan.stages.iter().map(|stage| RunStage {
            id: stage.id.clone(),
            declared: (stage.declared != stage.id).then(|| stage.declared.clone()),
            axes: stage.axes.clone(),
            kind: stage.kind.to_owned(),
            parameters: stage.parameters.clone(),
            version: stage.version,
            outputs: stage.outputs.clone(),
            inputs: stage.inputs.iter().map(input).collect(),
            needs: stage.needs.iter().map(|before| plan.stages[*before].id.clone()).collect(),
        });
        Self {
            run: run.to_owned(),
            pipeline: plan.name.clone(),
            file: plan.file.clone(),
            started: started.rfc3339(),
            program: env!("CARGO_PKG_VERSION").to_owned(),
            folder: plan.folder.clone(),
            host: Host::this(),
            track: plan.track.clone(),
            stages: stages.collect(),
        }
    }
}

/// A run's folder, while the run goes on. The events file is locked as long as this lives, so that others can tell a
/// run that continues from one that was cut off.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    events: File,
    host: String,
    last_progress: Vec<(String, Instant)>,
}

impl RunFolder {
    /// Makes the folder. Nothing here is flushed to disk: a run that a power cut erases has no results to lose.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn create(path: &Path, plan: &RunPlan) -> io::Result<Self> {
        fs::create_dir_all(path)?;
        let events = OpenOptions::new().create(true).append(true).open(path.join(EVENTS_FILE))?;
        events.lock()?;
        fs::write(path.join(PLAN_FILE), serde_json::to_vec_pretty(plan)?)?;
        Ok(Self { path: path.to_owned(), events, host: plan.host.name.clone(), last_progress: Vec::new() })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of a stage, made if it is not there.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn stage(&self, stage: &str) -> io::Result<PathBuf> {
        let folder = self.path.join(stage_folder(stage));
        fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    /// Where, when and at what cost a result of this run was made: goes into its record, so that an artefact can be
    /// traced back to the run.
    pub fn circumstances(&self, exit: &ProcessExit) -> Map<String, Value> {
        circumstances(&self.path.file_name().unwrap_or_default().to_string_lossy(), &self.host, exit)
    }

    /// Keeps a copy of a result's record beside the stage's log, so that the run can be told from its folder alone when
    /// the store has let go of the result.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn keep_result(&self, stage: &str, record: &ResultRecord) -> io::Result<()> {
        fs::write(self.stage(stage)?.join(RESULT_FILE), serde_json::to_vec_pretty(record)?)
    }

    /// Adds an event, unless it only repeats: of progress some is kept, of the pieces of an answer none, since the
    /// report has it.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn append(&mut self, event: &RunEvent) -> io::Result<()> {
        if let RunEvent::Worker { said: WorkerEvent::Text { .. }, .. } = event {
            return Ok(());
        }
        if let RunEvent::Worker { stage, said: WorkerEvent::Progress { .. } } = event
            && !self.keeps_progress(stage)
        {
            return Ok(());
        }
        let mut line = serde_json::to_vec(&TimedEvent { time: Moment::now().rfc3339(), event: event.clone() })?;
        line.push(b'\n');
        let before = self.events.metadata()?.len();
        self.events.write_all(&line).inspect_err(|_| {
            // On a full disk the beginning of a long line would take the room that the run's end, a short one, fits in.
            let _ = self.events.set_len(before);
        })
    }

    fn keeps_progress(&mut self, stage: &str) -> bool {
        let now = Instant::now();
        match self.last_progress.iter_mut().find(|(known, _)| known == stage) {
            Some((_, last)) if now.duration_since(*last) < PROGRESS_INTERVAL => false,
            Some((_, last)) => {
                *last = now;
                true
            }
            None => {
                self.last_progress.push((stage.to_owned(), now));
                true
            }
        }
    }
}

/// Whether a run's engine is alive: whether somebody holds its events file.
pub(super) fn is_alive(folder: &Path) -> bool {
    let Ok(events) = regular::open(&folder.join(EVENTS_FILE)) else { return false };
    matches!(events.try_lock_shared(), Err(fs::TryLockError::WouldBlock))
}

/// The name of a stage's folder within a run's. Ids of a matrix hold characters that a path should not; those get a
/// digest, so that two of them never share a folder.
pub fn stage_folder(stage: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if stage.chars().all(plain) && !stage.starts_with('.') {
        return stage.to_owned();
    }
    let replaced: String = stage.chars().map(|c| if plain(c) { c } else { '_' }).collect();
    format!("{}-{}", replaced.trim_start_matches('.'), Digest::of(stage.as_bytes()).short())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Cause, Failure};
    use crate::history::events::{Events, Words};
    use crate::history::{Recorded, RunState};

    fn plan_of(stages: Vec<RunStage>) -> RunPlan {
        RunPlan {
            run: "run".into(),
            pipeline: "p".into(),
            file: "p.yaml".into(),
            started: Moment::now().rfc3339(),
            program: "0".into(),
            folder: PathBuf::new(),
            host: Host::default(),
            track: Vec::new(),
            stages,
        }
    }

    fn read(folder: &Path) -> Vec<RunEvent> {
        Events::open(folder, Words::Read).unwrap().map(|timed| timed.unwrap().event).collect()
    }

    #[test]
    fn stages_never_share_a_folder() {
        assert_eq!(stage_folder("adapter"), "adapter");
        let (four, other) = (stage_folder("adapter[lora.rank=4]"), stage_folder("adapter(lora.rank=4)"));
        assert!(four.starts_with("adapter_lora.rank_4_-"), "{four}");
        assert_ne!(four, other);
        assert!(!stage_folder("../up").contains('/') && !stage_folder("..").starts_with('.'));
    }

    #[test]
    fn a_cut_line_is_left_out_and_a_dead_run_is_told_from_a_living_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let plan = plan_of(Vec::new());
        let mut run = RunFolder::create(&path, &plan).unwrap();
        let event = RunEvent::StageWaiting { stage: "a".into(), waits_for: crate::run::WaitsFor::default() };
        run.append(&event).unwrap();
        assert!(is_alive(&path));
        drop(run);
        assert!(!is_alive(&path));
        let mut events = OpenOptions::new().append(true).open(path.join("events.jsonl")).unwrap();
        events.write_all(b"{\"time\":\"2026-").unwrap();
        assert_eq!(read(&path), [event]);
    }

    #[test]
    fn a_run_that_filled_its_disk_has_failed_even_if_its_end_is_not_recorded() {
        let folder = tempfile::tempdir().unwrap();
        let stage = json!({ "id": "a", "kind": "k", "parameters": {} });
        let plan = plan_of(vec![serde_json::from_value(stage).unwrap()]);
        let state = |name: &str, cause: Cause, retry_in_seconds: Option<f64>| {
            let path = folder.path().join(name);
            let mut run = RunFolder::create(&path, &plan).unwrap();
            let failure = Failure::new(cause, vec!["it failed".to_owned()]);
            let (stage, log, retry_with) = ("a".to_owned(), PathBuf::new(), None);
            let failed = RunEvent::StageFailed { stage, failure, log, seconds: 1.0, retry_in_seconds, retry_with };
            run.append(&failed).unwrap();
            drop(run);
            Recorded::read(&path, Words::Skip).unwrap().summary.state
        };
        assert_eq!(state("full", Cause::DiskFull, None), RunState::Failed);
        assert_eq!(state("again", Cause::DiskFull, Some(1.0)), RunState::CutOff);
        assert_eq!(state("other", Cause::BadData, None), RunState::CutOff);
    }

    #[test]
    fn progress_is_thinned_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let plan = plan_of(Vec::new());
        let mut run = RunFolder::create(folder.path(), &plan).unwrap();
        for done in 0..5 {
            let progress = WorkerEvent::Progress { unit: "rows".into(), done, total: None, note: None };
            run.append(&RunEvent::Worker { stage: "a".into(), said: progress }).unwrap();
            let checkpoint = WorkerEvent::Checkpoint { step: done };
            run.append(&RunEvent::Worker { stage: "a".into(), said: checkpoint }).unwrap();
        }
        assert_eq!(read(folder.path()).len(), 1 + 5);
    }
}
