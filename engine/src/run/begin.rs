//! Starting a stage: key, result that is there already, room, locks, process.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use cache::holder::Holder;
use cache::{Digest, Lock, OutputRecord, ResultRecord};
use devices::lease::Lease;

use super::cluster::JobOf;
use super::devices::{Answer, GrantedDevices};
use super::event::{RunEvent, WaitsFor};
use super::fetch::Look;
use super::scheduler::{LOCK_POLL, Scheduler};
use super::stage_run::State;
use super::stage_run::{Keyed, Running};
use crate::context::stored;
use crate::error::{Cause, OrFail, StageError};
use crate::execute::Launch;
use crate::execute::executor::STAGE_ARGUMENT;
use crate::execute::slurm::record::JobRecord;
use crate::executor::ExecutorKind;
use crate::explain::{Past, Present, Reason, will_do, work_left};
use crate::file::problem::{Problem, Severity};
use crate::history::History;
use crate::keys::stage_key;
use crate::plan::Wanted;
use crate::preflight::Work;
use crate::protocol::WorkerEvent;
use crate::stage::InputFacts;

/// Processes that are named where a lock is held.
const MOST_HOLDERS: usize = 3;

/// What came of the attempt to start a stage.
enum StartOutcome {
    /// Its result is in the store.
    Cached(BTreeMap<String, OutputRecord>),
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
    /// Looks for a ready stage's result, once; whether its state changed.
    pub(super) fn look_up(&mut self, stage: usize) -> bool {
        if self.stages[stage].looked_up {
            return false;
        }
        if self.remote_cache.is_awaited(stage) {
            return false;
        }
        let found = self.keyed(stage).and_then(|key| Ok((key, self.take(stage, &key)?)));
        match found {
            Ok((_, Some(record))) if self.stages[stage].again => {
                self.stages[stage].before = Some(record.outputs);
                self.stages[stage].looked_up = true;
            }
            Ok((_, Some(record))) => self.settle_cached(stage, record.outputs),
            Ok((_, None)) if self.stages[stage].again => self.stages[stage].looked_up = true,
            Ok((key, None)) => match self.look_elsewhere(stage, key) {
                Look::Wait => return false,
                Look::Known(record) => self.settle_cached(stage, record.outputs),
                Look::Nothing if self.plan.stages[stage].wanted == Wanted::Given => {
                    let error = self.not_to_be_made(stage);
                    self.fail(stage, error.into(), Duration::ZERO);
                }
                Look::Nothing => self.stages[stage].looked_up = true,
            },
            Err(error) => self.fail(stage, error.into(), Duration::ZERO),
        }
        true
    }

    fn not_to_be_made(&self, stage: usize) -> StageError {
        let (id, file) = (&self.stages[stage].id, self.plan.file.display());
        StageError::new(Cause::MissingResult, format!("stage `{id}` has no result, and this run was not to make it"))
            .with_help(format!("`pipeline run {file} --until {id}` makes it; or leave out `--from` and `--only`"))
    }

    /// Starts a stage that has no result if it can be; whether its state changed.
    pub(super) fn begin(&mut self, stage: usize) -> bool {
        match self.try_begin(stage) {
            Ok(StartOutcome::NotYet) => false,
            Ok(StartOutcome::Cached(outputs)) => {
                self.settle_cached(stage, outputs);
                true
            }
            Ok(StartOutcome::Started(running)) => {
                self.stages[stage].running = Some(*running);
                self.transition(stage, State::Running);
                true
            }
            Err(error) => {
                self.fail(stage, error.into(), Duration::ZERO);
                true
            }
        }
    }

    fn try_begin(&mut self, stage: usize) -> Result<StartOutcome, StageError> {
        if self.stages[stage].not_before.is_some_and(|not_before| Instant::now() < not_before) {
            return Ok(StartOutcome::NotYet);
        }
        self.stages[stage].not_before = None;
        let key = self.keyed(stage)?;
        if !self.inputs_are_here(stage) {
            return Ok(StartOutcome::NotYet);
        }
        self.require_memory(stage)?;
        let threads = self.threads_wanted(stage);
        if let Some(waits_for) = self.not_admitted_for(stage, threads) {
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
            && let Some(record) = self.take(stage, &key)?
        {
            return Ok(StartOutcome::Cached(record.outputs));
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
        self.start(stage, threads, claim, given).map(Box::new).map(StartOutcome::Started)
    }

    /// The result of a stage's key, if it will do.
    fn take(&self, stage: usize, key: &Digest) -> Result<Option<ResultRecord>, StageError> {
        let found = self.store.take(key).map_err(stored)?;
        Ok(found.filter(|record| will_do(&*self.plan.stages[stage].bound, self.store, record)))
    }

    fn settle_cached(&mut self, stage: usize, outputs: BTreeMap<String, OutputRecord>) {
        let run = &mut self.stages[stage];
        run.outputs = outputs;
        let key = run.key.as_ref().expect("a result was looked up by the key").key;
        let id = run.id.clone();
        self.transition(stage, State::Cached);
        self.tell(RunEvent::StageCached { stage: id, key, remote: self.remote_cache.holds(stage) });
        self.has_result(stage);
    }

    fn keyed(&mut self, stage: usize) -> Result<Digest, StageError> {
        if let Some(keyed) = &self.stages[stage].key {
            return Ok(keyed.key);
        }
        let key = stage_key(&self.plan.stages[stage], &self.outside[stage], |input| {
            Some(self.output(&input.stage, &input.output)?.identity)
        });
        if key.unknown > 0 {
            return Err(StageError::internal("the stage is ready and its key is not known"));
        }
        let digest = key.document.result_key();
        self.stages[stage].key = Some(Keyed { document: key.document, key: digest });
        Ok(digest)
    }

    pub(super) fn output(&self, stage: &str, output: &str) -> Option<&OutputRecord> {
        self.stages[*self.positions.get(stage)?].outputs.get(output)
    }

    /// Both locks or none, so that two runs never wait for each other; or the job of a cluster that makes the result
    /// already.
    fn try_claim(&self, stage: usize) -> Result<Claimed, StageError> {
        let keyed = self.stages[stage].key.as_ref().expect("the key was made before");
        let working = keyed.document.working_key();
        let (of_result, of_working) = (format!("result-{}", keyed.key), format!("working-{working}"));
        let Some(result) = self.store.try_lock(&of_result).map_err(stored)? else {
            return Ok(Claimed::Held(of_result));
        };
        match self.job_of(&keyed.key, &working) {
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

    /// Lets a stage wait for who holds a lock. They are looked for once, since to find them takes a look at every
    /// process.
    fn wait_for_another_run(&mut self, stage: usize, lock: &str) {
        let waits_for = match &self.stages[stage].waits_for {
            Some(said @ WaitsFor::AnotherRun { .. }) => said.clone(),
            _ => WaitsFor::AnotherRun { held_by: held_by(self.store.holders(lock).unwrap_or_default()) },
        };
        self.wait(stage, waits_for, Some(LOCK_POLL));
    }

    pub(super) fn facts_of_inputs(&self, stage: usize) -> InputFacts {
        let facts = self.plan.stages[stage].inputs.iter().filter_map(|input| {
            let output = self.output(&input.stage, &input.output)?;
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
            self.tell(RunEvent::Worker { stage: planned.id.clone(), said });
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
        threads: usize,
        claim: Claim,
        given: GrantedDevices,
    ) -> Result<Running, StageError> {
        let Claim { mut locks, adopt } = claim;
        let GrantedDevices { grant, env, cores, lease } = given;
        let on_cluster = adopt.is_some() || self.is_on_cluster(stage);
        let id = self.stages[stage].id.clone();
        let folder = self.stage_folder(&id)?;
        let staging = if on_cluster { None } else { Some(self.store.staging().map_err(stored)?) };
        // The keeper of a job makes a private folder on its node, and writes its place into the job.
        let private = staging.as_ref().map_or_else(|| folder.join("staging"), |staging| staging.path().to_owned());
        let threads = if on_cluster { self.threads_of_job(stage).unwrap_or(1) } else { threads };
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
        let run = &mut self.stages[stage];
        run.attempts += 1;
        run.tries += 1;
        run.submissions += u32::from(on_cluster && adopt.is_none());
        run.waits_for = None;
        let attempt = run.attempts;
        let cluster = if on_cluster { Some(Box::new(self.cluster_job(stage, adopt)?)) } else { None };
        let inherit = locks.iter().map(AsRawFd::as_raw_fd).chain(lease.iter().flat_map(Lease::descriptors));
        let inherit = inherit.chain(staging.iter().map(|staging| staging.lock().as_raw_fd())).collect();
        let log = folder.join("log");
        let log_from = fs::metadata(&log).map_or(0, |log| log.len());
        let store = self.store.root().to_owned();
        let launch = Launch { stage, job: job_file, log: log.clone(), store, inherit, cluster, env, cores };
        let kills = self.options.memory.kills();
        let executor = if on_cluster { ExecutorKind::Slurm } else { ExecutorKind::Local };
        let devices = Some(grant);
        self.tell(RunEvent::StageStarted { stage: id, key, why, attempt, threads, log_from, executor, devices });
        self.warn_of_memory(stage);
        let promised = self.memory_wanted(stage).map_or(0, |wanted| wanted.bytes);
        let process = self
            .executors
            .start(&launch, self.messages.clone())
            .or_fail(Cause::Machine, || "cannot start the stage's process".to_owned())?;
        let planned = &self.plan.stages[stage];
        // The job holds the lock of its working state itself, once it runs; until then its record keeps others away.
        locks.truncate(if on_cluster { 1 } else { locks.len() });
        Ok(Running {
            process,
            // What a job of a cluster takes, it takes elsewhere; its time begins, and is measured, there.
            threads: if on_cluster { 0 } else { threads },
            memory: if on_cluster { 0 } else { promised },
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
        self.recorder.stage(id).or_fail(Cause::Machine, || "cannot create the stage's folder".to_owned())
    }

    /// Why a stage is started, and what there is to do.
    fn why(&self, stage: usize) -> (Vec<String>, Option<Work>) {
        let run = &self.stages[stage];
        let keyed = run.key.as_ref().expect("the key was made before");
        // An explanation that cannot be had is no reason not to run.
        let history = self.history.get_or_init(|| History::open(self.home).ok());
        let Some(history) = history else { return (Vec::new(), None) };
        let planned = &self.plan.stages[stage];
        let past = Past::new(self.plan, Some(self.store), history);
        let present = Present {
            stage: planned,
            document: &keyed.document,
            outside: &self.outside[stage],
            output: &|input| self.output(&input.stage, &input.output).cloned(),
            facts: &self.facts_of_inputs(stage),
        };
        let declared = planned.bound.preflight(present.facts, planned.span).work;
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
