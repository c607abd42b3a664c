//! The loop: it owns the state of every stage, hears messages, and makes every transition in one place.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use cache::{Digest, KeyDocument, Lock, OutputRecord, Staging, Store};
use serde_json::{Map, Value};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::sleep_until;

use super::event::{Conclusion, Counts, RunEvent};
use super::outcome::{Failure, OnFailure, RunOptions, RunOutcome, StageOutcome};
use super::signals::Signals;
use super::state::State;
use crate::execute::stage_process::chain;
use crate::execute::{Executor, Exit, Message, Process, Stop};
use crate::history::{History, RunFolder};
use crate::home::Home;
use crate::keys::StageOutside;
use crate::plan::Plan;
use crate::protocol::{StoredOutput, WorkerEvent};
use crate::publish::{PublishError, Published, publish};

/// How often a result that another run is making is looked for.
pub(super) const LOCK_POLL: Duration = Duration::from_millis(200);

/// A run's state. Its parts: this file holds the loop, `begin` starts stages, `conclude` ends them, `heal` replaces damaged results.
pub(super) struct Scheduler<'a> {
    pub plan: &'a Plan,
    pub home: &'a Home,
    pub store: &'a Store,
    pub options: &'a RunOptions,
    pub outside: Vec<StageOutside>,
    pub executor: Box<dyn Executor>,
    pub recorder: RunFolder,
    pub stages: Vec<StageRun>,
    pub cores: usize,
    pub messages: UnboundedSender<Message>,
    pub stopping: Stopping,
    /// Opened when a stage first has to run: a run that finds everything done does not need it.
    pub history: OnceCell<Option<History>>,
    observer: &'a mut dyn FnMut(&RunEvent),
    heard: UnboundedReceiver<Message>,
    publisher: UnboundedSender<PublishEnd>,
    published: UnboundedReceiver<PublishEnd>,
    publishing: usize,
    publish_failed: bool,
}

/// A stage within the run.
pub(super) struct StageRun {
    pub id: String,
    pub state: State,
    /// Stages that it reads or waits for.
    pub upstream: Vec<usize>,
    /// Made when its inputs are there.
    pub key: Option<Keyed>,
    pub outputs: BTreeMap<String, OutputRecord>,
    pub attempts: u32,
    pub heals: u32,
    /// Set while it waits for another try, or for another run.
    pub not_before: Option<Instant>,
    pub said_waiting: bool,
    pub running: Option<Running>,
    pub failure: Option<Failure>,
}

/// A stage's key.
pub(super) struct Keyed {
    pub document: KeyDocument,
    pub key: Digest,
}

/// A stage's process. The locks and the folder go with this, when the process is gone.
pub(super) struct Running {
    pub process: Box<dyn Process>,
    pub threads: usize,
    pub timeout_at: Option<Instant>,
    pub kill_at: Option<Instant>,
    pub timed_out: bool,
    pub finished: Option<(BTreeMap<String, StoredOutput>, Map<String, Value>)>,
    pub failed: Option<Failure>,
    pub _locks: [Lock; 2],
    pub _staging: Staging,
}

/// Whether the user has asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopping {
    No,
    Asked,
    Killed,
}

/// The end of a copy out of the store.
struct PublishEnd {
    entry: usize,
    target: PathBuf,
    result: Result<Published, PublishError>,
}

impl<'a> Scheduler<'a> {
    #[expect(clippy::too_many_arguments, reason = "called once, from the function that makes each of them")]
    pub fn new(
        plan: &'a Plan,
        home: &'a Home,
        store: &'a Store,
        options: &'a RunOptions,
        outside: Vec<StageOutside>,
        executor: Box<dyn Executor>,
        recorder: RunFolder,
        observer: &'a mut dyn FnMut(&RunEvent),
    ) -> Self {
        let (messages, heard) = unbounded_channel();
        let (publisher, published) = unbounded_channel();
        let cores = options.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, Into::into)).max(1);
        Self {
            plan,
            home,
            store,
            options,
            outside,
            executor,
            recorder,
            stages: stage_runs(plan),
            cores,
            messages,
            stopping: Stopping::No,
            history: OnceCell::new(),
            observer,
            heard,
            publisher,
            published,
            publishing: 0,
            publish_failed: false,
        }
    }

    /// Runs everything to its end.
    pub async fn run(mut self, run: String, mut signals: Signals) -> RunOutcome {
        let started = Instant::now();
        let stages = self.stages.iter().map(|stage| stage.id.clone()).collect();
        self.tell(RunEvent::RunStarted { run: run.clone(), pipeline: self.plan.name.clone(), stages });
        loop {
            self.advance();
            // A second Ctrl-C does not wait for copies either: a half-made one has a name of its own and is removed by the next.
            let may_leave = self.publishing == 0 || self.stopping == Stopping::Killed;
            if may_leave && self.stages.iter().all(|stage| stage.state.is_settled()) {
                break;
            }
            let alarm = self.next_alarm();
            tokio::select! {
                Some(message) = self.heard.recv() => self.hear(message),
                Some(end) = self.published.recv() => self.end_publish(end),
                () = signals.next() => self.interrupt(),
                () = sleep_until(alarm.unwrap_or_else(Instant::now).into()), if alarm.is_some() => self.heed_alarms(),
            }
        }
        self.finish(run, started.elapsed())
    }

    /// The one place where a stage's state changes.
    pub fn transition(&mut self, stage: usize, to: State) {
        let stage = &mut self.stages[stage];
        assert!(stage.state.may_become(to), "stage `{}` cannot go from {:?} to {to:?}", stage.id, stage.state);
        stage.state = to;
    }

    /// Tells the observer and the run's folder.
    pub fn tell(&mut self, event: RunEvent) {
        // A full disk fails the stages themselves; it must not keep the loop from stopping them in order.
        let _ = self.recorder.append(&event);
        (self.observer)(&event);
    }

    /// Copies what a stage's result publishes, each on a thread of its own.
    pub fn publish(&mut self, stage: usize) {
        let stage = &self.stages[stage];
        let folder = std::path::absolute(&self.plan.file).unwrap_or_else(|_| self.plan.file.clone());
        for (entry, wanted) in self.plan.publish.iter().enumerate().filter(|(_, wanted)| wanted.stage == stage.id) {
            let Some(output) = stage.outputs.get(&wanted.output) else { continue };
            let (tree, identity) = (output.tree, output.identity);
            let target = folder.with_file_name("").join(&wanted.path);
            let (store, publisher, on_changed) =
                (self.store.clone(), self.publisher.clone(), self.options.on_changed_target);
            self.publishing += 1;
            thread::spawn(move || {
                let copy = AssertUnwindSafe(|| publish(&store, &tree, &identity, &target, on_changed));
                // The loop waits for this message; without it a defect would be a run that never ends.
                let result = catch_unwind(copy).unwrap_or(Err(PublishError::Panicked));
                let _ = publisher.send(PublishEnd { entry, target, result });
            });
        }
    }

    /// Moves every stage as far as it can go without a message.
    fn advance(&mut self) {
        let mut moved = true;
        while moved {
            moved = false;
            for stage in 0..self.stages.len() {
                moved |= self.advance_stage(stage);
            }
        }
    }

    fn advance_stage(&mut self, stage: usize) -> bool {
        let state = self.stages[stage].state;
        if !matches!(state, State::Waiting | State::Ready) {
            return false;
        }
        if let Some(because) = self.reason_to_skip(stage) {
            self.transition(stage, State::Skipped);
            let stage = self.stages[stage].id.clone();
            self.tell(RunEvent::StageSkipped { stage, because });
            return true;
        }
        let inputs_are_there = self.stages[stage].upstream.iter().all(|before| self.stages[*before].state.has_result());
        match (state, inputs_are_there) {
            (State::Waiting, true) => {
                self.transition(stage, State::Ready);
                self.begin(stage);
                true
            }
            (State::Ready, false) => {
                self.transition(stage, State::Waiting);
                true
            }
            (State::Ready, true) => self.begin(stage),
            _ => false,
        }
    }

    fn reason_to_skip(&self, stage: usize) -> Option<String> {
        if self.stopping != Stopping::No {
            return Some("interrupted".to_owned());
        }
        let lost = |before: &&usize| matches!(self.stages[**before].state, State::Failed | State::Skipped);
        if let Some(before) = self.stages[stage].upstream.iter().find(lost) {
            return Some(format!("stage `{}` before it has no result", self.stages[*before].id));
        }
        if self.options.on_failure == OnFailure::Stop {
            let failed = self.stages.iter().find(|other| other.state == State::Failed)?;
            return Some(format!("stage `{}` failed", failed.id));
        }
        None
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Said { stage, event } => self.hear_worker(stage, event),
            Message::Exited { stage, exit } => self.hear_exit(stage, exit),
        }
    }

    fn hear_worker(&mut self, stage: usize, event: WorkerEvent) {
        let run = &mut self.stages[stage];
        let Some(running) = &mut run.running else { return };
        match event {
            WorkerEvent::Finished { outputs, how } => running.finished = Some((outputs, how)),
            WorkerEvent::Failed { cause, messages, help, object } => {
                running.failed = Some(Failure { cause, messages, help, object });
            }
            said @ (WorkerEvent::Started { .. }
            | WorkerEvent::Progress { .. }
            | WorkerEvent::Metrics { .. }
            | WorkerEvent::Checkpoint { .. }
            | WorkerEvent::Warning { .. }
            | WorkerEvent::Text { .. }
            | WorkerEvent::Report { .. }) => {
                let stage = run.id.clone();
                self.tell(RunEvent::Worker { stage, said });
            }
        }
    }

    fn hear_exit(&mut self, stage: usize, exit: Exit) {
        if let Some(running) = self.stages[stage].running.take() {
            self.conclude(stage, running, exit);
        }
    }

    fn end_publish(&mut self, end: PublishEnd) {
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
                let (cause, help) = (error.cause(), error.help().map(str::to_owned));
                RunEvent::PublishFailed { stage, output, path, cause, messages: chain(&error), help }
            }
        };
        self.tell(event);
    }

    fn interrupt(&mut self) {
        let (next, how) = match self.stopping {
            Stopping::No => (Stopping::Asked, Stop::Ask),
            Stopping::Asked | Stopping::Killed => (Stopping::Killed, Stop::Kill),
        };
        self.stopping = next;
        let kill_at = Instant::now() + self.options.grace;
        for running in self.stages.iter_mut().filter_map(|stage| stage.running.as_mut()) {
            running.process.stop(how);
            running.kill_at = Some(kill_at);
        }
    }

    /// When the loop has to look again though nobody spoke.
    fn next_alarm(&self) -> Option<Instant> {
        let of_processes = self.stages.iter().filter_map(|stage| stage.running.as_ref());
        let of_processes = of_processes.flat_map(|running| [running.timeout_at, running.kill_at]);
        let of_waits = self.stages.iter().filter(|stage| stage.state == State::Ready).map(|stage| stage.not_before);
        of_processes.chain(of_waits).flatten().min()
    }

    fn heed_alarms(&mut self) {
        let now = Instant::now();
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let grace = self.options.grace;
        for running in self.stages.iter_mut().filter_map(|stage| stage.running.as_mut()) {
            if due(running.kill_at) {
                running.process.stop(Stop::Kill);
                running.kill_at = None;
            }
            if due(running.timeout_at) {
                running.timeout_at = None;
                running.timed_out = true;
                running.process.stop(Stop::Ask);
                running.kill_at = Some(now + grace);
            }
        }
    }

    fn finish(mut self, run: String, took: Duration) -> RunOutcome {
        let in_state = |state| self.stages.iter().filter(|stage| stage.state == state).count();
        let counts = Counts {
            done: in_state(State::Done),
            cached: in_state(State::Cached),
            failed: in_state(State::Failed),
            skipped: in_state(State::Skipped),
        };
        let conclusion = if self.stopping != Stopping::No && (counts.skipped > 0 || self.publishing > 0) {
            Conclusion::Interrupted
        } else if counts.failed > 0 || self.publish_failed {
            Conclusion::Failed
        } else {
            Conclusion::Succeeded
        };
        self.tell(RunEvent::RunFinished { conclusion, counts, seconds: took.as_secs_f64() });
        let folder = self.recorder.path().to_owned();
        let stages = self.stages.into_iter().map(|stage| StageOutcome {
            stage: stage.id,
            state: stage.state,
            key: stage.key.map(|keyed| keyed.key),
            outputs: stage.outputs,
            failure: stage.failure,
        });
        RunOutcome { run, folder, conclusion, counts, stages: stages.collect(), took }
    }
}

fn stage_runs(plan: &Plan) -> Vec<StageRun> {
    let position: BTreeMap<&str, usize> =
        plan.stages.iter().enumerate().map(|(position, stage)| (stage.id.as_str(), position)).collect();
    let runs = plan.stages.iter().map(|stage| {
        let before = stage.inputs.iter().map(|input| &input.stage).chain(&stage.needs);
        let upstream: BTreeSet<usize> = before.filter_map(|id| position.get(id.as_str()).copied()).collect();
        StageRun {
            id: stage.id.clone(),
            state: State::Waiting,
            upstream: upstream.into_iter().collect(),
            key: None,
            outputs: BTreeMap::new(),
            attempts: 0,
            heals: 0,
            not_before: None,
            said_waiting: false,
            running: None,
            failure: None,
        }
    });
    runs.collect()
}
