//! Room on the machine: which stages may run at the same time.

use super::scheduler::Scheduler;
use crate::stage::Threads;

impl Scheduler<'_> {
    /// Whether a stage of so many threads may start beside those that run. One that runs alone may always.
    pub(super) fn has_room(&self, threads: usize) -> bool {
        let in_use: usize =
            self.stages.iter().filter_map(|other| other.running.as_ref()).map(|other| other.threads).sum();
        in_use == 0 || in_use + threads <= self.cores
    }

    /// The threads that a stage gets.
    pub(super) fn threads_wanted(&self, stage: usize) -> usize {
        let planned = &self.plan.stages[stage];
        let most = match planned.bound.threads() {
            Threads::One => 1,
            Threads::Many => self.cores,
        };
        planned.resources.threads.unwrap_or(most).clamp(1, self.cores)
    }
}
