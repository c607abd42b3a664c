//! Ending a stage: its result is recorded, or its failure is sorted into another try, a repair, or the end.

use std::collections::BTreeMap;
use std::time::Duration;

use cache::{OutputRecord, ResultRecord};
use serde_json::{Map, Value, json};

use super::event::{Compared, RunEvent};
use super::running::Running;
use super::scheduler::Scheduler;
use super::stopping::Stopping;
use crate::error::{Cause, Failure, OrFail};
use crate::execute::crash::{Evidence, crash};
use crate::execute::{Ending, ProcessExit};
use crate::explain::WORK;
use crate::history::stage_folder;
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
                    self.stages.use_less_memory(stage, parameters, change.clone());
                    self.stages.retry_anew(stage);
                    return self.tell_failed(stage, failure, exit.ran, Some(Duration::ZERO), Some(change));
                }
                LessMemory::Set { change, .. } => failure.help = Some(format!("try it with less memory: {change}")),
                LessMemory::Advice(advice) => failure.help = Some(advice),
                LessMemory::Nothing => {}
            }
        }
        if may_pass && self.stages[stage].tries <= planned.retries.max {
            let delay = planned.retries.delay_after(self.stages[stage].tries);
            self.stages.retry(stage, delay);
            return self.tell_failed(stage, failure, exit.ran, Some(delay), None);
        }
        self.fail(stage, failure, exit.ran);
    }

    /// Ends a stage for good.
    pub(super) fn fail(&mut self, stage: usize, mut failure: Failure, ran: Duration) {
        if failure.cause == Cause::DiskFull {
            failure.help = Some(self.home.advice_when_full_for_a_stage(&failure.messages));
        }
        self.stages.fail(stage, failure.clone());
        self.tell_failed(stage, failure, ran, None, None);
    }

    fn record(
        &mut self,
        stage: usize,
        outputs: BTreeMap<String, OutputRecord>,
        mut how: Map<String, Value>,
        exit: &ProcessExit,
    ) -> Result<(), Failure> {
        how.extend(self.recorder.folder().circumstances(exit));
        let run = &self.stages[stage];
        let (key, document) = run.keyed();
        self.remote_cache.note_to_send(key);
        if !run.less_memory.is_empty() {
            how.insert("less_memory".to_owned(), run.less_memory.clone().into());
        }
        let record = ResultRecord::new(document.clone(), self.plan.stages[stage].kind, outputs, how);
        let recorded = self.store.record(key, &record);
        recorded.or_fail(Cause::Machine, || "cannot record the result".to_owned())?;
        // The record is in the store; this copy is for the day when the store has let go of it.
        let _ = self.recorder.folder().keep_result(&self.plan.stages[stage].id, &record);
        self.stages.finish(stage, record.outputs);
        Ok(())
    }

    fn settle_done(&mut self, stage: usize, exit: &ProcessExit) {
        let run = &self.stages[stage];
        let compared = run.before.as_ref().map(|before| compare(before, &run.outputs));
        let (&key, document) = run.keyed();
        self.store.remove_partial_if_empty(&document.working_key());
        self.recorder.tell(RunEvent::StageDone {
            stage: self.plan.stages[stage].id.clone(),
            key,
            seconds: exit.ran.as_secs_f64(),
            peak_memory_bytes: exit.peak_memory_bytes,
            outputs: run.outputs.clone(),
            compared,
        });
        self.stages.settle(stage);
        self.remote_cache.send(key);
        self.has_result(stage);
    }

    fn settle_stopped(&mut self, stage: usize, exit: &ProcessExit) {
        self.stages.skip(stage);
        let because = match (&exit.ending, self.stopping) {
            (Ending::Signal(_), _) | (_, Stopping::Killed) => "interrupted and killed; what it had saved is kept",
            (Ending::Code(_), _) => "interrupted; what it had saved is kept",
        };
        let (because, cause) = (because.to_owned(), Some(Cause::Cancelled));
        self.recorder.tell(RunEvent::StageSkipped { stage: self.id(stage), because, cause });
    }

    fn tell_failed(
        &mut self,
        stage: usize,
        failure: Failure,
        ran: Duration,
        retry: Option<Duration>,
        retry_with: Option<String>,
    ) {
        let id = self.id(stage);
        let log = self.recorder.path().join(stage_folder(&id)).join("log");
        let retry_in_seconds = retry.map(|delay| delay.as_secs_f64());
        let seconds = ran.as_secs_f64();
        self.recorder.tell(RunEvent::StageFailed { stage: id, failure, log, seconds, retry_in_seconds, retry_with });
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
