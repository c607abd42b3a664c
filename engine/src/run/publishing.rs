//! Copies out of the store while a run goes on: each on a thread of its own, whose end the loop hears.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use super::event::RunEvent;
use super::scheduler::Scheduler;
use super::stage_run::PublishEnd;
use crate::error::Cause;
use crate::error::chain;
use crate::home::advice_when_full;
use crate::publish::{PublishError, Published, publish, target};

impl Scheduler<'_> {
    /// Copies what a stage's result publishes, each on a thread of its own.
    pub(super) fn publish(&mut self, stage: usize) {
        let stage = &self.stages[stage];
        for (entry, wanted) in self.plan.publish.iter().enumerate().filter(|(_, wanted)| wanted.stage == stage.id) {
            let Some(output) = stage.outputs.get(&wanted.output) else { continue };
            let (output, seen) = (output.clone(), self.home.published_files());
            let target = target(self.plan, wanted);
            let (store, publisher, on_changed) =
                (self.store.clone(), self.publisher.clone(), self.options.on_changed_target);
            self.publishing += 1;
            self.timeline.iter_mut().for_each(|timeline| timeline.begin(&wanted.stage, "publish"));
            thread::spawn(move || {
                let copy = AssertUnwindSafe(|| publish(&store, &output, &target, on_changed, &seen));
                // The loop waits for this message; without it a defect would be a run that never ends.
                let result = catch_unwind(copy).unwrap_or(Err(PublishError::Panicked));
                let _ = publisher.send(PublishEnd { entry, target, result });
            });
        }
    }

    /// Hears the end of a copy.
    pub(super) fn end_publish(&mut self, end: PublishEnd) {
        self.publishing -= 1;
        let PublishEnd { entry, target: path, result } = end;
        let wanted = &self.plan.publish[entry];
        let (stage, output) = (wanted.stage.clone(), wanted.output.clone());
        let event = match result {
            Ok(published) => RunEvent::Published { stage, output, path, written: published == Published::Written },
            Err(error) => {
                if self.heal_published(&stage, &error) {
                    return;
                }
                self.publish_failed = true;
                let cause = error.cause();
                let help = match cause {
                    Cause::DiskFull => Some(advice_when_full(&path)),
                    _ => error.help().map(str::to_owned),
                };
                RunEvent::PublishFailed { stage, output, path, cause, messages: chain(&error), help }
            }
        };
        self.tell(event);
    }
}
