//! Ending a stage: its result is recorded, or its failure is sorted into another try, a repair, or the end.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use cache::{OutputRecord, ResultRecord};
use serde_json::{Map, Value, json};

use super::event::{Compared, RunEvent};
use super::scheduler::Scheduler;
use super::stage_run::{PublishEnd, Running};
use super::stage_run::{State, Stopping};
use crate::error::{Cause, Failure, OrFail, chain};
use crate::execute::crash::{Evidence, crash};
use crate::execute::{Ending, ProcessExit};
use crate::explain::WORK;
use crate::history::stage_folder;
use crate::home::advice_when_full;
use crate::publish::{PublishError, Published, publish, target};
use crate::stage::LessMemory;

impl Scheduler<'_> {
    /// Decides what the end of a stage's process means. `running` still holds the locks until this returns, so that
    /// nobody else starts the stage before its result is recorded.
    pub(super) fn conclude(&mut self, stage: usize, mut running: Running, exit: ProcessExit) {
        if let (Some((outputs, mut how)), Ending::Code(0)) = (running.finished.take(), &exit.ending) {
            how.extend(running.work.take().map(|work| (WORK.to_owned(), json!(work))));
            return match self.record(stage, outputs, how, &exit) {
                Ok(()) => self.settle_done(stage, &exit),
                Err(failure) => self.fail(stage, failure, exit.ran),
            };
        }
        if self.stopping != Stopping::No {
            return self.settle_stopped(stage, &exit);
        }
        let mut failure = self.failure(stage, running, &exit);
        if failure.cause == Cause::CorruptInput && self.rebuild(stage, failure.object) {
            return;
        }
        let planned = &self.plan.stages[stage];
        let may_pass = planned.retries.on.contains(&failure.cause);
        if failure.cause.is_lack_of_memory() {
            let parameters = self.stages[stage].parameters.as_ref().unwrap_or(&planned.parameters);
            match planned.bound.with_less_memory(parameters) {
                LessMemory::Set { parameters, change } if may_pass => {
                    return self.try_with_less_memory(stage, failure, exit.ran, parameters, change);
                }
                LessMemory::Set { change, .. } => failure.help = Some(format!("try it with less memory: {change}")),
                LessMemory::Advice(advice) => failure.help = Some(advice),
                LessMemory::Nothing => {}
            }
        }
        if may_pass && self.stages[stage].tries <= planned.retries.max {
            return self.try_again(stage, failure, exit.ran);
        }
        self.fail(stage, failure, exit.ran);
    }

    /// Ends a stage for good.
    pub(super) fn fail(&mut self, stage: usize, mut failure: Failure, ran: Duration) {
        if failure.cause == Cause::DiskFull {
            failure.help = Some(self.home.advice_when_full());
        }
        self.transition(stage, State::Failed);
        self.failed.get_or_insert(stage);
        self.tell_failed(stage, &failure, ran, None, None);
        self.stages[stage].failure = Some(failure);
    }

    fn record(
        &mut self,
        stage: usize,
        outputs: BTreeMap<String, OutputRecord>,
        mut how: Map<String, Value>,
        exit: &ProcessExit,
    ) -> Result<(), Failure> {
        how.extend(self.recorder.circumstances(exit));
        self.note_to_send(stage);
        let run = &mut self.stages[stage];
        let keyed = run.key.as_ref().expect("a stage that ran has a key");
        if !run.less_memory.is_empty() {
            how.insert("less_memory".to_owned(), run.less_memory.clone().into());
        }
        let record = ResultRecord::new(keyed.document.clone(), self.plan.stages[stage].kind, outputs.clone(), how);
        let recorded = self.store.record(&keyed.key, &record);
        recorded.or_fail(Cause::Machine, || "cannot record the result".to_owned())?;
        // The record is in the store; this copy is for the day when the store has let go of it.
        let _ = self.recorder.keep_result(&run.id, &record);
        run.outputs = outputs;
        Ok(())
    }

    fn settle_done(&mut self, stage: usize, exit: &ProcessExit) {
        self.transition(stage, State::Done);
        let run = &mut self.stages[stage];
        run.again = false;
        let compared = run.before.take().map(|before| compare(&before, &run.outputs));
        let keyed = run.key.as_ref().expect("a stage that ran has a key");
        self.store.remove_partial_if_empty(&keyed.document.working_key());
        let outputs = run.outputs.clone();
        let event = RunEvent::StageDone {
            stage: run.id.clone(),
            key: keyed.key,
            seconds: exit.ran.as_secs_f64(),
            peak_memory_bytes: exit.peak_memory_bytes,
            outputs,
            compared,
        };
        self.tell(event);
        self.send(stage);
        self.has_result(stage);
    }

    fn settle_stopped(&mut self, stage: usize, exit: &ProcessExit) {
        self.transition(stage, State::Skipped);
        let because = match (&exit.ending, self.stopping) {
            (Ending::Signal(_), _) | (_, Stopping::Killed) => "interrupted and killed; what it had saved is kept",
            (Ending::Code(_), _) => "interrupted; what it had saved is kept",
        };
        let stage = self.stages[stage].id.clone();
        self.tell(RunEvent::StageSkipped { stage, because: because.to_owned(), cause: Some(Cause::Cancelled) });
    }

    fn try_again(&mut self, stage: usize, failure: Failure, ran: Duration) {
        let delay = self.plan.stages[stage].retries.delay_after(self.stages[stage].tries);
        self.stages[stage].not_before = Some(Instant::now() + delay);
        self.transition(stage, State::Ready);
        self.tell_failed(stage, &failure, ran, Some(delay), None);
    }

    /// Another try at once, with parameters that make the same result with less memory.
    fn try_with_less_memory(
        &mut self,
        stage: usize,
        failure: Failure,
        ran: Duration,
        parameters: Value,
        change: String,
    ) {
        let run = &mut self.stages[stage];
        run.parameters = Some(parameters);
        run.less_memory.push(change.clone());
        run.tries = 0;
        self.transition(stage, State::Ready);
        self.tell_failed(stage, &failure, ran, Some(Duration::ZERO), Some(change));
    }

    fn tell_failed(
        &mut self,
        stage: usize,
        failure: &Failure,
        ran: Duration,
        retry: Option<Duration>,
        retry_with: Option<String>,
    ) {
        let id = &self.stages[stage].id;
        let event = RunEvent::StageFailed {
            stage: id.clone(),
            cause: failure.cause,
            messages: failure.messages.clone(),
            help: failure.help.clone(),
            log: self.recorder.path().join(stage_folder(id)).join("log"),
            seconds: ran.as_secs_f64(),
            retry_in_seconds: retry.map(|delay| delay.as_secs_f64()),
            retry_with,
        };
        self.tell(event);
    }

    fn failure(&self, stage: usize, running: Running, exit: &ProcessExit) -> Failure {
        if let Some(verdict) = exit.verdict.clone() {
            return verdict;
        }
        if running.timed_out {
            return Failure::timeout(self.plan.stages[stage].timeout.unwrap_or_default());
        }
        let Running { failed, kills, log, log_from, .. } = running;
        let evidence = Evidence { memory: &self.options.memory, kills, log: &log, log_from };
        failed.unwrap_or_else(|| crash(exit, &evidence))
    }
}

fn compare(before: &BTreeMap<String, OutputRecord>, now: &BTreeMap<String, OutputRecord>) -> Compared {
    let identity =
        |outputs: &BTreeMap<String, OutputRecord>, name: &str| outputs.get(name).map(|output| output.identity);
    let differs = now.keys().filter(|name| identity(before, name) != identity(now, name));
    let outputs: Vec<String> = differs.cloned().collect();
    if outputs.is_empty() { Compared::Equal } else { Compared::Differs { outputs } }
}

// Copies out of the store while a run goes on: each on a thread of its own, whose end the loop hears.

impl Scheduler<'_> {
    /// Copies what a stage's result publishes, each on a thread of its own.
    pub(super) fn publish(&mut self, stage: usize) {
        let stage = &self.stages[stage];
        for (entry, wanted) in self.plan.publish.iter().enumerate().filter(|(_, wanted)| wanted.stage == stage.id) {
            let Some(output) = stage.outputs.get(&wanted.output) else { continue };
            let (output, seen) = (output.clone(), self.home.published_files());
            let (target, link) = (target(self.plan, wanted), wanted.link);
            let (store, publisher, on_changed) =
                (self.store.clone(), self.publisher.clone(), self.options.on_changed_target);
            self.publishing += 1;
            self.timeline.iter_mut().for_each(|timeline| timeline.begin(&wanted.stage, "publish"));
            thread::spawn(move || {
                let copy = AssertUnwindSafe(|| publish(&store, &output, (&target, link), on_changed, &seen));
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
                if self.rebuild_published(&stage, &error) {
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
