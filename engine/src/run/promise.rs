//! Memory that a stage is started with: what the file asks for, else what its kind estimates, against what the machine
//! has.
//!
//! An estimate is as good as its kind says. What does not fit even at its lower end is not started: it would push
//! everything else out, and be killed hours later. What may fit is started, and said.

use super::event::{RunEvent, WaitsFor};
use super::scheduler::Scheduler;
use super::stage_run::Running;
use crate::device::is_on_processor;
use crate::error::{Cause, StageError};
use crate::memory::size;
use crate::preflight::Estimate;
use crate::protocol::WorkerEvent;
use crate::stage::LessMemory;

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
