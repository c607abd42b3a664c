//! The loop: it owns the state of every stage, hears messages, and makes every transition in one place.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use cache::Store;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::sleep_until;

use super::admission::by_longest_chain;
use super::devices::Devices;
use super::event::{Conclusion, Counts, RunEvent};
use super::executors::Executors;
use super::gates::Gates;
use super::outcome::{OnFailure, Profiling, RunOptions, RunOutcome, StageOutcome};
use super::remote_cache::RemoteCache;
use super::signals::Signals;
use super::stage_run::{PublishEnd, StageRun, stage_runs};
use super::stage_run::{State, Stopping};
use super::timeline::Timeline;
use crate::device::Seen;
use crate::error::Cause;
use crate::execute::{Message, ProcessExit};
use crate::file::problem::Problem;
use crate::history::{History, RunFolder};
use crate::home::Home;
use crate::keys::StageOutside;
use crate::plan::{Plan, Wanted};
use crate::protocol::WorkerEvent;

/// How often a result that another run is making is looked for.
pub(super) const LOCK_POLL: Duration = Duration::from_millis(200);

/// A run's state. Its parts: this file holds the loop, `room` says what may start, `devices` what it computes on,
/// `begin` starts it, `conclude` ends it, `heal` replaces damaged results, `publishing` copies results out, `stopping`
/// ends what must not go on.
pub(super) struct Scheduler<'a> {
    pub plan: &'a Plan,
    /// What was said of the file before the run began.
    pub warnings: Vec<Problem>,
    pub home: &'a Home,
    pub store: &'a Store,
    pub options: &'a RunOptions,
    pub outside: Vec<StageOutside>,
    pub executors: Executors,
    pub recorder: RunFolder,
    pub stages: Vec<StageRun>,
    /// Where a stage is among them, by its id.
    pub positions: HashMap<&'a str, usize>,
    pub cores: usize,
    pub messages: UnboundedSender<Message>,
    pub stopping: Stopping,
    /// The first stage that failed.
    pub failed: Option<usize>,
    /// The order in which stages are started; made when the first one has to be.
    order: Vec<usize>,
    /// Opened when a stage first has to run: a run that finds everything done does not need it.
    pub history: OnceCell<Option<History>>,
    observer: &'a mut dyn FnMut(&RunEvent),
    heard: UnboundedReceiver<Message>,
    pub gates: Gates,
    pub publisher: UnboundedSender<PublishEnd>,
    published: UnboundedReceiver<PublishEnd>,
    /// Copies that are being made.
    pub publishing: usize,
    pub publish_failed: bool,
    /// The shared cache.
    pub remote_cache: RemoteCache,
    pub devices: Devices,
    /// Where the time goes, where that is recorded of some stage.
    pub timeline: Option<Timeline>,
}

impl<'a> Scheduler<'a> {
    #[expect(clippy::too_many_arguments, reason = "called once, from the function that makes each of them")]
    pub(super) fn new(
        plan: &'a Plan,
        warnings: Vec<Problem>,
        home: &'a Home,
        store: &'a Store,
        options: &'a RunOptions,
        outside: Vec<StageOutside>,
        executors: Executors,
        recorder: RunFolder,
        seen: Option<Seen>,
        observer: &'a mut dyn FnMut(&RunEvent),
    ) -> Self {
        let (messages, heard) = unbounded_channel();
        let (publisher, published) = unbounded_channel();
        let is_profiled = options.profile == Profiling::All || plan.stages.iter().any(|stage| stage.profile);
        let cores = options.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, Into::into)).max(1);
        Self {
            plan,
            warnings,
            home,
            store,
            options,
            outside,
            executors,
            recorder,
            stages: stage_runs(plan),
            positions: plan.stages.iter().enumerate().map(|(at, stage)| (stage.id.as_str(), at)).collect(),
            cores,
            messages,
            stopping: Stopping::No,
            failed: None,
            order: Vec::new(),
            history: OnceCell::new(),
            observer,
            heard,
            gates: Gates::new(plan),
            publisher,
            published,
            publishing: 0,
            publish_failed: false,
            remote_cache: RemoteCache::new(options.remote.clone(), plan),
            devices: Devices::new(plan, seen),
            timeline: is_profiled.then(|| Timeline::new(plan)),
        }
    }

    /// Runs everything to its end.
    pub(super) async fn run(mut self, run: String, mut signals: Signals) -> RunOutcome {
        let started = Instant::now();
        let stages = self.stages.iter().map(|stage| stage.id.clone()).collect();
        self.tell(RunEvent::RunStarted { run: run.clone(), pipeline: self.plan.name.clone(), stages });
        self.send_what_is_left();
        loop {
            self.advance();
            // A second Ctrl-C does not wait for copies either: a half-made one has a name of its own and is removed by
            // the next.
            let may_leave =
                self.publishing == 0 && !self.remote_cache.is_sending() || self.stopping == Stopping::Killed;
            if may_leave && self.stages.iter().all(|stage| stage.state.is_settled()) {
                break;
            }
            let alarm = self.next_alarm();
            tokio::select! {
                Some(message) = self.heard.recv() => self.hear(message),
                Some(end) = self.published.recv() => self.end_publish(end),
                delivery = self.remote_cache.hear() => self.hear_delivery(delivery),
                seen = self.devices.hear() => self.devices.note(seen),
                request = signals.next() => self.interrupt(request),
                () = sleep_until(alarm.unwrap_or_else(Instant::now).into()), if alarm.is_some() => self.heed_alarms(),
            }
        }
        self.finish(run, started.elapsed())
    }

    /// The one place where a stage's state changes.
    pub(super) fn transition(&mut self, stage: usize, to: State) {
        let stage = &mut self.stages[stage];
        assert!(stage.state.may_become(to), "stage `{}` cannot go from {:?} to {to:?}", stage.id, stage.state);
        stage.state = to;
    }

    /// Tells the observer and the run's folder.
    pub(super) fn tell(&mut self, event: RunEvent) {
        // A full disk fails the stages themselves; it must not keep the loop from stopping them in order.
        let _ = self.recorder.append(&event);
        if let Some(timeline) = &mut self.timeline {
            timeline.hear(&event);
        }
        (self.observer)(&event);
    }

    /// Moves every stage as far as it can go without a message: first those that need no process, then, the longest
    /// chain of work first, those that do.
    fn advance(&mut self) {
        loop {
            let mut moved = false;
            for stage in 0..self.stages.len() {
                moved |= self.advance_stage(stage);
            }
            if !moved && !self.start_what_fits() {
                break;
            }
        }
    }

    fn start_what_fits(&mut self) -> bool {
        let is_to_run = |stage: &StageRun| stage.state == State::Ready && stage.looked_up;
        if !self.stages.iter().any(is_to_run) {
            return false;
        }
        if self.order.is_empty() {
            self.order = self.by_longest_chain();
        }
        let mut moved = false;
        for place in 0..self.order.len() {
            let stage = self.order[place];
            if is_to_run(&self.stages[stage]) {
                moved |= self.begin(stage);
            }
        }
        moved
    }

    /// The order in which stages are started; what a stage takes is what it took last time, and the mean of those where
    /// it never ran.
    fn by_longest_chain(&self) -> Vec<usize> {
        let history = self.history.get_or_init(|| History::open(self.home).ok());
        let known = history.as_ref().and_then(|history| history.durations(&self.plan.name).ok()).unwrap_or_default();
        let mean = known.values().sum::<f64>() / known.len() as f64;
        let unknown = if mean.is_finite() && mean > 0.0 { mean } else { 1.0 };
        by_longest_chain(&self.stages, |stage| known.get(&stage.id).copied().unwrap_or(unknown).max(f64::MIN_POSITIVE))
    }

    fn advance_stage(&mut self, stage: usize) -> bool {
        let state = self.stages[stage].state;
        if !matches!(state, State::Waiting | State::Ready) {
            return false;
        }
        if let Some(because) = self.reason_to_skip(stage) {
            self.transition(stage, State::Skipped);
            let stage = self.stages[stage].id.clone();
            let cause = (self.stopping != Stopping::No).then_some(Cause::Cancelled);
            self.tell(RunEvent::StageSkipped { stage, because, cause });
            return true;
        }
        let inputs_are_there = self.stages[stage].upstream.iter().all(|before| self.stages[*before].state.has_result());
        match (state, inputs_are_there) {
            (State::Waiting, true) => {
                self.transition(stage, State::Ready);
                self.look_up(stage);
                true
            }
            (State::Ready, false) => {
                self.transition(stage, State::Waiting);
                // The input that is made again may come out as another one.
                self.stages[stage].key = None;
                self.stages[stage].looked_up = false;
                true
            }
            (State::Ready, true) => self.look_up(stage),
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
        // A stage that is not to be made costs nothing, and all that are missing are to be named.
        if self.options.on_failure == OnFailure::Stop && self.plan.stages[stage].wanted != Wanted::Given {
            let failed = self.failed?;
            return Some(format!("stage `{}` failed", self.stages[failed].id));
        }
        None
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Said { stage, event } => self.hear_worker(stage, event),
            Message::Queued { stage, job, news } => self.hear_job(stage, job, news),
            Message::Gone { stage, because } => self.hear_gone(stage, because),
            Message::Exited { stage, exit } => self.hear_exit(stage, exit),
        }
    }

    fn hear_worker(&mut self, stage: usize, event: WorkerEvent) {
        let run = &mut self.stages[stage];
        let Some(running) = &mut run.running else { return };
        if matches!(event, WorkerEvent::Started { .. }) {
            // A cluster may have stopped it and started it once more: what it said last was not its last word.
            (running.finished, running.failed) = (None, None);
        }
        match event {
            WorkerEvent::Finished { outputs, how } => running.finished = Some((outputs, how)),
            WorkerEvent::Failed(failure) => running.failed = Some(failure),
            said @ (WorkerEvent::Started { .. }
            | WorkerEvent::Progress { .. }
            | WorkerEvent::Metrics { .. }
            | WorkerEvent::Checkpoint { .. }
            | WorkerEvent::Warning { .. }
            | WorkerEvent::Note { .. }
            | WorkerEvent::Text { .. }
            | WorkerEvent::Report { .. }) => {
                let stage = run.id.clone();
                self.tell(RunEvent::Worker { stage, said });
            }
        }
    }

    fn hear_exit(&mut self, stage: usize, exit: ProcessExit) {
        if let Some(running) = self.stages[stage].running.take() {
            self.conclude(stage, running, exit);
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
        } else if counts.failed > 0 || self.publish_failed || self.gates.refuse() {
            Conclusion::Failed
        } else {
            Conclusion::Succeeded
        };
        self.tell(RunEvent::RunFinished { conclusion, counts, seconds: took.as_secs_f64() });
        let folder = self.recorder.path().to_owned();
        if let Some(timeline) = &self.timeline {
            // What the stages recorded is beside it, and a trace that cannot be written changes no result.
            let _ = timeline.write(&self.plan.name, &folder);
        }
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
