//! Stopping stages: because the user wants to, or because their time is over.

use std::time::Instant;

use super::scheduler::Scheduler;
use super::signals::Request;
use super::stage_run::{State, Stopping};
use crate::execute::Stop;

impl Scheduler<'_> {
    /// Handles Ctrl-C: the first asks the stages to stop, the second kills them.
    pub(super) fn interrupt(&mut self, request: Request) {
        if request == Request::StopOnce && self.stopping != Stopping::No {
            return;
        }
        let (next, how) = match self.stopping {
            Stopping::No => (Stopping::Asked, Stop::Ask),
            Stopping::Asked | Stopping::Killed => (Stopping::Killed, Stop::Kill),
        };
        self.stopping = next;
        self.remote_cache.stop();
        let kill_at = Instant::now() + self.options.grace;
        for running in self.stages.iter_mut().filter_map(|stage| stage.running.as_mut()) {
            running.process.stop(how);
            running.kill_at = Some(kill_at);
        }
    }

    /// When the loop has to look again though nobody spoke.
    pub(super) fn next_alarm(&self) -> Option<Instant> {
        let of_processes = self.stages.iter().filter_map(|stage| stage.running.as_ref());
        let of_processes = of_processes.flat_map(|running| [running.timeout_at, running.kill_at]);
        let of_waits = self.stages.iter().filter(|stage| stage.state == State::Ready).map(|stage| stage.not_before);
        of_processes.chain(of_waits).flatten().min()
    }

    /// Kills what was asked to stop and did not, and stops what has run for too long.
    pub(super) fn heed_alarms(&mut self) {
        let now = Instant::now();
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let grace = self.options.grace;
        for running in self.stages.iter_mut().filter_map(|stage| stage.running.as_mut()) {
            if due(running.kill_at) {
                running.process.stop(Stop::Kill);
                running.kill_at = None;
            }
            if due(running.timeout_at) {
                running.timeout_at = None;
                running.timed_out = true;
                running.process.stop(Stop::Ask);
                running.kill_at = Some(now + grace);
            }
        }
    }
}
