//! The checks of a plan on its way into a run: on what is here, then on what servers say about what is pinned.

use cache::Store;

use super::error::RunError;
use super::outcome::RunOptions;
use crate::checks::{Findings, check};
use crate::explain::explain_with;
use crate::home::Home;
use crate::metadata::MetadataCache;
use crate::plan::Plan;
use crate::remote::Asking;

/// What the checks find, where that is nothing that keeps the plan from being run. What others have made needs nothing
/// of this machine: before a plan is refused, the shared cache is asked for its results.
pub(super) fn checked(plan: &Plan, home: &Home, options: &RunOptions) -> Result<Findings, RunError> {
    let look = || check(plan, Some(home), options.executor);
    let mut findings = look();
    if let (Some(settings), false) = (&options.remote, findings.are_fine()) {
        let store = Store::open(home.store())?;
        let mut asking = Asking::new(&settings.place, &store);
        // What it has is remembered in the store. Without an answer the checks stand as they are.
        let _ = explain_with(plan, home, &mut |key| asking.result(key));
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
    let is_elsewhere = unseen.len() < findings.unseen.len();
    if metadata.fetch(plan, &unseen, options.network) || is_elsewhere {
        checked(plan, home, options)
    } else {
        Ok(findings)
    }
}
