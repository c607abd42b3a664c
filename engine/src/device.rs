//! Devices: what a stage may compute on.
//!
//! A stage that asks for what its kind cannot use, or this machine does not have, is refused before anything runs, in words that name
//! the way around it.

use devices::DeviceKind;
use serde::{Deserialize, Serialize};

use crate::plan::{DeviceCount, Plan, PlannedStage};
use crate::stage::Workers;

/// What a stage process has to compute on: part of its job, and of no key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceGrant {
    /// The kind of device.
    pub kind: DeviceKind,
    /// How many there are on each node. On the processor: how many workers share its cores.
    pub count: usize,
    /// Which of the machine's devices of this kind they are, ascending. A process sees no others and counts these from 0. Empty on
    /// the processor, and where the device variable was set by somebody else (a cluster).
    #[serde(default)]
    pub indices: Vec<u32>,
    /// Machines that take part, with `count` devices each.
    #[serde(default = "one")]
    pub nodes: usize,
}

impl DeviceGrant {
    /// The processor of one machine, for one worker.
    pub const PROCESSOR: Self = Self { kind: DeviceKind::Cpu, count: 1, indices: Vec::new(), nodes: 1 };

    /// All workers, on all nodes.
    pub fn workers(&self) -> usize {
        self.count * self.nodes
    }
}

impl Default for DeviceGrant {
    fn default() -> Self {
        Self::PROCESSOR
    }
}

fn one() -> usize {
    1
}

/// A stage that asks for what it cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("stage `{stage}` asks for {lack}")]
pub struct DeviceMissing {
    /// The stage.
    pub stage: String,
    /// Its id in the file.
    pub declared: String,
    /// What is missing.
    pub lack: Lack,
}

/// What keeps a stage from having the devices that it asks for, now and ever.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Lack {
    /// Its kind computes on others.
    #[error("{}, and `{stage_kind}` computes on {}", .device.in_words(), names(.served))]
    NotServed {
        /// What it asks for.
        device: DeviceKind,
        /// Its kind.
        stage_kind: &'static str,
        /// What that computes on.
        served: Vec<DeviceKind>,
    },
    /// The machine has none.
    #[error("{}, and this machine has none", .0.in_words())]
    NotHere(DeviceKind),
    /// The executor has one machine.
    #[error("{0} nodes, and this machine is one")]
    Nodes(u32),
}

impl DeviceMissing {
    /// What the user can do about it.
    pub fn help(&self) -> String {
        let declared = &self.declared;
        match &self.lack {
            Lack::NotServed { .. } | Lack::NotHere(_) => {
                format!("to run it on the CPU add `{declared}.resources.device=cpu` to the command")
            }
            Lack::Nodes(_) => format!("to run it on this machine add `{declared}.resources.nodes=1` to the command"),
        }
    }
}

/// The stages that ask for what they cannot have.
pub fn missing_devices(plan: &Plan) -> Vec<DeviceMissing> {
    let missing = |stage: &PlannedStage| {
        let lack = lack(stage)?;
        Some(DeviceMissing { stage: stage.id.clone(), declared: stage.declared.clone(), lack })
    };
    plan.stages.iter().filter_map(missing).collect()
}

fn lack(stage: &PlannedStage) -> Option<Lack> {
    if stage.resources.nodes > 1 {
        return Some(Lack::Nodes(stage.resources.nodes));
    }
    let device = stage.resources.device.kind().filter(|device| *device != DeviceKind::Cpu)?;
    let served = stage.bound.devices();
    if served.contains(&device) {
        return Some(Lack::NotHere(device));
    }
    Some(Lack::NotServed { device, stage_kind: stage.kind, served })
}

/// The processor, for as many workers as a stage asks for and can use. `all` is one: the processor is one device.
pub(crate) fn processor(stage: &PlannedStage) -> DeviceGrant {
    let count = match (stage.resources.count, stage.bound.workers()) {
        (DeviceCount::Exactly(count), Workers::Many) => count as usize,
        (DeviceCount::All, _) | (_, Workers::One) => 1,
    };
    DeviceGrant { count, ..DeviceGrant::PROCESSOR }
}

/// Kinds of device in words: `cpu, cuda or npu`.
pub(crate) fn names(kinds: &[DeviceKind]) -> String {
    match kinds {
        [] => "nothing".to_owned(),
        [only] => only.in_words().to_owned(),
        [others @ .., last] => {
            let others: Vec<&str> = others.iter().map(|kind| kind.name()).collect();
            format!("{} or {last}", others.join(", "))
        }
    }
}
