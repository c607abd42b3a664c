//! The loop: it hears messages and decides what happens next. What there is to know is in its parts, each of which
//! alone changes what it knows: the stages, what the machine has room for, the shared cache, and who is told.

use std::cell::LazyCell;
use std::thread;
use std::time::{Duration, Instant};

use cache::{SeenResult, Store};
use tokio::time::sleep_until;

use super::admission::Admission;
use super::devices::{Devices, kinds_of};
use super::event::{Conclusion, RunEvent};
use super::executors::Executors;
use super::outcome::{OnFailure, Profiling, RunOptions, RunOutcome};
use super::publishing::Publisher;
use super::recorder::Recorder;
use super::remote_cache::RemoteCache;
use super::signals::Signals;
use super::stages::{Stages, State};
use super::stopping::Stopping;
use super::timeline::Timeline;
use crate::device::Seen;
use crate::error::Cause;
use crate::execute::Message;
use crate::file::problem::Problem;
use crate::history::{History, RunFolder};
use crate::home::Home;
use crate::keys::StageOutside;
use crate::plan::{Plan, Wanted};

/// How often a result that another run is making is looked for.
pub(super) const LOCK_POLL: Duration = Duration::from_millis(200);

/// A run. What it does to a stage is in a file for each duty: `begin` starts it, `conclude` ends it, `rebuild` replaces
/// damaged results, `fetch` those that are elsewhere, `publishing` copies them out, `stopping` ends what must not go
/// on.
pub(super) struct Scheduler<'a> {
    pub plan: &'a Plan,
    pub home: &'a Home,
    pub store: &'a Store,
    pub options: &'a RunOptions,
    /// What was said of the file before the run began.
    pub warnings: Vec<Problem>,
    pub outside: Vec<StageOutside>,
    /// The result that each stage was seen to have before the run began, until it is looked for.
    pub results: Vec<Option<SeenResult>>,
    /// Opened when a stage first has to run: a run that finds everything done does not need it.
    pub history: LazyCell<Option<History>, Box<dyn FnOnce() -> Option<History> + 'a>>,
    pub stages: Stages,
    pub admission: Admission,
    pub executors: Executors,
    pub remote_cache: RemoteCache,
    pub publisher: Publisher,
    pub recorder: Recorder<'a>,
    pub stopping: Stopping,
}

/// What was found out before a run begins.
pub(super) struct Prepared {
    pub warnings: Vec<Problem>,
    pub outside: Vec<StageOutside>,
    pub results: Vec<Option<SeenResult>>,
    pub executors: Executors,
    /// What was seen of the machine's devices, where somebody asked.
    pub seen: Option<Seen>,
    pub folder: RunFolder,
}

impl<'a> Scheduler<'a> {
    pub(super) fn new(
        plan: &'a Plan,
        home: &'a Home,
        store: &'a Store,
        options: &'a RunOptions,
        prepared: Prepared,
        observer: &'a mut dyn FnMut(&RunEvent),
    ) -> Self {
        let Prepared { warnings, outside, results, executors, seen, folder } = prepared;
        let is_profiled = options.profile == Profiling::All || plan.stages.iter().any(|stage| stage.profile);
        let cores = options.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, Into::into)).max(1);
        let devices = Devices::new(kinds_of(plan), seen);
        Self {
            plan,
            home,
            store,
            options,
            warnings,
            outside,
            results,
            history: LazyCell::new(Box::new(|| History::open(home).ok())),
            stages: Stages::new(plan),
            admission: Admission::new(cores, options.jobs, plan.slots.clone(), options.memory.clone(), devices),
            executors,
            remote_cache: RemoteCache::new(plan, options, store),
            publisher: Publisher::new(plan),
            recorder: Recorder::new(folder, observer, is_profiled.then(|| Timeline::new(plan))),
            stopping: Stopping::No,
        }
    }

    /// Runs everything to its end.
    pub(super) async fn run(mut self, run: String, mut signals: Signals) -> RunOutcome {
        let started = Instant::now();
        let stages = self.plan.stages.iter().map(|stage| stage.id.clone()).collect();
        self.recorder.tell(RunEvent::RunStarted { run: run.clone(), pipeline: self.plan.name.clone(), stages });
        self.remote_cache.send_what_is_left();
        loop {
            self.advance();
            // A second Ctrl-C does not wait for copies either: a half-made one has a name of its own and is removed by
            // the next.
            let is_copying = self.publisher.is_busy() || self.remote_cache.is_sending();
            if self.stages.are_settled() && (!is_copying || self.stopping == Stopping::Killed) {
                break;
            }
            let alarm = self.stages.next_alarm();
            tokio::select! {
                message = self.executors.hear() => self.hear(message),
                end = self.publisher.hear() => self.end_publish(end),
                event = self.remote_cache.hear() => self.hear_transfer(event),
                seen = self.admission.devices.hear() => self.admission.devices.note(seen),
                request = signals.next() => self.interrupt(request),
                () = sleep_until(alarm.unwrap_or_else(Instant::now).into()), if alarm.is_some() => {
                    self.stages.heed_alarms(Instant::now(), self.options.grace);
                }
            }
        }
        self.finish(run, started.elapsed())
    }

    /// The id of a stage, for events.
    pub(super) fn id(&self, stage: usize) -> String {
        self.plan.stages[stage].id.clone()
    }

    /// Moves every stage as far as it can go without a message: first those that need no process, then, the longest
    /// chain of work first, those that do.
    fn advance(&mut self) {
        loop {
            // Where this fails, so will who needs it, and says so.
            let passage = self.store.pass().ok();
            while let Some(stage) = self.stages.next_changed() {
                self.advance_stage(stage);
            }
            drop(passage);
            self.start_what_fits();
            if !self.stages.have_changed() {
                break;
            }
        }
    }

    fn start_what_fits(&mut self) {
        let (plan, history) = (self.plan, &self.history);
        for stage in self.stages.startable(|| weights(plan, history.as_ref())) {
            if self.stages[stage].is_startable() {
                self.begin(stage);
            }
        }
    }

    fn advance_stage(&mut self, stage: usize) {
        let state = self.stages[stage].state;
        if !matches!(state, State::Waiting | State::Ready) {
            return;
        }
        if let Some(because) = self.reason_to_skip(stage) {
            self.stages.skip(stage);
            let cause = (self.stopping != Stopping::No).then_some(Cause::Cancelled);
            self.recorder.tell(RunEvent::StageSkipped { stage: self.id(stage), because, cause });
            return;
        }
        let inputs_are_there = self.stages[stage].upstream.iter().all(|before| self.stages[*before].state.has_result());
        match (state, inputs_are_there) {
            (State::Waiting, true) => {
                self.stages.make_ready(stage);
                self.look_up(stage);
            }
            (State::Ready, false) => self.stages.wait_for_inputs(stage),
            (State::Ready, true) => self.look_up(stage),
            _ => {}
        }
    }

    fn reason_to_skip(&self, stage: usize) -> Option<String> {
        if self.stopping != Stopping::No {
            return Some("interrupted".to_owned());
        }
        let lost = |before: &&usize| matches!(self.stages[**before].state, State::Failed | State::Skipped);
        if let Some(before) = self.stages[stage].upstream.iter().find(lost) {
            return Some(format!("stage `{}` before it has no result", self.plan.stages[*before].id));
        }
        // A stage that is not to be made costs nothing, and all that are missing are to be named.
        if self.options.on_failure == OnFailure::Stop && self.plan.stages[stage].wanted != Wanted::Given {
            return Some(format!("stage `{}` failed", self.plan.stages[self.stages.failed()?].id));
        }
        None
    }

    fn hear(&mut self, message: Message) {
        match message {
            Message::Said { stage, event } => {
                if let Some(said) = self.stages.hear(stage, event) {
                    self.recorder.tell(RunEvent::Worker { stage: self.id(stage), said });
                }
            }
            Message::Queued { stage, job, news } => self.hear_job(stage, job, news),
            Message::Gone { stage, because } => self.hear_gone(stage, because),
            Message::Exited { stage, exit } => {
                self.admission.release(stage);
                if let Some(running) = self.stages.end_process(stage) {
                    self.conclude(stage, *running, exit);
                }
            }
        }
    }

    fn finish(mut self, run: String, took: Duration) -> RunOutcome {
        let counts = self.stages.counts();
        let conclusion = if self.stopping != Stopping::No && (counts.skipped > 0 || self.publisher.is_busy()) {
            Conclusion::Interrupted
        } else if counts.failed > 0 || self.publisher.has_failed() {
            Conclusion::Failed
        } else {
            Conclusion::Succeeded
        };
        self.recorder.tell(RunEvent::RunFinished { conclusion, counts, seconds: took.as_secs_f64() });
        self.recorder.finish(&self.plan.name);
        let folder = self.recorder.path().to_owned();
        RunOutcome { run, folder, conclusion, counts, stages: self.stages.into_outcomes(self.plan), took }
    }
}

/// What each stage takes: what it took last time, and the mean of those where it never ran.
fn weights(plan: &Plan, history: Option<&History>) -> Vec<f64> {
    let known = history.and_then(|history| history.durations(&plan.name).ok()).unwrap_or_default();
    let mean = known.values().sum::<f64>() / known.len() as f64;
    let unknown = if mean.is_finite() && mean > 0.0 { mean } else { 1.0 };
    let of = |id: &str| known.get(id).copied().unwrap_or(unknown).max(f64::MIN_POSITIVE);
    plan.stages.iter().map(|stage| of(&stage.id)).collect()
}
