//! Room on the machine: which stages may run at the same time, and what one waits for that may not.

use std::mem::discriminant;
use std::time::{Duration, Instant};

use super::devices::{DEVICE_MEMORY_POLL, LEASE_POLL};
use super::event::{RunEvent, WaitsFor};
use super::scheduler::Scheduler;
use super::stage_run::Running;
use crate::stage::Threads;

/// How often free memory is looked at, of which nobody tells that there is more.
const MEMORY_POLL: Duration = Duration::from_millis(500);

impl Scheduler<'_> {
    /// What keeps a stage from starting beside those that run, if anything.
    pub(super) fn lacks_room(&mut self, stage: usize, threads: usize) -> Option<WaitsFor> {
        let running = self.running().count();
        if let Some(most) = self.options.jobs.filter(|most| running >= *most) {
            return Some(WaitsFor::Jobs { most });
        }
        if self.is_on_cluster(stage) {
            return self.lacks_slots(stage);
        }
        let in_use: usize = self.running().map(|other| other.threads).sum();
        // One that runs alone may always.
        if in_use > 0 && in_use + threads > self.cores {
            return Some(WaitsFor::Threads { wanted: threads, free: self.cores.saturating_sub(in_use) });
        }
        self.lacks_slots(stage).or_else(|| self.lacks_memory(stage))
    }

    /// The threads that a stage gets.
    pub(super) fn threads_wanted(&self, stage: usize) -> usize {
        let planned = &self.plan.stages[stage];
        let most = match planned.bound.threads() {
            Threads::One => 1,
            Threads::Many => self.share_of_cores(stage),
        };
        planned.resources.threads.unwrap_or(most).clamp(1, self.cores)
    }

    /// Lets a stage wait, and says so where it is news.
    pub(super) fn wait(&mut self, stage: usize, waits_for: WaitsFor, look_again: Option<Duration>) {
        let run = &mut self.stages[stage];
        run.not_before = look_again.map(|after| Instant::now() + after);
        let said = run.waits_for.as_ref().is_some_and(|said| discriminant(said) == discriminant(&waits_for));
        run.waits_for = Some(waits_for.clone());
        if !said {
            let stage = run.id.clone();
            self.tell(RunEvent::StageWaiting { stage, waits_for });
        }
    }

    /// Lets a stage wait for room.
    pub(super) fn wait_for_room(&mut self, stage: usize, waits_for: WaitsFor) {
        let look_again = match waits_for {
            WaitsFor::Memory { .. } => Some(MEMORY_POLL),
            WaitsFor::Devices { wanted_bytes: Some(_), .. } => Some(DEVICE_MEMORY_POLL),
            WaitsFor::Devices { wanted_bytes: None, .. } => Some(LEASE_POLL),
            WaitsFor::AnotherRun { .. }
            | WaitsFor::Queue { .. }
            | WaitsFor::Jobs { .. }
            | WaitsFor::Threads { .. }
            | WaitsFor::Slots { .. } => None,
        };
        self.wait(stage, waits_for, look_again);
    }

    pub(super) fn running(&self) -> impl Iterator<Item = &Running> {
        self.stages.iter().filter_map(|stage| stage.running.as_ref())
    }

    fn lacks_slots(&self, stage: usize) -> Option<WaitsFor> {
        let taken = |name: &str| -> u32 {
            let running = self.stages.iter().zip(&self.plan.stages).filter(|(run, _)| run.running.is_some());
            running.filter_map(|(_, planned)| planned.resources.slots.get(name).copied()).sum()
        };
        self.plan.stages[stage].resources.slots.iter().find_map(|(name, &wanted)| {
            let free = self.plan.slots.get(name).copied().unwrap_or(0).saturating_sub(taken(name));
            (wanted > free).then(|| WaitsFor::Slots { name: name.clone(), wanted, free })
        })
    }
}
