//! A run as its folder tells it: what was planned, and how far it came.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use cache::{Digest, OutputRecord, ResultRecord};
use profile::Summary;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::events::{Events, TimedEvent, Words};
use super::folder::{
    JOB_FILE, PROFILE_FILE, RESULT_FILE, RunPlan, RunStage, TRACE_FILE, is_alive, own_traces, read_json, stage_folder,
};
use super::host::Host;
use crate::error::{Cause, Failure};
use crate::plan::Scale;
use crate::protocol::{Job, WorkerEvent};
use crate::run::event::{Conclusion, Counts, RunEvent};

/// A run, in a line.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct RunSummary {
    pub run: String,
    /// The pipeline's name.
    pub pipeline: String,
    /// The pipeline file.
    pub file: PathBuf,
    /// When it began, in UTC.
    pub started: String,
    /// How it stands.
    pub state: RunState,
    /// How long it took, once it ended.
    pub seconds: Option<f64>,
    /// How many stages ended in which way, so far.
    pub counts: Counts,
    /// Lines of its record that cannot be read: of a run that was killed, the last may be cut off.
    pub damaged_lines: usize,
}

impl RunSummary {
    /// Whether it was a smoke run: the plan of one has a name of its own.
    pub fn is_smoke(&self) -> bool {
        self.pipeline.ends_with(Scale::SMOKE_ENDING)
    }
}

/// How a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// Its engine is at work.
    Running,
    /// Its engine was killed, or lost power.
    CutOff,
    /// Every stage has its result.
    Succeeded,
    /// A stage failed.
    Failed,
    /// The user stopped it.
    Interrupted,
}

/// A stage of a run, in a line.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct StageSummary {
    pub stage: String,
    pub kind: String,
    /// `done`, `cached`, `failed`, `skipped`, `started` or `waiting`.
    pub status: String,
    /// The key of its result.
    pub key: Option<Digest>,
    /// How long its process ran.
    pub seconds: Option<f64>,
    /// The most memory that its process held at once.
    pub peak_memory_bytes: Option<u64>,
    /// The id in the file: that of the sweep, where the stage is one of its children.
    pub declared: String,
    /// The values that make it this child of a sweep, in the order of the axes.
    pub axes: Vec<(String, Value)>,
}

/// What a stage cost when its process last came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LastRun {
    /// How long its process ran.
    pub seconds: f64,
    /// The most memory that its process held at once.
    pub peak_memory_bytes: Option<u64>,
}

/// A run as its folder tells it.
#[derive(Debug, Clone)]
pub struct Recorded {
    /// The version of the program that ran it.
    pub program: String,
    /// The machine.
    pub host: Host,
    /// How the run stands.
    pub summary: RunSummary,
    /// Its stages, in the order of the plan.
    pub stages: Vec<RecordedStage>,
    /// What was copied out of the store, or could not be.
    pub published: Vec<RecordedCopy>,
    /// The gates that were judged before anything was published.
    pub gates: Vec<RecordedGate>,
    folder: PathBuf,
}

/// A stage as the run's folder tells it.
#[derive(Debug, Clone)]
pub struct RecordedStage {
    /// How it stands.
    pub summary: StageSummary,
    /// What was planned.
    pub plan: RunStage,
    /// Why it ran, or was skipped.
    pub why: Vec<String>,
    /// The threads that it might use.
    pub threads: Option<usize>,
    /// Each start of its process.
    pub attempts: Vec<Attempt>,
    /// What it made in this run; empty where it was cached.
    pub outputs: BTreeMap<String, OutputRecord>,
    /// What it warned of, where words were read.
    pub warnings: Vec<String>,
    /// What it reported, such as what became of its rows, where words were read.
    pub reports: Vec<String>,
}

/// One start of a stage's process.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Attempt {
    /// 1 for the first.
    pub number: u32,
    /// When it began, in UTC.
    pub started: String,
    /// How long it ran, once it ended.
    pub seconds: Option<f64>,
    /// Why it failed, where it did.
    pub failure: Option<Failure>,
    /// Where in the log what it printed begins, in bytes.
    pub log_from: u64,
}

/// A gate, and how it was judged.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct RecordedGate {
    /// What the file asks, in words.
    pub gate: String,
    pub holds: bool,
    /// What was found, in words.
    pub because: String,
}

/// A copy out of the store.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct RecordedCopy {
    pub stage: String,
    pub output: String,
    /// Where it is, or should.
    pub path: PathBuf,
    /// Why it could not be made: the message and its sources, outermost first.
    pub failed: Option<Vec<String>>,
}

impl Recorded {
    /// Reads a run's folder; `None` where it has no readable plan.
    pub fn read(folder: &Path, words: Words) -> Option<Self> {
        Self::of_plan(RunPlan::read(folder)?, folder, words)
    }

    /// As [`Recorded::read`], of a run whose plan is at hand.
    pub(super) fn of_plan(plan: RunPlan, folder: &Path, words: Words) -> Option<Self> {
        // Looked at before the events: a run that ends in between has its end among them.
        let state = if is_alive(folder) { RunState::Running } else { RunState::CutOff };
        let mut recorded = Self::begin(plan, state, folder);
        recorded.apply_all(words).ok()?;
        Some(recorded)
    }

    /// Whether the engine of the run in a folder is at work now.
    pub fn is_alive(folder: &Path) -> bool {
        is_alive(folder)
    }

    pub fn stage(&self, id: &str) -> Option<&RecordedStage> {
        self.stages.iter().find(|stage| stage.summary.stage == id)
    }

    /// The run's folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder of one of its stages, which is there if its process was ever started.
    pub fn stage_folder(&self, stage: &str) -> PathBuf {
        self.folder.join(stage_folder(stage))
    }

    /// The run's own copy of the record of a result that it made.
    pub fn result(&self, stage: &str) -> Option<ResultRecord> {
        let key = self.stage(stage)?.summary.key?;
        let record: ResultRecord = read_json(&self.stage_folder(stage).join(RESULT_FILE))?;
        (record.key.result_key() == key).then_some(record)
    }

    /// Where the time of a stage's process went, where it was recorded.
    pub fn profile(&self, stage: &str) -> Option<Summary> {
        read_json(&self.stage_folder(stage).join(PROFILE_FILE))
    }

    /// The trace of the run, or of a stage of a run that goes on or was cut off, where there is one, and those that
    /// programs of stages have written.
    pub fn traces(&self) -> Vec<PathBuf> {
        let of_stages: Vec<PathBuf> = self.stages.iter().map(|stage| self.stage_folder(&stage.summary.stage)).collect();
        let folders = std::iter::once(&self.folder).chain(&of_stages);
        let ours = folders.map(|folder| folder.join(TRACE_FILE)).filter(|trace| trace.is_file());
        ours.chain(of_stages.iter().flat_map(|folder| own_traces(folder))).collect()
    }

    /// What the process of a stage was told, where one was started.
    pub fn job(&self, stage: &str) -> Option<Job> {
        read_json(&self.stage_folder(stage).join(JOB_FILE))
    }

    fn begin(plan: RunPlan, state: RunState, folder: &Path) -> Self {
        let RunPlan { run, pipeline, file, started, program, host, stages, .. } = plan;
        let summary = RunSummary {
            run,
            pipeline,
            file,
            started,
            state,
            seconds: None,
            counts: Counts::default(),
            damaged_lines: 0,
        };
        let stages = stages.into_iter().map(RecordedStage::waiting).collect();
        let (published, gates) = (Vec::new(), Vec::new());
        Self { program, host, summary, stages, published, gates, folder: folder.to_owned() }
    }

    fn apply_all(&mut self, words: Words) -> io::Result<()> {
        let mut events = Events::open(&self.folder, words)?;
        // A run of a thousand stages has thousands of events.
        let stages = self.stages.iter().enumerate();
        let position = stages.map(|(position, stage)| (stage.summary.stage.clone(), position)).collect();
        for timed in events.by_ref() {
            self.apply(timed?, &position);
        }
        self.summary.damaged_lines = events.damaged();
        if self.summary.seconds.is_none() {
            self.summary.counts = self.counts_so_far();
            if self.summary.state == RunState::CutOff && self.filled_the_disk() {
                self.summary.state = RunState::Failed;
            }
        }
        Ok(())
    }

    /// Whether a stage failed for good since the disk was full, which may have had no room for the run's end either.
    fn filled_the_disk(&self) -> bool {
        let cause = |stage: &RecordedStage| stage.failure().map(|failure| failure.cause);
        self.stages.iter().any(|stage| cause(stage) == Some(Cause::DiskFull))
    }

    fn counts_so_far(&self) -> Counts {
        let of = |status: &str| self.stages.iter().filter(|stage| stage.summary.status == status).count();
        Counts { done: of("done"), cached: of("cached"), failed: of("failed"), skipped: of("skipped") }
    }

    fn apply(&mut self, TimedEvent { time, event }: TimedEvent, position: &BTreeMap<String, usize>) {
        match event {
            RunEvent::Published { stage, output, path, .. } => {
                // What was made again is published again.
                self.published.retain(|copy| copy.path != path);
                self.published.push(RecordedCopy { stage, output, path, failed: None });
            }
            RunEvent::PublishFailed { stage, output, path, failure } => {
                self.published.push(RecordedCopy { stage, output, path, failed: Some(failure.messages) });
            }
            RunEvent::GateJudged { gate, holds, because, .. } => {
                self.gates.push(RecordedGate { gate, holds, because });
            }
            RunEvent::RunFinished { conclusion, counts, seconds } => {
                self.summary.state = conclusion.into();
                self.summary.counts = counts;
                self.summary.seconds = Some(seconds);
            }
            event => {
                let stage = stage_of(&event).and_then(|stage| position.get(stage));
                if let Some(position) = stage {
                    self.stages[*position].apply(time, event);
                }
            }
        }
    }
}

/// The stage that something happened to.
fn stage_of(event: &RunEvent) -> Option<&str> {
    match event {
        RunEvent::StageCached { stage, .. }
        | RunEvent::StageStarted { stage, .. }
        | RunEvent::StageWaiting { stage, .. }
        | RunEvent::StageJob { stage, .. }
        | RunEvent::Worker { stage, .. }
        | RunEvent::StageDone { stage, .. }
        | RunEvent::StageFailed { stage, .. }
        | RunEvent::StageRebuilding { stage, .. }
        | RunEvent::ResultFetching { stage, .. }
        | RunEvent::ResultFetched { stage, .. }
        | RunEvent::ResultRefused { stage, .. }
        | RunEvent::StageSkipped { stage, .. }
        | RunEvent::Published { stage, .. }
        | RunEvent::PublishFailed { stage, .. } => Some(stage),
        RunEvent::RunStarted { .. }
        | RunEvent::Pinning { .. }
        | RunEvent::Checked { .. }
        | RunEvent::ResultSent { .. }
        | RunEvent::ResultNotSent { .. }
        | RunEvent::RemoteFailed { .. }
        | RunEvent::GateJudged { .. }
        | RunEvent::RunFinished { .. } => None,
    }
}

impl From<Conclusion> for RunState {
    fn from(conclusion: Conclusion) -> Self {
        match conclusion {
            Conclusion::Succeeded => Self::Succeeded,
            Conclusion::Failed => Self::Failed,
            Conclusion::Interrupted => Self::Interrupted,
        }
    }
}

impl RecordedStage {
    fn waiting(plan: RunStage) -> Self {
        let summary = StageSummary {
            stage: plan.id.clone(),
            kind: plan.kind.clone(),
            status: "waiting".to_owned(),
            key: None,
            seconds: None,
            peak_memory_bytes: None,
            declared: plan.declared.clone().unwrap_or_else(|| plan.id.clone()),
            axes: plan.axes.clone(),
        };
        Self {
            summary,
            plan,
            why: Vec::new(),
            threads: None,
            attempts: Vec::new(),
            outputs: BTreeMap::new(),
            warnings: Vec::new(),
            reports: Vec::new(),
        }
    }

    /// The failure that it ended with.
    pub fn failure(&self) -> Option<&Failure> {
        let last = self.attempts.last()?.failure.as_ref();
        last.filter(|_| self.summary.status == "failed")
    }

    fn apply(&mut self, time: String, event: RunEvent) {
        match event {
            RunEvent::StageCached { key, .. } => self.becomes("cached", Some(key)),
            RunEvent::StageStarted { why, attempt, threads, log_from, .. } => {
                // A key in the summary leads to a result, and this one has none yet.
                self.becomes("started", None);
                // A later attempt only says that it is one.
                if attempt == 1 || self.why.is_empty() {
                    self.why = why;
                }
                self.threads = Some(threads);
                self.attempts.push(Attempt::begun(attempt, time, log_from));
            }
            RunEvent::StageDone { key, seconds, peak_memory_bytes, outputs, .. } => {
                self.end("done", seconds, None);
                self.summary.key = Some(key);
                self.summary.peak_memory_bytes = Some(peak_memory_bytes);
                self.outputs = outputs;
            }
            RunEvent::StageFailed { failure, seconds, retry_in_seconds, .. } => {
                let status = if retry_in_seconds.is_some() { "waiting" } else { "failed" };
                self.end(status, seconds, Some(failure));
            }
            RunEvent::StageSkipped { because, .. } => {
                self.becomes("skipped", None);
                self.why = vec![because];
            }
            RunEvent::Worker { said: WorkerEvent::Warning { message }, .. } => self.warnings.push(message),
            RunEvent::Worker { said: WorkerEvent::Report { text, .. }, .. } => self.reports.push(text),
            RunEvent::ResultRefused { failure, .. } => self.warnings.push(failure.messages.join(": ")),
            RunEvent::Worker { .. }
            | RunEvent::StageWaiting { .. }
            | RunEvent::StageJob { .. }
            | RunEvent::StageRebuilding { .. }
            | RunEvent::ResultFetching { .. }
            | RunEvent::ResultFetched { .. }
            | RunEvent::ResultSent { .. }
            | RunEvent::ResultNotSent { .. }
            | RunEvent::RemoteFailed { .. }
            | RunEvent::GateJudged { .. }
            | RunEvent::Published { .. }
            | RunEvent::PublishFailed { .. }
            | RunEvent::RunStarted { .. }
            | RunEvent::Pinning { .. }
            | RunEvent::Checked { .. }
            | RunEvent::RunFinished { .. } => {}
        }
    }

    fn becomes(&mut self, status: &str, key: Option<Digest>) {
        status.clone_into(&mut self.summary.status);
        self.summary.key = key;
    }

    fn end(&mut self, status: &str, seconds: f64, failure: Option<Failure>) {
        status.clone_into(&mut self.summary.status);
        self.summary.seconds = Some(seconds);
        match self.attempts.last_mut() {
            Some(attempt) if attempt.seconds.is_none() => {
                attempt.seconds = Some(seconds);
                attempt.failure = failure;
            }
            // A stage may fail before its process is started.
            Some(_) | None => {
                let attempt = Attempt { seconds: Some(seconds), failure, ..Attempt::begun(0, String::new(), 0) };
                self.attempts.extend(attempt.failure.is_some().then_some(attempt));
            }
        }
    }
}

impl Attempt {
    pub fn begun(number: u32, started: String, log_from: u64) -> Self {
        Self { number, started, seconds: None, failure: None, log_from }
    }
}
