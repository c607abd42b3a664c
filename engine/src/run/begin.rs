//! Starting a stage: key, result that is there already, admission, locks, process.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cache::holder::Holder;
use cache::{Digest, Lock, OutputRecord};
use devices::lease::Lease;

use super::admission::{Admitted, Needs, Place};
use super::cluster::JobOf;
use super::devices::{Answer, DEVICE_MEMORY_POLL, GrantedDevices, LEASE_POLL};
use super::event::{RunEvent, WaitsFor};
use super::remote_cache::Look;
use super::running::Running;
use super::scheduler::{LOCK_POLL, Scheduler};
use super::stages::StageRun;
use crate::context::stored;
use crate::device::{is_on_processor, named};
use crate::error::{Cause, OrFail, StageError};
use crate::execute::Launch;
use crate::execute::executor::STAGE_ARGUMENT;
use crate::execute::slurm::record::JobRecord;
use crate::executor::ExecutorKind;
use crate::explain::{Past, Present, Reason, ResultMissing, will_do, work_left};
use crate::file::problem::{Problem, Severity};
use crate::forecast::{Ahead, Work};
use crate::keys::stage_key;
use crate::plan::{ResolvedInput, Wanted};
use crate::protocol::WorkerEvent;
use crate::stage::InputFacts;

/// How often free memory is looked at, of which nobody tells that there is more.
const MEMORY_POLL: Duration = Duration::from_millis(500);

/// Processes that are named where a lock is held.
const MOST_HOLDERS: usize = 3;

/// The outputs of a stage by name.
type Outputs = BTreeMap<String, OutputRecord>;

/// What came of the attempt to start a stage.
enum StartOutcome {
    /// Its result is in the store.
    Cached(Outputs),
    /// Its process is alive.
    Started(Box<Running>),
    /// It has to wait: for a core, for another try, for another run.
    NotYet,
}

/// A stage that nobody else makes.
struct Claim {
    locks: Vec<Lock>,
    /// The job that makes it already, submitted by a run that is gone.
    adopt: Option<JobRecord>,
}

/// What came of the attempt to claim a stage.
enum Claimed {
    Ours(Claim),
    /// Another holds the lock of this name, or a job of a cluster soon will.
    Held(String),
}

impl Scheduler<'_> {
    /// Looks for a ready stage's result, once.
    pub(super) fn look_up(&mut self, stage: usize) {
        if self.stages[stage].looked_up || self.remote_cache.is_awaited(stage) {
            return;
        }
        let found = self.keyed(stage).and_then(|key| Ok((key, self.take(stage, &key)?)));
        match found {
            Ok((_, Some(outputs))) if self.stages[stage].again => self.stages.has_result_before(stage, outputs),
            Ok((_, Some(outputs))) => self.settle_cached(stage, outputs),
            Ok((_, None)) if self.stages[stage].again => self.stages.has_no_result(stage),
            Ok((key, None)) => match self.remote_cache.look(stage, key) {
                Look::Wait => {}
                Look::Fetching => self.tell_fetching(stage),
                Look::Known(record) => self.settle_cached(stage, record.outputs),
                Look::Nothing if self.plan.stages[stage].wanted == Wanted::Given => {
                    let error = self.not_to_be_made(stage);
                    self.fail(stage, error.into(), Duration::ZERO);
                }
                Look::Nothing => self.stages.has_no_result(stage),
            },
            Err(error) => self.fail(stage, error.into(), Duration::ZERO),
        }
    }

    fn not_to_be_made(&self, stage: usize) -> StageError {
        let missing = ResultMissing { stage: self.id(stage), file: self.plan.file.clone() };
        let command = self.plan.command_until(&missing.stage, self.home);
        StageError::new(Cause::MissingResult, missing.to_string()).with_help(ResultMissing::help_by(&command))
    }

    /// Starts a stage that has no result, if it can be.
    pub(super) fn begin(&mut self, stage: usize) {
        match self.try_begin(stage) {
            Ok(StartOutcome::NotYet) => {}
            Ok(StartOutcome::Cached(outputs)) => self.settle_cached(stage, outputs),
            Ok(StartOutcome::Started(running)) => self.stages.start(stage, running),
            Err(error) => self.fail(stage, error.into(), Duration::ZERO),
        }
    }

    fn try_begin(&mut self, stage: usize) -> Result<StartOutcome, StageError> {
        // Of thousands that wait for a core, none is gone into again before there is one.
        let is_known = |waits_for: &WaitsFor| self.stages[stage].is_said_to_wait_for(waits_for);
        if self.stages[stage].not_before.is_some_and(|not_before| Instant::now() < not_before)
            || self.admission.exhausted().as_ref().is_some_and(is_known)
        {
            return Ok(StartOutcome::NotYet);
        }
        self.stages.waited(stage);
        let key = self.keyed(stage)?;
        if !self.inputs_are_here(stage) {
            return Ok(StartOutcome::NotYet);
        }
        self.require_memory(stage)?;
        let place = self.place_of(stage);
        let slots = &self.plan.stages[stage].resources.slots;
        if let Some(waits_for) = self.admission.lacks(&Needs { place, slots }) {
            self.wait_for_admission(stage, waits_for);
            return Ok(StartOutcome::NotYet);
        }
        let claim = match self.try_claim(stage)? {
            Claimed::Ours(claim) => claim,
            Claimed::Held(lock) => {
                self.wait_for_another_run(stage, &lock);
                return Ok(StartOutcome::NotYet);
            }
        };
        // Whoever held the lock a moment ago may have made the result.
        if !self.stages[stage].again
            && let Some(outputs) = self.take(stage, &key)?
        {
            return Ok(StartOutcome::Cached(outputs));
        }
        self.check_with_facts(stage)?;
        let given = match self.ask_for_devices(stage, claim.adopt.is_some())? {
            Answer::GrantedDevices(given) => given,
            Answer::Wait(waits_for) => {
                self.wait_for_admission(stage, waits_for);
                return Ok(StartOutcome::NotYet);
            }
            Answer::Looking => return Ok(StartOutcome::NotYet),
        };
        self.start(stage, place, claim, given).map(Box::new).map(StartOutcome::Started)
    }

    /// Where a stage is to run, and what it needs there.
    fn place_of(&self, stage: usize) -> Place {
        if self.executors.is_on_cluster(stage) {
            return Place::Cluster;
        }
        let planned = &self.plan.stages[stage];
        let memory = is_on_processor(planned).then(|| self.memory_wanted(stage)).flatten();
        Place::Here { threads: self.admission.threads_for(planned), memory }
    }

    /// The devices of a stage that is to start now. Those of a cluster's job the cluster chooses; `adopted` is one that
    /// an earlier run has submitted.
    fn ask_for_devices(&mut self, stage: usize, adopted: bool) -> Result<Answer, StageError> {
        if adopted || self.executors.is_on_cluster(stage) {
            return Ok(Answer::GrantedDevices(GrantedDevices::unleased(self.devices_of_job(stage)?)));
        }
        let planned = &self.plan.stages[stage];
        let estimate = self.memory_wanted(stage).map(|estimate| estimate.least());
        let holder = || named(&format!("`{}` of run {}", planned.id, self.recorder.run()));
        self.admission.devices.ask(planned, estimate, holder)
    }

    /// The result of a stage's key, if it will do.
    fn take(&mut self, stage: usize, key: &Digest) -> Result<Option<Outputs>, StageError> {
        let found = match self.results[stage].take().filter(|seen| seen.key == *key) {
            Some(seen) => self.store.take_seen(seen),
            None => self.store.take(key).map(|record| record.map(|record| record.outputs)),
        };
        let will_do = |outputs: &Outputs| will_do(&*self.plan.stages[stage].bound, self.store, outputs);
        Ok(found.map_err(stored)?.filter(will_do))
    }

    fn settle_cached(&mut self, stage: usize, outputs: Outputs) {
        let key = self.stages[stage].key.expect("a result was looked up by the key");
        self.stages.take_result(stage, outputs);
        let remote = self.remote_cache.holds(stage);
        self.recorder.tell(RunEvent::StageCached { stage: self.id(stage), key, remote });
        self.remote_cache.hand_over(stage, key);
        self.has_result(stage);
    }

    fn keyed(&mut self, stage: usize) -> Result<Digest, StageError> {
        if let StageRun { key: Some(key), document: Some(_), .. } = &self.stages[stage] {
            return Ok(*key);
        }
        let identity = |input: &ResolvedInput| Some(self.output(input)?.identity);
        let key = stage_key(&self.plan.stages[stage], &self.outside[stage], identity);
        if key.unknown > 0 {
            return Err(StageError::internal("the stage is ready and its key is not known"));
        }
        let digest = key.document.result_key();
        self.stages.set_key(stage, digest, key.document);
        Ok(digest)
    }

    /// What an input of a stage is, once the stage that makes it has.
    pub(super) fn output(&self, input: &ResolvedInput) -> Option<&OutputRecord> {
        self.stages[input.position].outputs.get(&input.output)
    }

    /// Both locks or none, so that two runs never wait for each other; or the job of a cluster that makes the result
    /// already.
    fn try_claim(&self, stage: usize) -> Result<Claimed, StageError> {
        let (key, document) = self.stages[stage].keyed();
        let working = document.working_key();
        let (of_result, of_working) = (format!("result-{key}"), format!("working-{working}"));
        let Some(result) = self.store.try_lock(&of_result).map_err(stored)? else {
            return Ok(Claimed::Held(of_result));
        };
        match self.job_of(key, &working) {
            // The job holds the other lock itself.
            JobOf::Makes(record) => {
                return Ok(Claimed::Ours(Claim { locks: vec![result], adopt: Some(*record) }));
            }
            JobOf::SharesState => return Ok(Claimed::Held(of_working)),
            JobOf::None => {}
        }
        match self.store.try_lock(&of_working).map_err(stored)? {
            Some(working) => Ok(Claimed::Ours(Claim { locks: vec![result, working], adopt: None })),
            None => Ok(Claimed::Held(of_working)),
        }
    }

    /// Lets a stage wait for who holds a lock: another stage of this run that does the same work, or other runs. They
    /// are looked for once, since to find them takes a look at every process.
    fn wait_for_another_run(&mut self, stage: usize, lock: &str) {
        let waits_for = match (self.stages.running_like(stage), &self.stages[stage].waits_for) {
            (Some(other), _) => WaitsFor::AnotherStage { other: self.id(other) },
            (None, Some(said @ WaitsFor::AnotherRun { .. })) => said.clone(),
            (None, _) => WaitsFor::AnotherRun { held_by: held_by(self.store.holders(lock).unwrap_or_default()) },
        };
        self.wait(stage, waits_for, Some(LOCK_POLL));
    }

    /// Lets a stage wait for room on the machine.
    fn wait_for_admission(&mut self, stage: usize, waits_for: WaitsFor) {
        let look_again = match waits_for {
            WaitsFor::Memory { .. } => Some(MEMORY_POLL),
            WaitsFor::Devices { wanted_bytes: Some(_), .. } => Some(DEVICE_MEMORY_POLL),
            WaitsFor::Devices { wanted_bytes: None, .. } => Some(LEASE_POLL),
            WaitsFor::AnotherRun { .. }
            | WaitsFor::AnotherStage { .. }
            | WaitsFor::Queue { .. }
            | WaitsFor::Jobs { .. }
            | WaitsFor::Threads { .. }
            | WaitsFor::Slots { .. } => None,
        };
        self.wait(stage, waits_for, look_again);
    }

    /// Lets a stage wait, and says so where it is news.
    fn wait(&mut self, stage: usize, waits_for: WaitsFor, look_again: Option<Duration>) {
        if self.stages.wait(stage, waits_for.clone(), look_again) {
            self.recorder.tell(RunEvent::StageWaiting { stage: self.id(stage), waits_for });
        }
    }

    pub(super) fn facts_of_inputs(&self, stage: usize) -> InputFacts {
        let facts = self.plan.stages[stage].inputs.iter().filter_map(|input| {
            let output = self.output(input)?;
            Some((format!("{}.{}", input.stage, input.output), output.facts.clone()))
        });
        facts.collect()
    }

    /// What the plan could not check, since the inputs had never been made.
    fn check_with_facts(&mut self, stage: usize) -> Result<(), StageError> {
        let planned = &self.plan.stages[stage];
        let facts = self.facts_of_inputs(stage);
        let found =
            planned.bound.check(&facts, planned.span).into_iter().map(|problem| problem.placed(&planned.field_spans));
        let (errors, warnings): (Vec<_>, Vec<_>) = found.partition(|problem| problem.severity == Severity::Error);
        // Said once: with the plan, or with the first attempt.
        let first = self.stages[stage].attempts == 0;
        let said = || self.plan.warnings.iter().chain(&self.warnings);
        let known = |warning: &Problem| said().any(|known| known.says_the_same(warning));
        let unsaid: Vec<Problem> = warnings.into_iter().filter(|warning| first && !known(warning)).collect();
        for warning in unsaid {
            let said = WorkerEvent::Warning { message: warning.message };
            self.recorder.tell(RunEvent::Worker { stage: planned.id.clone(), said });
        }
        let Some(first) = errors.first() else { return Ok(()) };
        let (line, column) = self.plan.sources.line_column(first.span);
        let name = self.plan.sources.get(first.span.source).map_or("", |source| source.name.as_str());
        let messages: Vec<_> = errors.iter().map(|problem| problem.message.as_str()).collect();
        let error = StageError::new(Cause::BadParameters, format!("{} ({name}:{line}:{column})", messages.join("; ")));
        Err(match &first.help {
            Some(help) => error.with_help(help),
            None => error,
        })
    }

    fn start(
        &mut self,
        stage: usize,
        place: Place,
        Claim { mut locks, adopt }: Claim,
        GrantedDevices { grant, env, cores, lease }: GrantedDevices,
    ) -> Result<Running, StageError> {
        // A job of an earlier run may make what this one would make here.
        let place = if adopt.is_some() { Place::Cluster } else { place };
        let on_cluster = matches!(place, Place::Cluster);
        let id = self.id(stage);
        let folder = self.stage_folder(&id)?;
        let staging = if on_cluster { None } else { Some(self.store.staging().map_err(stored)?) };
        // The keeper of a job makes a private folder on its node, and writes its place into the job.
        let private = staging.as_ref().map_or_else(|| folder.join("staging"), |staging| staging.path().to_owned());
        let threads = match place {
            Place::Here { threads, .. } => threads,
            Place::Cluster => self.threads_of_job(stage).unwrap_or(1),
        };
        let threads = if cores.is_empty() { threads } else { threads.min(cores.len()) };
        let job = self.job(stage, threads, grant.clone(), &private, folder.clone())?;
        if self.stages[stage].again && self.stages[stage].attempts == 0 && adopt.is_none() {
            // A result that continues from the saved end of the one before would only be that one.
            let emptied = fs::remove_dir_all(&job.working).and_then(|()| fs::create_dir(&job.working));
            emptied.or_fail(Cause::Machine, || format!("cannot empty `{}`", job.working.display()))?;
        }
        let key = job.key;
        let job_file = folder.join("job.json");
        let text = serde_json::to_vec_pretty(&job).expect("a job is plain data");
        fs::write(&job_file, text).or_fail(Cause::Machine, || format!("cannot write `{}`", job_file.display()))?;
        let (why, work) = self.why(stage);
        let attempt = self.stages.begin_attempt(stage, on_cluster && adopt.is_none());
        let cluster = if on_cluster { Some(Box::new(self.cluster_job(stage, adopt)?)) } else { None };
        let inherit = locks.iter().map(AsRawFd::as_raw_fd).chain(lease.iter().flat_map(Lease::descriptors));
        let inherit = inherit.chain(staging.iter().flat_map(|staging| self.store.descriptors(staging))).collect();
        let log = folder.join("log");
        let log_from = fs::metadata(&log).map_or(0, |log| log.len());
        let store = self.store.root().to_owned();
        let launch = Launch { stage, job: job_file, log: log.clone(), store, inherit, cluster, env, cores };
        let kills = self.options.memory.kills();
        let executor = if on_cluster { ExecutorKind::Slurm } else { ExecutorKind::Local };
        let devices = Some(grant);
        self.recorder.tell(RunEvent::StageStarted {
            stage: id,
            key,
            why,
            attempt,
            threads,
            log_from,
            executor,
            devices,
        });
        self.warn_of_memory(stage);
        let process =
            self.executors.start(&launch).or_fail(Cause::Machine, || "cannot start the stage's process".to_owned())?;
        let planned = &self.plan.stages[stage];
        let promised = self.memory_wanted(stage).map_or(0, |wanted| wanted.bytes);
        // What a job of a cluster takes, it takes elsewhere; its time begins, and is measured, there.
        let (threads, memory) = if on_cluster { (0, 0) } else { (threads, promised) };
        let slots = planned.resources.slots.clone();
        self.admission.admit(stage, Admitted { threads, memory, slots, process: process.id() });
        // The job holds the lock of its working state itself, once it runs; until then its record keeps others away.
        locks.truncate(if on_cluster { 1 } else { locks.len() });
        Ok(Running {
            process,
            kills,
            log,
            log_from,
            timeout_at: planned.timeout.filter(|_| !on_cluster).map(|timeout| Instant::now() + timeout),
            kill_at: None,
            timed_out: false,
            finished: None,
            failed: None,
            work,
            _locks: locks,
            _lease: lease,
            _staging: staging,
        })
    }

    fn stage_folder(&self, id: &str) -> Result<PathBuf, StageError> {
        self.recorder.folder().stage(id).or_fail(Cause::Machine, || "cannot create the stage's folder".to_owned())
    }

    /// Why a stage is started, and what there is to do.
    fn why(&self, stage: usize) -> (Vec<String>, Option<Work>) {
        let run = &self.stages[stage];
        // An explanation that cannot be had is no reason not to run.
        let Some(history) = self.history.as_ref() else { return (Vec::new(), None) };
        let planned = &self.plan.stages[stage];
        let past = Past::new(self.plan, Some(self.store), history);
        let present = Present {
            stage: planned,
            document: run.keyed().1,
            outside: &self.outside[stage],
            output: &|input| self.output(input).cloned(),
            facts: &self.facts_of_inputs(stage),
        };
        let declared = planned.bound.forecast(&Ahead::of_results(present.facts, planned.span)).work;
        let work = work_left(declared, present.outside, past.working_state(&present).as_ref());
        if let (true, Some(change)) = (run.tries == 0, run.less_memory.last()) {
            let again = if run.attempts > 0 { "again " } else { "" };
            return (vec![format!("{again}with less memory: {change}")], work);
        }
        if run.tries == 0 && run.before.is_some() {
            return (vec![Reason::Forced.to_string()], work);
        }
        if run.tries > 0 {
            return (vec![format!("attempt {} of {}", run.tries + 1, planned.retries.max + 1)], work);
        }
        let reasons = past.reasons(&present).unwrap_or_default();
        (reasons.iter().map(ToString::to_string).collect(), work)
    }
}

/// `process 4711 (pipeline run a.yaml)`. Where an engine holds a lock its stage's process does too, and says less.
fn held_by(holders: Vec<Holder>) -> Vec<String> {
    let is_stage = |holder: &Holder| holder.command.split(' ').nth(1) == Some(STAGE_ARGUMENT);
    let (stages, others): (Vec<Holder>, Vec<Holder>) = holders.into_iter().partition(is_stage);
    let told = if others.is_empty() { stages } else { others };
    told.iter().take(MOST_HOLDERS).map(|Holder { pid, command }| format!("process {pid} ({command})")).collect()
}
