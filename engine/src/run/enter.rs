//! The way into a run: everything that can stop it before a stage is looked at.

use std::io;

use cache::{StatCache, Store};

use super::checking::{checked, look_closer};
use super::clock;
use super::error::RunError;
use super::event::RunEvent;
use super::executors::Executors;
use super::outcome::{RunOptions, RunOutcome};
use super::pinning::pin;
use super::require::require_machine;
use super::scheduler::Scheduler;
use super::signals::{ExitOnInterrupt, Signals};
use crate::file::problem::Problem;
use crate::history::{History, RunFolder, RunPlan};
use crate::home::Home;
use crate::keys::read_outside;
use crate::lock_file::LockFile;
use crate::plan::Plan;
use crate::publish::{Moment, check_targets};
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
        Ok(findings) if targets.is_empty() => findings,
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
    let warnings = look_closer(plan, home, &store, options, findings)?.into_problems();
    if !warnings.is_empty() {
        observer(&RunEvent::Checked { warnings: warnings.clone() });
    }
    let mut files = StatCache::load(&home.stat_cache());
    let outside = read_outside(plan, &mut files, &lock).map_err(RunError::Sources)?;
    files.save(&home.stat_cache())?;

    let executors = Executors::new(plan, home, &store, options)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(machine("start the event loop for", &store))?;
    drop(preparing);
    let signals = {
        let _entered = runtime.enter();
        Signals::new().map_err(machine("heed signals for", &store))?
    };
    let started = clock::Moment::now();
    let id = started.run_id();
    let folder = home.run(&id);
    let recorder = RunFolder::create(&folder, &RunPlan::new(&id, plan, started))
        .map_err(|source| RunError::Machine { action: "create the folder of the run", path: folder, source })?;
    let scheduler =
        Scheduler::new(plan, warnings, home, &store, options, outside, executors, recorder, seen, &mut observer);
    let outcome = runtime.block_on(scheduler.run(id, signals));
    // The index is made from the run folders again whenever it is read; a failure here loses nothing.
    let _ = History::record_run(home, &outcome.run);
    Ok(outcome)
}

fn machine(action: &'static str, store: &Store) -> impl FnOnce(io::Error) -> RunError {
    let path = store.root().to_owned();
    move |source| RunError::Machine { action, path, source }
}
