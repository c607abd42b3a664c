//! A stage within a run: how it stands, what it made, and its process while it has one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use cache::{Digest, KeyDocument, Lock, OutputRecord, Staging};
use serde_json::{Map, Value};

use super::outcome::Failure;
use super::state::State;
use crate::execute::Process;
use crate::plan::Plan;
use crate::protocol::StoredOutput;

/// A stage within the run.
pub(super) struct StageRun {
    pub id: String,
    pub state: State,
    /// Stages that it reads or waits for.
    pub upstream: Vec<usize>,
    /// Made when its inputs are there.
    pub key: Option<Keyed>,
    pub outputs: BTreeMap<String, OutputRecord>,
    pub attempts: u32,
    pub heals: u32,
    /// Set while it waits for another try, or for another run.
    pub not_before: Option<Instant>,
    pub said_waiting: bool,
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
    pub timeout_at: Option<Instant>,
    pub kill_at: Option<Instant>,
    pub timed_out: bool,
    pub finished: Option<(BTreeMap<String, StoredOutput>, Map<String, Value>)>,
    pub failed: Option<Failure>,
    pub _locks: [Lock; 2],
    pub _staging: Staging,
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
            heals: 0,
            not_before: None,
            said_waiting: false,
            running: None,
            failure: None,
        }
    });
    runs.collect()
}
