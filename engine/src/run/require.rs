//! What a stage asks of the machine that the machine does not have: known before anything runs.

use cache::Store;

use super::cluster::is_on_cluster;
use super::error::{MemoryMissing, RunError};
use super::outcome::RunOptions;
use crate::device::{Lack, missing_devices};
use crate::explain::{ExplainError, Forecast, explain_with};
use crate::home::Home;
use crate::memory::Memory;
use crate::plan::Plan;
use crate::remote::Asking;

/// The stages that ask for more memory than this machine has.
pub fn missing_memory(plan: &Plan, memory: &Memory) -> Vec<MemoryMissing> {
    let asks = plan.stages.iter().filter_map(|stage| Some((stage, stage.resources.memory?)));
    let Some(total_bytes) = memory.total() else { return Vec::new() };
    let too_much = asks.filter(|(_, wanted)| *wanted > total_bytes);
    too_much.map(|(stage, wanted_bytes)| MemoryMissing { stage: stage.id.clone(), wanted_bytes, total_bytes }).collect()
}

/// Refuses stages that this machine cannot run, unless their results are there: a finished pipeline is finished on every machine.
pub(super) fn require_machine(plan: &Plan, home: &Home, store: &Store, options: &RunOptions) -> Result<(), RunError> {
    let (mut devices, mut too_large) = (missing_devices(plan), missing_memory(plan, &options.memory));
    // What a cluster has is for the cluster to say.
    let is_here = |id: &str| {
        let stage = plan.stages.iter().position(|stage| stage.id == id);
        stage.is_none_or(|stage| !is_on_cluster(plan, options, stage))
    };
    devices.retain(|missing| is_here(&missing.stage) || matches!(missing.lack, Lack::NotServed { .. }));
    too_large.retain(|missing| is_here(&missing.stage));
    if devices.is_empty() && too_large.is_empty() {
        return Ok(());
    }
    let mut asking = options.remote.as_ref().map(|settings| Asking::new(&settings.place, store));
    let forecasts = explain_with(plan, home, &mut |key| asking.as_mut()?.result(key)).map_err(|error| match error {
        ExplainError::Sources(problems) => RunError::Sources(problems),
        other => RunError::Explain(Box::new(other)),
    })?;
    let is_there = |status| matches!(status, Forecast::Cached | Forecast::Remote);
    let has_result =
        |stage: &str| forecasts.iter().any(|forecast| forecast.stage == stage && is_there(forecast.status));
    devices.retain(|missing| !has_result(&missing.stage));
    too_large.retain(|missing| !has_result(&missing.stage));
    match (devices.is_empty(), too_large.is_empty()) {
        (false, _) => Err(RunError::Devices(devices)),
        (true, false) => Err(RunError::Memory(too_large)),
        (true, true) => Ok(()),
    }
}
