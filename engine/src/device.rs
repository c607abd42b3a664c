//! Devices: what a stage may compute on.
//!
//! This build computes on the processor. A stage that asks for something else is refused before anything runs, in words that name the
//! way around it.

use devices::DeviceKind;
use serde::{Deserialize, Serialize};

use crate::plan::{DeviceRequest, Plan, PlannedStage};

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

/// A stage that asks for a device that this program cannot use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("stage `{stage}` asks for {device}, and this build computes on the CPU")]
pub struct DeviceMissing {
    /// The stage.
    pub stage: String,
    /// Its id in the file.
    pub declared: String,
    /// The device, in words.
    pub device: &'static str,
}

impl DeviceMissing {
    /// What the user can do about it.
    pub fn help(&self) -> String {
        format!("to run it on the CPU add `{}.resources.device=cpu` to the command", self.declared)
    }
}

/// The stages that ask for a device that is not there.
pub fn missing_devices(plan: &Plan) -> Vec<DeviceMissing> {
    plan.stages.iter().filter_map(missing_device).collect()
}

fn missing_device(stage: &PlannedStage) -> Option<DeviceMissing> {
    let device = not_served(stage.resources.device)?;
    Some(DeviceMissing { stage: stage.id.clone(), declared: stage.declared.clone(), device })
}

/// A device that this build cannot compute on, in words.
pub(crate) fn not_served(device: DeviceRequest) -> Option<&'static str> {
    Some(match device {
        DeviceRequest::Auto | DeviceRequest::Cpu => return None,
        DeviceRequest::Cuda => "a CUDA device (NVIDIA)",
        DeviceRequest::Npu => "an NPU (Ascend)",
        DeviceRequest::Rocm => "a ROCm device (AMD)",
        DeviceRequest::Metal => "a Metal device (Apple)",
    })
}
