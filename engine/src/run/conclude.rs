//! Ending a stage: its result is recorded, or its failure is sorted into another try, a repair, or the end.

use std::time::{Duration, Instant};

use cache::{OutputRecord, ResultRecord};
use serde_json::{Map, Value};

use super::event::RunEvent;
use super::outcome::Failure;
use super::scheduler::Scheduler;
use super::stage_run::Running;
use super::state::State;
use super::stopping::Stopping;
use crate::error::{Cause, OrFail};
use crate::execute::{Ending, Exit};
use crate::history::stage_folder;
use crate::protocol::StoredOutput;

impl Scheduler<'_> {
    /// Decides what the end of a stage's process means. `running` still holds the locks until this returns, so that nobody else
    /// starts the stage before its result is recorded.
    pub(super) fn conclude(&mut self, stage: usize, mut running: Running, exit: Exit) {
        if let (Some((outputs, how)), Ending::Code(0)) = (running.finished.take(), &exit.ending) {
            let outputs = outputs.into_iter().map(|(name, output)| (name, stored_record(output))).collect();
            return match self.record(stage, outputs, how, &exit) {
                Ok(()) => self.settle_done(stage, &exit),
                Err(failure) => self.fail(stage, failure, exit.ran),
            };
        }
        if self.stopping != Stopping::No {
            return self.settle_stopped(stage, &exit);
        }
        let failure = self.failure(stage, running, &exit);
        if failure.cause == Cause::CorruptInput && self.heal(stage, failure.object) {
            return;
        }
        let retries = &self.plan.stages[stage].retries;
        if retries.on.contains(&failure.cause) && self.stages[stage].attempts <= retries.max {
            return self.try_again(stage, failure, exit.ran);
        }
        self.fail(stage, failure, exit.ran);
    }

    /// Ends a stage for good.
    pub(super) fn fail(&mut self, stage: usize, failure: Failure, ran: Duration) {
        self.transition(stage, State::Failed);
        self.tell_failed(stage, &failure, ran, None);
        self.stages[stage].failure = Some(failure);
    }

    fn record(
        &mut self,
        stage: usize,
        outputs: std::collections::BTreeMap<String, OutputRecord>,
        mut how: Map<String, Value>,
        exit: &Exit,
    ) -> Result<(), Failure> {
        how.extend(self.recorder.circumstances(exit));
        let run = &mut self.stages[stage];
        let keyed = run.key.as_ref().expect("a stage that ran has a key");
        let record = ResultRecord::new(keyed.document.clone(), self.plan.stages[stage].kind, outputs.clone(), how);
        let recorded = self.store.record(&keyed.key, &record);
        recorded.or_fail(Cause::Machine, || "cannot record the result".to_owned())?;
        // The record is in the store; this copy is for the day when the store has let go of it.
        let _ = self.recorder.keep_result(&run.id, &record);
        run.outputs = outputs;
        Ok(())
    }

    fn settle_done(&mut self, stage: usize, exit: &Exit) {
        self.transition(stage, State::Done);
        let run = &self.stages[stage];
        let keyed = run.key.as_ref().expect("a stage that ran has a key");
        self.store.remove_partial_if_empty(&keyed.document.working_key());
        let outputs = run.outputs.iter().map(|(name, output)| (name.clone(), stored_output(output))).collect();
        let event = RunEvent::StageDone {
            stage: run.id.clone(),
            key: keyed.key,
            seconds: exit.ran.as_secs_f64(),
            peak_memory_bytes: exit.peak_memory_bytes,
            outputs,
        };
        self.tell(event);
        self.publish(stage);
    }

    fn settle_stopped(&mut self, stage: usize, exit: &Exit) {
        self.transition(stage, State::Skipped);
        let because = match (&exit.ending, self.stopping) {
            (Ending::Signal(_), _) | (_, Stopping::Killed) => "interrupted and killed; what it had saved is kept",
            (Ending::Code(_), _) => "interrupted; what it had saved is kept",
        };
        let stage = self.stages[stage].id.clone();
        self.tell(RunEvent::StageSkipped { stage, because: because.to_owned() });
    }

    fn try_again(&mut self, stage: usize, failure: Failure, ran: Duration) {
        let delay = self.plan.stages[stage].retries.delay_after(self.stages[stage].attempts);
        self.stages[stage].not_before = Some(Instant::now() + delay);
        self.transition(stage, State::Ready);
        self.tell_failed(stage, &failure, ran, Some(delay));
    }

    fn tell_failed(&mut self, stage: usize, failure: &Failure, ran: Duration, retry: Option<Duration>) {
        let id = &self.stages[stage].id;
        let event = RunEvent::StageFailed {
            stage: id.clone(),
            cause: failure.cause,
            messages: failure.messages.clone(),
            help: failure.help.clone(),
            log: self.recorder.path().join(stage_folder(id)).join("log"),
            seconds: ran.as_secs_f64(),
            retry_in_seconds: retry.map(|delay| delay.as_secs_f64()),
        };
        self.tell(event);
    }

    fn failure(&self, stage: usize, running: Running, exit: &Exit) -> Failure {
        if running.timed_out {
            let limit = self.plan.stages[stage].timeout.unwrap_or_default();
            return Failure {
                cause: Cause::Timeout,
                messages: vec![format!("it took longer than its timeout of {limit:?}")],
                help: Some("raise `timeout:`; what the stage had saved is kept".to_owned()),
                object: None,
            };
        }
        running.failed.unwrap_or_else(|| crash(exit))
    }
}

fn crash(exit: &Exit) -> Failure {
    let peak = exit.peak_memory_bytes as f64 / f64::from(1 << 30);
    let (message, help) = match &exit.ending {
        Ending::Signal(signal) if signal == "SIGKILL" => (
            "the stage's process was killed (SIGKILL)".to_owned(),
            Some(format!("the machine may have run out of memory: the process held {peak:.2} GiB")),
        ),
        Ending::Signal(signal) => (format!("the stage's process died of {signal}"), None),
        Ending::Code(code) => (format!("the stage's process exited with {code} and gave no result"), None),
    };
    Failure { cause: Cause::Crashed, messages: vec![message], help, object: None }
}

fn stored_record(output: StoredOutput) -> OutputRecord {
    let StoredOutput { kind, tree, identity, facts } = output;
    OutputRecord { kind, tree, identity, facts }
}

fn stored_output(output: &OutputRecord) -> StoredOutput {
    let OutputRecord { kind, tree, identity, facts } = output.clone();
    StoredOutput { kind, tree, identity, facts }
}
