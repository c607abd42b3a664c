//! Room on the machine: which stages may run at the same time, and what one waits for that may not.

use std::mem::discriminant;
use std::time::{Duration, Instant};

use super::devices::{DEVICE_MEMORY_POLL, LEASE_POLL};
use super::event::{RunEvent, WaitsFor};
use super::scheduler::Scheduler;
use super::stage_run::{Running, StageRun};
use crate::device::is_on_processor;
use crate::error::{Cause, StageError};
use crate::memory::size;
use crate::preflight::Estimate;
use crate::protocol::WorkerEvent;
use crate::stage::{LessMemory, Threads};

/// How often free memory is looked at, of which nobody tells that there is more.
const MEMORY_POLL: Duration = Duration::from_millis(500);

impl Scheduler<'_> {
    /// What keeps a stage from starting beside those that run, if anything.
    pub(super) fn not_admitted_for(&mut self, stage: usize, threads: usize) -> Option<WaitsFor> {
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
    pub(super) fn wait_for_admission(&mut self, stage: usize, waits_for: WaitsFor) {
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

// Memory that a stage is started with: what the file asks for, else what its kind estimates, against what the machine
// has.
//
// An estimate is as good as its kind says. What does not fit even at its lower end is not started: it would push
// everything else out, and be killed hours later. What may fit is started, and said.

impl Scheduler<'_> {
    /// The memory that a stage that is about to start is promised.
    pub(super) fn memory_wanted(&mut self, stage: usize) -> Option<Estimate> {
        let planned = &self.plan.stages[stage];
        if let Some(bytes) = planned.resources.memory {
            return Some(Estimate { bytes, margin: 0.0 });
        }
        if let Some(known) = self.stages[stage].estimate {
            return known;
        }
        // With other parameters than those of the file the figures of the file do not hold.
        let as_filed = self.stages[stage].parameters.is_none();
        let estimate = as_filed.then(|| planned.preflight(&self.facts_of_inputs(stage)));
        let estimate = estimate.and_then(|ahead| ahead.estimate());
        self.stages[stage].estimate = Some(estimate);
        estimate
    }

    /// Refuses a stage that needs more memory than there is, or changes it to need less where it can do with that.
    ///
    /// What the file asks for was compared before the run began.
    pub(super) fn require_memory(&mut self, stage: usize) -> Result<(), StageError> {
        let planned = &self.plan.stages[stage];
        if planned.resources.memory.is_some() || !is_on_processor(planned) || self.is_on_cluster(stage) {
            return Ok(());
        }
        let (Some(estimate), Some(total)) = (self.memory_wanted(stage), self.options.memory.total()) else {
            return Ok(());
        };
        if estimate.least() <= total {
            return Ok(());
        }
        let planned = &self.plan.stages[stage];
        let message = format!("it is estimated to take {estimate} of memory, and this machine has {}", size(total));
        let error = StageError::new(Cause::OutOfMemory, message.clone());
        match planned.bound.with_less_memory(&planned.parameters) {
            LessMemory::Set { parameters, change } if planned.retries.on.contains(&Cause::OutOfMemory) => {
                let run = &mut self.stages[stage];
                run.parameters = Some(parameters);
                run.less_memory.push(change.clone());
                run.estimate = None;
                self.warn(stage, format!("{message}: {change}"));
                Ok(())
            }
            LessMemory::Set { change, .. } => Err(error.with_help(format!("try it with less memory: {change}"))),
            LessMemory::Advice(advice) => Err(error.with_help(advice)),
            LessMemory::Nothing => Err(error.with_help(format!(
                "if that is wrong, say what it needs: `{}.resources.memory=1GiB`",
                planned.declared
            ))),
        }
    }

    /// What a stage waits for whose memory is not free.
    pub(super) fn lacks_memory(&mut self, stage: usize) -> Option<WaitsFor> {
        if !is_on_processor(&self.plan.stages[stage]) {
            return None;
        }
        let wanted = self.memory_wanted(stage)?;
        let free_bytes = self.free_memory()?;
        let estimated = wanted.margin > 0.0;
        (wanted.least() > free_bytes).then_some(WaitsFor::Memory { wanted_bytes: wanted.bytes, free_bytes, estimated })
    }

    /// Says that a stage that is started now may take more than is free.
    pub(super) fn warn_of_memory(&mut self, stage: usize) {
        if self.stages[stage].attempts > 1 || !is_on_processor(&self.plan.stages[stage]) || self.is_on_cluster(stage) {
            return;
        }
        let (Some(wanted), Some(free)) = (self.memory_wanted(stage), self.free_memory()) else { return };
        if wanted.bytes > free {
            let free = size(free);
            self.warn(
                stage,
                format!("it is estimated to take {wanted} of memory, and {free} are free: it may not fit"),
            );
        }
    }

    /// Memory that a running stage was promised and does not hold yet is not free, though the kernel says so.
    fn free_memory(&self) -> Option<u64> {
        let memory = &self.options.memory;
        let held = |running: &Running| running.process.id().and_then(|id| memory.held_by(id)).unwrap_or(0);
        let promised: u64 = self.running().map(|running| running.memory.saturating_sub(held(running))).sum();
        Some(memory.available()?.saturating_sub(promised))
    }

    fn warn(&mut self, stage: usize, message: String) {
        let (stage, said) = (self.stages[stage].id.clone(), WorkerEvent::Warning { message });
        self.tell(RunEvent::Worker { stage, said });
    }
}

// Which of several stages that could start is started first: the one with the longest chain of work behind it.

/// The stages in the order in which they are to be started: the longest remaining chain first, equal ones in the order
/// of the plan. `weight` is what a stage itself takes, and must be positive; so the order is one of the graph, too.
pub(super) fn by_longest_chain(stages: &[StageRun], weight: impl Fn(&StageRun) -> f64) -> Vec<usize> {
    // Each stage stands after those it depends on, so from the end on what follows each is known.
    let mut longest = vec![0.0_f64; stages.len()];
    for (place, stage) in stages.iter().enumerate().rev() {
        longest[place] += weight(stage);
        for before in &stage.upstream {
            longest[*before] = longest[*before].max(longest[place]);
        }
    }
    let mut order: Vec<usize> = (0..stages.len()).collect();
    order.sort_by(|one, other| longest[*other].total_cmp(&longest[*one]).then(one.cmp(other)));
    order
}
