//! A stage within a run: how it stands, what it made, and its process while it has one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use cache::{Digest, KeyDocument, Lock, OutputRecord, Staging};
use devices::lease::Lease;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::event::WaitsFor;
use crate::error::Failure;
use crate::execute::Process;
use crate::memory::Kills;
use crate::plan::{Plan, Wanted};
use crate::preflight::{Estimate, Work};
use crate::publish::{PublishError, Published};

/// The end of a copy out of the store.
pub(super) struct PublishEnd {
    pub entry: usize,
    pub target: PathBuf,
    pub result: Result<Published, PublishError>,
}

/// A stage within the run.
pub(super) struct StageRun {
    pub id: String,
    pub state: State,
    /// Stages that it reads or waits for.
    pub upstream: Vec<usize>,
    /// Made when its inputs are there.
    pub key: Option<Keyed>,
    pub outputs: BTreeMap<String, OutputRecord>,
    /// Processes that were started for it.
    pub attempts: u32,
    /// Those of them that count towards `retries.max`: a try with less memory does not.
    pub tries: u32,
    /// Jobs of a cluster that were submitted for it in this run.
    pub submissions: u32,
    /// What was changed, one after the other, since its memory did not suffice.
    pub less_memory: Vec<String>,
    /// Its parameters since then.
    pub parameters: Option<Value>,
    /// The memory that it is estimated to take; `None` until that was asked.
    pub estimate: Option<Option<Estimate>>,
    /// It is to be made although it may have a result.
    pub again: bool,
    /// The result that it had then.
    pub before: Option<BTreeMap<String, OutputRecord>>,
    /// Its result was looked for under its key, and is not there.
    pub looked_up: bool,
    pub rebuilds: u32,
    /// Set while it waits for another try, or for another run.
    pub not_before: Option<Instant>,
    /// What it was last said to wait for.
    pub waits_for: Option<WaitsFor>,
    pub running: Option<Running>,
    pub failure: Option<Failure>,
}

/// A stage's key.
pub(super) struct Keyed {
    pub document: KeyDocument,
    pub key: Digest,
}

/// A stage's process. The locks and the folder go with this, when the process is gone.
pub(super) struct Running {
    pub process: Box<dyn Process>,
    pub threads: usize,
    /// Bytes of memory that it was promised.
    pub memory: u64,
    /// What was killed because memory ran out on this machine before it began.
    pub kills: Kills,
    pub log: PathBuf,
    /// Where its own part of the log begins.
    pub log_from: u64,
    pub timeout_at: Option<Instant>,
    pub kill_at: Option<Instant>,
    pub timed_out: bool,
    pub finished: Option<(BTreeMap<String, OutputRecord>, Map<String, Value>)>,
    pub failed: Option<Failure>,
    /// What there was to do when it was started.
    pub work: Option<Work>,
    pub _locks: Vec<Lock>,
    /// What keeps others from its devices.
    pub _lease: Option<Lease>,
    /// A job of a cluster makes its own, on its node.
    pub _staging: Option<Staging>,
}

/// The stages of a plan, before anything has happened.
pub(super) fn stage_runs(plan: &Plan) -> Vec<StageRun> {
    let position: BTreeMap<&str, usize> =
        plan.stages.iter().enumerate().map(|(position, stage)| (stage.id.as_str(), position)).collect();
    let runs = plan.stages.iter().map(|stage| {
        let before = stage.inputs.iter().map(|input| &input.stage).chain(&stage.needs);
        let upstream: BTreeSet<usize> = before.filter_map(|id| position.get(id.as_str()).copied()).collect();
        StageRun {
            id: stage.id.clone(),
            state: State::Waiting,
            upstream: upstream.into_iter().collect(),
            key: None,
            outputs: BTreeMap::new(),
            attempts: 0,
            tries: 0,
            submissions: 0,
            less_memory: Vec::new(),
            parameters: None,
            estimate: None,
            again: stage.wanted == Wanted::Again,
            before: None,
            looked_up: false,
            rebuilds: 0,
            not_before: None,
            waits_for: None,
            running: None,
            failure: None,
        }
    });
    runs.collect()
}

// The states of a stage within a run, and which may follow which.

/// How a stage stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A stage before it has no result yet.
    Waiting,
    /// Its inputs are there.
    Ready,
    /// Its process is alive.
    Running,
    /// Its result was there already.
    Cached,
    /// Its process has made the result.
    Done,
    /// It failed for good.
    Failed,
    /// It was not run, since another failed or the user stopped the run.
    Skipped,
}

impl State {
    /// Whether its result can be read.
    pub fn has_result(self) -> bool {
        matches!(self, Self::Cached | Self::Done)
    }

    /// Whether nothing more happens to it, unless one of its results turns out to be damaged.
    pub fn is_settled(self) -> bool {
        matches!(self, Self::Cached | Self::Done | Self::Failed | Self::Skipped)
    }

    /// Whether `next` may follow. Beside the plain way (waiting, ready, running, done) there are three more: a cached
    /// result, another try of a stage that failed, and a result that was damaged and is made again.
    pub(super) fn may_become(self, next: Self) -> bool {
        match self {
            Self::Waiting => matches!(next, Self::Ready | Self::Skipped),
            Self::Ready => {
                matches!(next, Self::Waiting | Self::Running | Self::Cached | Self::Failed | Self::Skipped)
            }
            Self::Running => matches!(next, Self::Done | Self::Failed | Self::Skipped | Self::Ready | Self::Waiting),
            Self::Cached | Self::Done => matches!(next, Self::Waiting),
            Self::Failed | Self::Skipped => false,
        }
    }
}

/// Whether the user has asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopping {
    No,
    Asked,
    Killed,
}
