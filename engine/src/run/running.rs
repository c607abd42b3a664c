//! A stage's process while it is alive, and what it has said.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cache::{Lock, OutputRecord, Staging};
use devices::lease::Lease;
use serde_json::{Map, Value};

use crate::error::Failure;
use crate::execute::{Process, Stop};
use crate::forecast::Work;
use crate::memory::Kills;
use crate::protocol::WorkerEvent;

/// A stage's process. The locks and the folder go with this, when the process is gone.
pub(super) struct Running {
    pub process: Box<dyn Process>,
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

impl Running {
    /// Takes in what the process said. How it ended is kept; all else is for the user.
    pub(super) fn hear(&mut self, event: WorkerEvent) -> Option<WorkerEvent> {
        if matches!(event, WorkerEvent::Started { .. }) {
            // A cluster may have stopped it and started it once more: what it said last was not its last word.
            (self.finished, self.failed) = (None, None);
        }
        match event {
            WorkerEvent::Finished { outputs, how } => self.finished = Some((outputs, how)),
            WorkerEvent::Failed(failure) => self.failed = Some(failure),
            said @ (WorkerEvent::Started { .. }
            | WorkerEvent::Progress { .. }
            | WorkerEvent::Metrics { .. }
            | WorkerEvent::Checkpoint { .. }
            | WorkerEvent::Warning { .. }
            | WorkerEvent::Note { .. }
            | WorkerEvent::Text { .. }
            | WorkerEvent::Report { .. }) => return Some(said),
        }
        None
    }

    pub(super) fn stop(&mut self, how: Stop, kill_at: Instant) {
        self.process.stop(how);
        self.kill_at = Some(kill_at);
    }

    pub(super) fn next_alarm(&self) -> Option<Instant> {
        self.timeout_at.into_iter().chain(self.kill_at).min()
    }

    /// Kills it if it was asked to stop and did not, and asks it to where it has run for too long.
    pub(super) fn heed_alarms(&mut self, now: Instant, grace: Duration) {
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(self.kill_at) {
            self.process.stop(Stop::Kill);
            self.kill_at = None;
        }
        if is_due(self.timeout_at) {
            self.timeout_at = None;
            self.timed_out = true;
            self.stop(Stop::Ask, now + grace);
        }
    }
}
