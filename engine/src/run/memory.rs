//! The memory that a stage is started with: what the file asks for, else what its kind estimates, against what the
//! machine has.
//!
//! An estimate is as good as its kind says. What does not fit even at its lower end is not started: it would push
//! everything else out, and be killed hours later. What may fit is started, and said.

use super::event::RunEvent;
use super::scheduler::Scheduler;
use crate::device::is_on_processor;
use crate::error::{Cause, StageError};
use crate::forecast::{Ahead, Estimate};
use crate::memory::size;
use crate::protocol::WorkerEvent;
use crate::stage::LessMemory;

impl Scheduler<'_> {
    /// The memory that a stage that is about to start is promised.
    pub(super) fn memory_wanted(&self, stage: usize) -> Option<Estimate> {
        let (planned, run) = (&self.plan.stages[stage], &self.stages[stage]);
        if let Some(bytes) = planned.resources.memory {
            return Some(Estimate { bytes, margin: 0.0 });
        }
        // With other parameters than those of the file the figures of the file do not hold.
        let as_filed = run.parameters.is_none();
        let inputs = self.facts_of_inputs(stage);
        let estimate = || as_filed.then(|| planned.forecast(&Ahead::of_results(&inputs, planned.span)))?.estimate();
        *run.estimate.get_or_init(estimate)
    }

    /// Refuses a stage that needs more memory than there is, or changes it to need less where it can do with that.
    ///
    /// What the file asks for was compared before the run began.
    pub(super) fn require_memory(&mut self, stage: usize) -> Result<(), StageError> {
        let planned = &self.plan.stages[stage];
        if planned.resources.memory.is_some() || !self.is_on_this_processor(stage) {
            return Ok(());
        }
        let Some(estimate) = self.memory_wanted(stage) else { return Ok(()) };
        let Some(total) = self.options.memory.total() else { return Ok(()) };
        if estimate.least() <= total {
            return Ok(());
        }
        let message = format!("it is estimated to take {estimate} of memory, and this machine has {}", size(total));
        let error = StageError::new(Cause::OutOfMemory, message.clone());
        match planned.bound.with_less_memory(&planned.parameters) {
            LessMemory::Set { parameters, change } if planned.retries.on.contains(&Cause::OutOfMemory) => {
                self.stages.use_less_memory(stage, parameters, change.clone());
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

    /// Says that a stage that is started now may take more than is free.
    pub(super) fn warn_of_memory(&mut self, stage: usize) {
        if self.stages[stage].attempts > 1 || !self.is_on_this_processor(stage) {
            return;
        }
        let Some(wanted) = self.memory_wanted(stage) else { return };
        let Some(free) = self.admission.free_memory() else { return };
        if wanted.bytes > free {
            let free = size(free);
            self.warn(
                stage,
                format!("it is estimated to take {wanted} of memory, and {free} are free: it may not fit"),
            );
        }
    }

    fn is_on_this_processor(&self, stage: usize) -> bool {
        is_on_processor(&self.plan.stages[stage]) && !self.executors.is_on_cluster(stage)
    }

    fn warn(&mut self, stage: usize, message: String) {
        let said = WorkerEvent::Warning { message };
        self.recorder.tell(RunEvent::Worker { stage: self.id(stage), said });
    }
}
