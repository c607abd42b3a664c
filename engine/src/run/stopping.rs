//! Stopping a run: the first Ctrl-C asks its stages to save and stop, the second kills them.

use std::time::Instant;

use super::scheduler::Scheduler;
use super::signals::Request;
use crate::execute::Stop;

/// Whether the user has asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopping {
    No,
    Requested,
    Killed,
}

impl Scheduler<'_> {
    /// Handles Ctrl-C: the first asks the stages to stop, the second kills them.
    pub(super) fn interrupt(&mut self, request: Request) {
        if request == Request::StopOnce && self.stopping != Stopping::No {
            return;
        }
        let (next, how) = match self.stopping {
            Stopping::No => (Stopping::Requested, Stop::Ask),
            Stopping::Requested | Stopping::Killed => (Stopping::Killed, Stop::Kill),
        };
        self.stopping = next;
        self.remote_cache.stop();
        self.stages.stop(how, Instant::now() + self.options.grace);
        self.stages.look_at_all();
    }
}
