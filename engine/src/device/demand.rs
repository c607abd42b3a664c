//! What a stage asks of the devices of a machine.

use devices::DeviceKind;

use super::{DeviceGrant, Lack, Seen};
use crate::plan::{DeviceCount, PlannedStage};
use crate::stage::Workers;

/// Devices that a stage is to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Their kind.
    pub kind: DeviceKind,
    /// How many. On the CPU, workers.
    pub count: usize,
    /// Bytes of memory of each that the file asks for.
    pub memory: Option<u64>,
}

/// Whether a stage computes on the CPU whatever else the machine has.
pub(crate) fn is_on_processor(stage: &PlannedStage) -> bool {
    let kind = stage.resources.device.or_else(|| stage.bound.devices().first().copied());
    kind.is_none_or(|kind| kind == DeviceKind::Cpu)
}

/// What a stage asks for, on a machine; `seen` may be missing for one that computes on the CPU.
pub(crate) fn demand(stage: &PlannedStage, seen: Option<&Seen>) -> Result<Demand, Lack> {
    let kind = kind(stage, seen)?;
    let memory = stage.resources.memory;
    let asked = match (stage.resources.count, stage.bound.workers()) {
        (DeviceCount::Exactly(count), Workers::Many) => Some(count as usize),
        (DeviceCount::All, Workers::Many) => None,
        (_, Workers::One) => Some(1),
    };
    let Some(seen) = seen.filter(|_| kind != DeviceKind::Cpu) else {
        // The CPU is one device.
        return Ok(Demand { kind, count: asked.unwrap_or(1), memory });
    };
    let working = seen.working(kind);
    if working.is_empty() {
        return Err(Lack::NotHere { device: kind, instead: seen.in_words(kind) });
    }
    let count = asked.unwrap_or(working.len());
    if count > working.len() {
        return Err(Lack::TooFew { device: kind, wanted: count, instead: seen.in_words(kind) });
    }
    let is_large = |wanted: u64, total: Option<u64>| total.is_none_or(|total| total >= wanted);
    let large = |wanted| working.iter().filter(|seat| is_large(wanted, seat.device.memory_total)).count();
    match memory.map(|wanted| (wanted, large(wanted))) {
        Some((memory, there)) if there < count => Err(Lack::TooSmall { device: kind, wanted: count, memory, there }),
        _ => Ok(Demand { kind, count, memory }),
    }
}

/// The kind of device: that of the file, else the first of those that the stage prefers and the machine has.
fn kind(stage: &PlannedStage, seen: Option<&Seen>) -> Result<DeviceKind, Lack> {
    let served = stage.bound.devices();
    if let Some(device) = stage.resources.device {
        // The CPU is refused by none: what it takes no one else's place.
        return match device == DeviceKind::Cpu || served.contains(&device) {
            true => Ok(device),
            false => Err(Lack::NotServed { device, stage_kind: stage.kind, served }),
        };
    }
    let is_here =
        |kind: &DeviceKind| *kind == DeviceKind::Cpu || seen.is_some_and(|seen| !seen.working(*kind).is_empty());
    let first = served.first().copied().unwrap_or_default();
    Ok(served.into_iter().find(is_here).unwrap_or(first))
}

/// The CPU, for as many workers as a stage asks for and can use. `all` is one: the CPU is one device.
pub(crate) fn processor(stage: &PlannedStage) -> DeviceGrant {
    let count = match (stage.resources.count, stage.bound.workers()) {
        (DeviceCount::Exactly(count), Workers::Many) => count as usize,
        (DeviceCount::All, _) | (_, Workers::One) => 1,
    };
    DeviceGrant { count, ..DeviceGrant::PROCESSOR }
}
