//! What a stage asks of the machine that the machine does not have: known before anything runs.

use cache::Store;

use super::devices::kinds_of;
use super::error::{MemoryMissing, RunError};
use super::executors::is_on_cluster;
use super::outcome::RunOptions;
use crate::device::{DeviceMissing, Lack, Seen, is_on_processor, lack_of};
use crate::explain::{ExplainError, StageForecast, Status, explain, explain_with, missing_results};
use crate::home::Home;
use crate::memory::Memory;
use crate::plan::{Plan, PlannedStage, Wanted};
use crate::remote::Asking;

/// The stages that ask for more memory than this machine has.
pub fn missing_memory(plan: &Plan, memory: &Memory) -> Vec<MemoryMissing> {
    let of_machine = plan.stages.iter().filter(|stage| is_on_processor(stage));
    let asks = of_machine.filter_map(|stage| Some((stage, stage.resources.memory?)));
    let Some(total_bytes) = memory.total() else { return Vec::new() };
    let too_much = asks.filter(|(_, wanted)| *wanted > total_bytes);
    too_much.map(|(stage, wanted_bytes)| MemoryMissing { stage: stage.id.clone(), wanted_bytes, total_bytes }).collect()
}

/// Refuses stages that this machine cannot run, unless their results are there: a finished pipeline is finished on
/// every machine. What was seen of its devices, where some stage that is to run may use more than the CPU.
pub(super) fn require_machine(
    plan: &Plan,
    home: &Home,
    store: &Store,
    options: &RunOptions,
) -> Result<Option<Seen>, RunError> {
    let mut too_large = missing_memory(plan, &options.memory);
    // What a cluster has is for the cluster to say.
    let is_here = |id: &str| {
        let stage = plan.stages.iter().position(|stage| stage.id == id);
        stage.is_none_or(|stage| !is_on_cluster(plan, options, stage))
    };
    too_large.retain(|missing| is_here(&missing.stage));
    let asks = |stage: &&PlannedStage| !is_on_processor(stage) || lack_of(stage, None).is_some();
    let mut asking: Vec<&PlannedStage> = plan.stages.iter().filter(asks).collect();
    if asking.is_empty() && too_large.is_empty() {
        return Ok(None);
    }
    let has_result = results(plan, home, store, options)?;
    asking.retain(|stage| !has_result(&stage.id));
    too_large.retain(|missing| !has_result(&missing.stage));
    // What no machine has is said without a look at this one.
    let lacks = |seen: Option<&Seen>| -> Vec<DeviceMissing> {
        let missing = asking.iter().filter_map(|stage| lack_of(stage, seen));
        missing.filter(|missing| is_here(&missing.stage) || matches!(missing.lack, Lack::NotServed { .. })).collect()
    };
    let mut missing = lacks(None);
    let looks = missing.is_empty() && asking.iter().any(|stage| !is_on_processor(stage) && is_here(&stage.id));
    let seen = looks.then(|| Seen::look(&kinds_of(plan)));
    if seen.is_some() {
        missing = lacks(seen.as_ref());
    }
    match (missing.is_empty(), too_large.is_empty()) {
        (false, _) => Err(RunError::Devices(missing)),
        (true, false) => Err(RunError::Memory(too_large)),
        (true, true) => Ok(seen),
    }
}

/// Refuses a part of a plan that reads results which are not there. What is known only once other stages are done is
/// left to the run.
pub(super) fn require_results(plan: &Plan, home: &Home, store: &Store, options: &RunOptions) -> Result<(), RunError> {
    if plan.stages.iter().all(|stage| stage.wanted != Wanted::Given) {
        return Ok(());
    }
    let (forecasts, answers) = forecasts(plan, home, store, options)?;
    // A shared cache that does not answer, or has a record that is damaged, is told of by the run.
    let missing = if answers { missing_results(plan, &forecasts) } else { Vec::new() };
    if missing.is_empty() { Ok(()) } else { Err(RunError::Results(missing)) }
}

/// Which stages have their results, here or in the shared cache.
fn results(plan: &Plan, home: &Home, store: &Store, options: &RunOptions) -> Result<impl Fn(&str) -> bool, RunError> {
    let (forecasts, _) = forecasts(plan, home, store, options)?;
    let is_there = |status| matches!(status, Status::Cached | Status::Remote);
    Ok(move |stage: &str| forecasts.iter().any(|forecast| forecast.stage == stage && is_there(forecast.status)))
}

/// What would become of each stage, with the results of the shared cache, and whether that answered all that it was
/// asked.
fn forecasts(
    plan: &Plan,
    home: &Home,
    store: &Store,
    options: &RunOptions,
) -> Result<(Vec<StageForecast>, bool), RunError> {
    let Some(settings) = &options.remote else {
        return Ok((explain(plan, home).map_err(unexplained)?, true));
    };
    let mut asking = Asking::new(&settings.place, store);
    let forecasts = explain_with(plan, home, Some(&mut |key| asking.result(key))).map_err(unexplained)?;
    let (failed, refused) = asking.failures();
    Ok((forecasts, failed.is_none() && refused.is_empty()))
}

fn unexplained(error: ExplainError) -> RunError {
    match error {
        ExplainError::Sources(problems) => RunError::Sources(problems),
        other => RunError::Explain(Box::new(other)),
    }
}
