//! A stage within a run: how it stands, what it made, and its process while it has one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Instant;

use cache::{Digest, KeyDocument, Lock, OutputRecord, Staging};
use devices::lease::Lease;
use serde_json::{Map, Value};

use super::event::WaitsFor;
use super::state::State;
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
    pub heals: u32,
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
    /// What was killed for want of memory on this machine before it began.
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
            heals: 0,
            not_before: None,
            waits_for: None,
            running: None,
            failure: None,
        }
    });
    runs.collect()
}
