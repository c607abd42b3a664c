//! The stages of a run: how each stands and what it made. They change here and nowhere else; all others read.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::{discriminant, take};
use std::ops::Index;
use std::time::{Duration, Instant};

use cache::{Digest, KeyDocument, OutputRecord};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::event::{Counts, WaitsFor};
use super::outcome::StageOutcome;
use super::running::Running;
use crate::error::Failure;
use crate::execute::Stop;
use crate::forecast::Estimate;
use crate::plan::{Plan, Wanted};
use crate::protocol::WorkerEvent;

/// The stages of a run, by their positions in the plan.
pub(super) struct Stages {
    runs: Vec<StageRun>,
    /// The stages that read or wait for each.
    readers: Vec<Vec<usize>>,
    /// Those for which something has changed since they were looked at.
    changed: BTreeSet<usize>,
    /// Those that could be started, with their ranks.
    startable: BTreeSet<(usize, usize)>,
    /// Which is started first, by stage; empty until the first has to be.
    ranks: Vec<usize>,
    /// Those whose process is alive.
    running: BTreeSet<usize>,
    /// How many are not settled.
    open: usize,
    /// The first that failed.
    failed: Option<usize>,
}

/// A stage within the run.
#[derive(Default)]
pub(super) struct StageRun {
    pub state: State,
    /// Stages that it reads or waits for, in order.
    pub upstream: Vec<usize>,
    /// The key of its result, once its inputs are there.
    pub key: Option<Digest>,
    /// What that is the digest of; let go when the result is found.
    pub document: Option<KeyDocument>,
    pub outputs: BTreeMap<String, OutputRecord>,
    /// Processes that were started for it.
    pub attempts: u32,
    /// Those of them that count towards `retries.max`: a try with less memory does not.
    pub tries: u32,
    /// Jobs of a cluster that were submitted for it in this run.
    pub submissions: u32,
    /// What was changed, one after the other, since its memory did not suffice.
    pub less_memory: Vec<String>,
    /// Its parameters since then.
    pub parameters: Option<Value>,
    /// The memory that it is estimated to take, once that was asked.
    pub estimate: OnceCell<Option<Estimate>>,
    /// It is to be made although it may have a result.
    pub again: bool,
    /// The result that it had then.
    pub before: Option<BTreeMap<String, OutputRecord>>,
    /// Its result was looked for under its key, and is not there.
    pub looked_up: bool,
    /// Set while it waits for another try, or for another run.
    pub not_before: Option<Instant>,
    /// What it was last said to wait for.
    pub waits_for: Option<WaitsFor>,
    pub running: Option<Box<Running>>,
    rebuilds: u32,
    failure: Option<Failure>,
}

impl StageRun {
    /// Whether it lacks nothing but room on the machine, or time.
    pub(super) fn is_startable(&self) -> bool {
        self.state == State::Ready && self.looked_up
    }

    /// Its key, and what that is the digest of.
    pub(super) fn keyed(&self) -> (&Digest, &KeyDocument) {
        self.key.as_ref().zip(self.document.as_ref()).expect("a stage that is started has a key")
    }

    /// Whether it was last said to wait for this, in whatever amount.
    pub(super) fn is_said_to_wait_for(&self, waits_for: &WaitsFor) -> bool {
        self.waits_for.as_ref().is_some_and(|said| discriminant(said) == discriminant(waits_for))
    }
}

impl Index<usize> for Stages {
    type Output = StageRun;

    fn index(&self, stage: usize) -> &StageRun {
        &self.runs[stage]
    }
}

impl Stages {
    /// Those of a plan, before anything has happened.
    pub(super) fn new(plan: &Plan) -> Self {
        let count = plan.stages.len();
        let mut readers = vec![Vec::new(); count];
        let runs = plan.stages.iter().enumerate().map(|(position, stage)| {
            let upstream: BTreeSet<usize> = stage.upstream().collect();
            upstream.iter().for_each(|before| readers[*before].push(position));
            let upstream = upstream.into_iter().collect();
            StageRun { upstream, again: stage.wanted == Wanted::Again, ..StageRun::default() }
        });
        let runs = runs.collect();
        Self {
            runs,
            readers,
            changed: (0..count).collect(),
            startable: BTreeSet::new(),
            ranks: Vec::new(),
            running: BTreeSet::new(),
            open: count,
            failed: None,
        }
    }

    /// Whether nothing more happens to any of them.
    pub(super) fn are_settled(&self) -> bool {
        self.open == 0
    }

    /// The first that failed.
    pub(super) fn failed(&self) -> Option<usize> {
        self.failed
    }

    /// Whether something has changed for one since it was looked at.
    pub(super) fn have_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// The next for which something has changed, in the order of the plan.
    pub(super) fn next_changed(&mut self) -> Option<usize> {
        self.changed.pop_first()
    }

    /// Has one looked at again for something that is not known here.
    pub(super) fn look_again(&mut self, stage: usize) {
        self.changed.insert(stage);
    }

    /// Has all looked at again.
    pub(super) fn look_at_all(&mut self) {
        self.changed.extend(0..self.runs.len());
    }

    /// Those that could be started, the longest remaining chain of work first; `weight` is what a stage itself takes,
    /// and is asked once.
    pub(super) fn startable(&mut self, weight: impl FnOnce() -> Vec<f64>) -> Vec<usize> {
        if self.ranks.is_empty() && !self.startable.is_empty() {
            let order = by_longest_chain(&weight(), |stage| &self.runs[stage].upstream);
            self.ranks = vec![0; order.len()];
            order.iter().enumerate().for_each(|(rank, stage)| self.ranks[*stage] = rank);
            self.startable = take(&mut self.startable).into_iter().map(|(_, at)| (self.ranks[at], at)).collect();
        }
        self.startable.iter().map(|(_, stage)| *stage).collect()
    }

    /// The one whose result a key is of.
    pub(super) fn of_key(&self, key: &Digest) -> Option<usize> {
        self.runs.iter().position(|run| run.key == Some(*key))
    }

    pub(super) fn counts(&self) -> Counts {
        let in_state = |state| self.runs.iter().filter(|stage| stage.state == state).count();
        Counts {
            done: in_state(State::Done),
            cached: in_state(State::Cached),
            failed: in_state(State::Failed),
            skipped: in_state(State::Skipped),
        }
    }

    /// What became of each.
    pub(super) fn into_outcomes(self, plan: &Plan) -> Vec<StageOutcome> {
        let outcome = |(stage, planned): (StageRun, &crate::plan::PlannedStage)| {
            let StageRun { state, key, outputs, failure, .. } = stage;
            StageOutcome { stage: planned.id.clone(), state, key, outputs, failure }
        };
        self.runs.into_iter().zip(&plan.stages).map(outcome).collect()
    }

    /// The one place where a state changes.
    fn transition(&mut self, stage: usize, to: State) {
        let run = &mut self.runs[stage];
        assert!(run.state.may_become(to), "stage {stage} cannot go from {:?} to {to:?}", run.state);
        self.open += usize::from(run.state.is_settled());
        self.open -= usize::from(to.is_settled());
        run.state = to;
        self.changes(stage);
        self.changed.extend(&self.readers[stage]);
    }

    /// Something is new of a stage.
    fn changes(&mut self, stage: usize) {
        self.changed.insert(stage);
        let place = (self.ranks.get(stage).copied().unwrap_or(0), stage);
        match self.runs[stage].is_startable() {
            true => self.startable.insert(place),
            false => self.startable.remove(&place),
        };
    }
}

// What happens to a stage.

impl Stages {
    /// All its inputs are there.
    pub(super) fn make_ready(&mut self, stage: usize) {
        self.transition(stage, State::Ready);
    }

    pub(super) fn set_key(&mut self, stage: usize, key: Digest, document: KeyDocument) {
        let run = &mut self.runs[stage];
        (run.key, run.document) = (Some(key), Some(document));
    }

    /// An input of a ready stage is made again.
    pub(super) fn wait_for_inputs(&mut self, stage: usize) {
        self.forget_key(stage);
        self.transition(stage, State::Waiting);
    }

    /// An input may come out as another one, and then the key is another one.
    fn forget_key(&mut self, stage: usize) {
        self.runs[stage].key = None;
        self.runs[stage].looked_up = false;
        self.changes(stage);
    }

    /// Its result is not there: it is to be made.
    pub(super) fn has_no_result(&mut self, stage: usize) {
        self.runs[stage].looked_up = true;
        self.changes(stage);
    }

    /// It has a result, and is made again all the same.
    pub(super) fn has_result_before(&mut self, stage: usize, outputs: BTreeMap<String, OutputRecord>) {
        self.runs[stage].before = Some(outputs);
        self.has_no_result(stage);
    }

    /// Its result is there.
    pub(super) fn take_result(&mut self, stage: usize, outputs: BTreeMap<String, OutputRecord>) {
        let run = &mut self.runs[stage];
        run.outputs = outputs;
        run.document = None;
        self.transition(stage, State::Cached);
    }

    pub(super) fn skip(&mut self, stage: usize) {
        self.transition(stage, State::Skipped);
    }

    /// It has to wait, for some time or until something changes; whether that it waits for this is news.
    pub(super) fn wait(&mut self, stage: usize, waits_for: WaitsFor, look_again: Option<Duration>) -> bool {
        let run = &mut self.runs[stage];
        run.not_before = look_again.map(|after| Instant::now() + after);
        let is_news = !run.is_said_to_wait_for(&waits_for);
        run.waits_for = Some(waits_for);
        is_news
    }

    /// Its time to wait is over.
    pub(super) fn waited(&mut self, stage: usize) {
        self.runs[stage].not_before = None;
    }

    /// From now on it makes the same with less memory.
    pub(super) fn use_less_memory(&mut self, stage: usize, parameters: Value, change: String) {
        let run = &mut self.runs[stage];
        run.parameters = Some(parameters);
        run.less_memory.push(change);
        run.estimate.take();
    }

    /// A process is about to be started, in a job that is `submitted` now where it is one of a cluster; which attempt
    /// it is.
    pub(super) fn begin_attempt(&mut self, stage: usize, submitted: bool) -> u32 {
        let run = &mut self.runs[stage];
        run.attempts += 1;
        run.tries += 1;
        run.submissions += u32::from(submitted);
        run.waits_for = None;
        run.attempts
    }

    /// Its process is alive.
    pub(super) fn start(&mut self, stage: usize, running: Box<Running>) {
        self.runs[stage].running = Some(running);
        self.running.insert(stage);
        self.transition(stage, State::Running);
    }

    /// Its process said something, which is for the user unless it is how it ended.
    pub(super) fn hear(&mut self, stage: usize, event: WorkerEvent) -> Option<WorkerEvent> {
        self.runs[stage].running.as_mut()?.hear(event)
    }

    /// Its process is gone.
    pub(super) fn end_process(&mut self, stage: usize) -> Option<Box<Running>> {
        self.running.remove(&stage);
        self.runs[stage].running.take()
    }

    /// The job that was to make it has not: it is as if there had been none.
    pub(super) fn put_back(&mut self, stage: usize) {
        let run = &mut self.runs[stage];
        run.attempts -= 1;
        run.tries -= 1;
        self.transition(stage, State::Ready);
    }

    /// Its result is in the store.
    pub(super) fn finish(&mut self, stage: usize, outputs: BTreeMap<String, OutputRecord>) {
        self.runs[stage].outputs = outputs;
        self.transition(stage, State::Done);
    }

    /// All that was to be said of its result has been.
    pub(super) fn settle(&mut self, stage: usize) {
        let run = &mut self.runs[stage];
        (run.again, run.before, run.document) = (false, None, None);
    }

    /// It is tried again, after a while.
    pub(super) fn retry(&mut self, stage: usize, after: Duration) {
        self.runs[stage].not_before = Some(Instant::now() + after);
        self.transition(stage, State::Ready);
    }

    /// It is tried again at once, in a way that counts as a first try.
    pub(super) fn retry_anew(&mut self, stage: usize) {
        self.runs[stage].tries = 0;
        self.transition(stage, State::Ready);
    }

    /// It failed for good.
    pub(super) fn fail(&mut self, stage: usize, failure: Failure) {
        self.runs[stage].failure = Some(failure);
        self.transition(stage, State::Failed);
        if self.failed.is_none() {
            self.failed = Some(stage);
            self.look_at_all();
        }
    }

    /// Counts what is made again since this stage met damage; false where that was `most` times.
    pub(super) fn may_rebuild(&mut self, stage: usize, most: u32) -> bool {
        let rebuilds = &mut self.runs[stage].rebuilds;
        let may = *rebuilds < most;
        *rebuilds += u32::from(may);
        may
    }

    /// It could not read an input, and waits until that is made again.
    pub(super) fn send_back(&mut self, stage: usize) {
        self.forget_key(stage);
        self.reset(stage);
    }

    /// Its result is damaged or gone, and it makes it again.
    pub(super) fn lose_result(&mut self, stage: usize) {
        self.runs[stage].outputs.clear();
        self.runs[stage].looked_up = false;
        self.reset(stage);
    }

    /// The result of a stage is made again and may come out as another one: those that read it and have not begun have
    /// no key until then.
    pub(super) fn forget_keys_behind(&mut self, stage: usize) -> Vec<usize> {
        let mut readers = self.readers[stage].clone();
        readers.retain(|reader| matches!(self.runs[*reader].state, State::Waiting | State::Ready));
        readers.iter().for_each(|reader| self.forget_key(*reader));
        readers
    }

    fn reset(&mut self, stage: usize) {
        let run = &mut self.runs[stage];
        (run.attempts, run.tries) = (0, 0);
        self.transition(stage, State::Waiting);
    }
}

// The processes of all.

impl Stages {
    /// A stage that runs and does the same work as this one: it makes the same result, or has the same working state.
    pub(super) fn running_like(&self, stage: usize) -> Option<usize> {
        let working = self.runs[stage].keyed().1.working_key();
        self.runs.iter().position(|run| run.running.is_some() && run.keyed().1.working_key() == working)
    }

    /// Stages whose process is alive.
    pub(super) fn running(&self) -> impl Iterator<Item = &Running> {
        self.running.iter().filter_map(|stage| self.runs[*stage].running.as_deref())
    }

    /// Stops the processes of all, and kills at a moment those that have not ended by then.
    pub(super) fn stop(&mut self, how: Stop, kill_at: Instant) {
        self.for_each_running(|running| running.stop(how, kill_at));
    }

    /// Kills what was asked to stop and did not, and stops what has run for too long.
    pub(super) fn heed_alarms(&mut self, now: Instant, grace: Duration) {
        self.for_each_running(|running| running.heed_alarms(now, grace));
    }

    /// When one of them has to be looked at though nothing is heard of it.
    pub(super) fn next_alarm(&self) -> Option<Instant> {
        let of_waits = self.startable.iter().filter_map(|(_, stage)| self.runs[*stage].not_before);
        self.running().filter_map(Running::next_alarm).chain(of_waits).min()
    }

    fn for_each_running(&mut self, act: impl Fn(&mut Running)) {
        for stage in &self.running {
            self.runs[*stage].running.iter_mut().for_each(|running| act(running));
        }
    }
}

/// The stages in the order in which they are to be started: the longest remaining chain first, equal ones in the order
/// of the plan. `weights` is what each takes itself, and positive; so the order is one of the graph, too.
fn by_longest_chain<'a>(weights: &[f64], upstream: impl Fn(usize) -> &'a Vec<usize>) -> Vec<usize> {
    // Each stage comes after those it depends on, so from the end on what follows each is known.
    let mut longest = vec![0.0_f64; weights.len()];
    for stage in (0..weights.len()).rev() {
        longest[stage] += weights[stage];
        for before in upstream(stage) {
            longest[*before] = longest[*before].max(longest[stage]);
        }
    }
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|one, other| longest[*other].total_cmp(&longest[*one]).then(one.cmp(other)));
    order
}

/// How a stage stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A stage before it has no result yet.
    #[default]
    Waiting,
    /// Its inputs are there.
    Ready,
    /// Its process is alive.
    Running,
    /// Its result was there already.
    Cached,
    /// Its process has made the result.
    Done,
    /// It failed for good.
    Failed,
    /// It was not run, since another failed or the user stopped the run.
    Skipped,
}

impl State {
    /// Whether its result can be read.
    pub fn has_result(self) -> bool {
        matches!(self, Self::Cached | Self::Done)
    }

    /// Whether nothing more happens to it, unless one of its results turns out to be damaged.
    pub fn is_settled(self) -> bool {
        matches!(self, Self::Cached | Self::Done | Self::Failed | Self::Skipped)
    }

    /// Whether `next` may follow. Beside the plain way (waiting, ready, running, done) there are three more: a cached
    /// result, another try of a stage that failed, and a result that was damaged and is made again.
    fn may_become(self, next: Self) -> bool {
        match self {
            Self::Waiting => matches!(next, Self::Ready | Self::Skipped),
            Self::Ready => {
                matches!(next, Self::Waiting | Self::Running | Self::Cached | Self::Failed | Self::Skipped)
            }
            Self::Running => matches!(next, Self::Done | Self::Failed | Self::Skipped | Self::Ready | Self::Waiting),
            Self::Cached | Self::Done => matches!(next, Self::Waiting),
            Self::Failed | Self::Skipped => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stages of which each waits for those before it that are named.
    fn stages(upstream: &[&[usize]]) -> Stages {
        let count = upstream.len();
        let runs = upstream.iter().map(|before| StageRun { upstream: before.to_vec(), ..StageRun::default() });
        let reads = |before: usize| (0..count).filter(|stage| upstream[*stage].contains(&before)).collect();
        Stages {
            runs: runs.collect(),
            readers: (0..count).map(reads).collect(),
            changed: (0..count).collect(),
            startable: BTreeSet::new(),
            ranks: Vec::new(),
            running: BTreeSet::new(),
            open: count,
            failed: None,
        }
    }

    fn changed(stages: &mut Stages) -> Vec<usize> {
        std::iter::from_fn(|| stages.next_changed()).collect()
    }

    #[test]
    fn a_change_has_a_stage_and_those_that_read_it_looked_at_again() {
        let mut stages = stages(&[&[], &[0], &[0], &[1]]);
        assert_eq!(changed(&mut stages), [0, 1, 2, 3]);
        stages.make_ready(0);
        stages.take_result(0, BTreeMap::new());
        assert_eq!(changed(&mut stages), [0, 1, 2]);
        assert!(!stages.are_settled());
        stages.skip(2);
        assert_eq!(changed(&mut stages), [2]);
        stages.lose_result(0);
        assert_eq!(changed(&mut stages), [0, 1, 2]);
        assert_eq!(stages.forget_keys_behind(0), [1]);
    }

    #[test]
    fn the_longest_chain_is_started_first() {
        let mut stages = stages(&[&[], &[], &[1], &[]]);
        assert_eq!(stages.startable(|| unreachable!("nothing is to be started")), [0; 0]);
        for stage in [0, 1, 3] {
            stages.make_ready(stage);
            stages.has_no_result(stage);
        }
        assert_eq!(stages.startable(|| vec![1.0, 1.0, 1.0, 2.5]), [3, 1, 0]);
        stages.skip(1);
        assert_eq!(stages.startable(|| unreachable!("the order is known")), [3, 0]);
    }

    #[test]
    #[should_panic(expected = "stage 0 cannot go from Waiting to Done")]
    fn a_result_of_a_stage_that_never_ran_is_a_defect() {
        stages(&[&[]]).finish(0, BTreeMap::new());
    }
}
