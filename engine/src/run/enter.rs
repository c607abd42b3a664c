//! The way into a run: everything that can stop it before a stage is looked at.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use std::{io, thread};

use cache::Store;
use tokio::runtime::Builder;

use super::clock;
use super::error::RunError;
use super::event::RunEvent;
use super::executors::Executors;
use super::outcome::{RunOptions, RunOutcome};
use super::require::{require_machine, require_results};
use super::scheduler::{Prepared, Scheduler};
use super::signals::{ExitOnInterrupt, Signals};
use crate::checks::{AlreadySeen, Findings, check};
use crate::explain::explain_with;
use crate::file::problem::{Problem, Severity};
use crate::history::{History, RunFolder, RunPlan, new_run_id};
use crate::home::Home;
use crate::keys::read_rest;
use crate::limits;
use crate::lock_file::{LockError, LockFile, Pinning, name};
use crate::metadata::MetadataCache;
use crate::plan::Plan;
use crate::publish::{Moment, check_targets};
use crate::remote::Asking;
use crate::stage::Registry;

/// Runs a plan: takes what is in the store, makes what is not. Ctrl-C once asks the stages to save and stop, twice
/// kills them; before the first stage is looked at it ends the program, with the code of an interrupted run.
///
/// It builds its own single-threaded event loop, so it must not be called from asynchronous code.
///
/// # Errors
/// Fails only before anything runs. A stage that fails is part of the outcome.
pub fn run(
    plan: &Plan,
    home: &Home,
    registry: &Registry,
    options: &RunOptions,
    mut observer: impl FnMut(&RunEvent),
) -> Result<RunOutcome, RunError> {
    // Nothing has begun that would have to be stopped in order, and hashing or a server may take long.
    let preparing = ExitOnInterrupt::new();
    let targets = check_targets(plan, home, Moment::Run(options.on_changed_target));
    let findings = match checked(plan, home, options) {
        Ok(findings) if targets.iter().all(|problem| problem.severity == Severity::Warning) => findings,
        Ok(_) => return Err(RunError::Targets(targets)),
        // Told together, as `validate` tells them.
        Err(RunError::Rejected(mut problems)) => {
            problems.extend(targets);
            problems.sort_by_key(Problem::place);
            return Err(RunError::Rejected(problems));
        }
        Err(error) => return Err(error),
    };
    let store = Store::open(home.store())?;
    let seen = require_machine(plan, home, &store, options)?;
    let mut lock = LockFile::read(&home.lock_file())?;
    let findings = match lock.missing(plan).is_empty() {
        true => findings,
        false => {
            pin(&mut lock, plan, registry, options.pinning, &mut observer)?;
            checked(plan, home, options)?
        }
    };
    let mut findings = look_closer(plan, home, &store, options, findings)?;
    let AlreadySeen { mut files, outside, results } = std::mem::take(&mut findings.seen);
    let mut warnings = findings.into_problems();
    warnings.extend(targets);
    warnings.sort_by_key(Problem::place);
    if !warnings.is_empty() {
        observer(&RunEvent::Checked { warnings: warnings.clone() });
    }
    let outside = read_rest(plan, outside, &mut files, &lock).map_err(RunError::Sources)?;
    files.save(&home.stat_cache())?;
    require_results(plan, home, &store, options)?;

    let executors = Executors::new(plan, home, &store, options)?;
    let runtime =
        limits::event_loop(&mut Builder::new_current_thread()).map_err(machine("start the event loop for", &store))?;
    drop(preparing);
    let signals = {
        let _entered = runtime.enter();
        Signals::new().map_err(machine("heed signals for", &store))?
    };
    let started = clock::Moment::now();
    let id = new_run_id(&home.runs(), started);
    let path = home.run(&id);
    let recorded = RunPlan::new(&id, plan, started);
    let folder = RunFolder::create(&path, &recorded).map_err(|source| RunError::Machine {
        action: "create the folder of the run",
        path,
        source,
    })?;
    let prepared = Prepared { warnings, outside, results, executors, seen, folder };
    let scheduler = Scheduler::new(plan, home, &store, options, prepared, &mut observer);
    let outcome = runtime.block_on(scheduler.run(id, signals));
    // The index is made from the run folders again whenever it is read; a failure here loses nothing.
    let _ = History::record_run(home, recorded);
    Ok(outcome)
}

fn machine(action: &'static str, store: &Store) -> impl FnOnce(io::Error) -> RunError {
    let path = store.root().to_owned();
    move |source| RunError::Machine { action, path, source }
}

// The checks of a plan on its way into a run: on what is here, then on what servers say about what is pinned.

/// What the checks find, where that is nothing that keeps the plan from being run. What others have made needs nothing
/// of this machine: before a plan is refused, the shared cache is asked for its results.
pub(super) fn checked(plan: &Plan, home: &Home, options: &RunOptions) -> Result<Findings, RunError> {
    let look = || check(plan, Some(home), options.executor);
    let mut findings = look();
    if let (Some(settings), false) = (&options.remote, findings.are_fine()) {
        let store = Store::open(home.store())?;
        let mut asking = Asking::new(&settings.place, &store);
        // What it has is remembered in the store. Without an answer the checks stand as they are.
        let _ = explain_with(plan, home, Some(&mut |key| asking.result(key)));
        findings = look();
    }
    if findings.are_fine() { Ok(findings) } else { Err(RunError::Rejected(findings.into_problems())) }
}

/// Checks again with the metadata of what is pinned, before anything large is moved. A result that the shared cache has
/// needs none.
pub(super) fn look_closer(
    plan: &Plan,
    home: &Home,
    store: &Store,
    options: &RunOptions,
    findings: Findings,
) -> Result<Findings, RunError> {
    let metadata = MetadataCache::of(home);
    metadata.tidy();
    let mut unseen = findings.unseen.clone();
    if let Some(settings) = &options.remote {
        let mut asking = Asking::new(&settings.place, store);
        unseen.retain(|unseen| asking.result(&unseen.key).is_none());
    }
    let is_remote = unseen.len() < findings.unseen.len();
    if metadata.fetch(plan, &unseen, options.network) || is_remote {
        checked(plan, home, options)
    } else {
        Ok(findings)
    }
}

// Pinning before a run, said where it takes a while: a server that does not answer is silent for long.

/// A server that answers sooner needs no words.
const PATIENCE: Duration = Duration::from_secs(2);

/// As [`LockFile::resolve`]; tells the observer when it takes longer than a moment.
pub(super) fn pin(
    lock: &mut LockFile,
    plan: &Plan,
    registry: &Registry,
    pinning: Pinning,
    observer: &mut dyn FnMut(&RunEvent),
) -> Result<(), LockError> {
    let pins: Vec<String> = lock.missing(plan).iter().map(|(_, request)| name(request)).collect();
    if pins.is_empty() {
        return Ok(());
    }
    thread::scope(|scope| {
        let (answered, answer) = channel();
        scope.spawn(move || {
            // The receiver waits until this is said.
            let _ = answered.send(lock.resolve(plan, registry, pinning).map(drop));
        });
        let in_time = answer.recv_timeout(PATIENCE);
        if in_time.as_ref().is_err_and(|error| *error == RecvTimeoutError::Timeout) {
            observer(&RunEvent::Pinning { pins });
        }
        in_time.or_else(|_| answer.recv()).expect("the thread says what came out before it ends")
    })
}
