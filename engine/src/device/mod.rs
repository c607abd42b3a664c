//! Devices: what a stage may compute on.
//!
//! A stage that asks for what its kind cannot use, or this machine does not have, is refused before anything runs, in
//! words that name the way around it.

use devices::DeviceKind;
use serde::{Deserialize, Serialize};

mod demand;
mod held;
mod lack;
mod seen;

pub(crate) use demand::{Demand, demand, is_on_processor, processor};
pub use held::HeldDevice;
pub(crate) use held::{leases, named};
pub use lack::{DeviceMissing, Lack};
pub(crate) use lack::{lack_of, names};
pub use seen::Seen;

/// What a stage process has to compute on: part of its job, and of no key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceGrant {
    pub kind: DeviceKind,
    /// How many there are on each node. On the processor: how many workers share its cores.
    pub count: usize,
    /// Which of the machine's devices of this kind they are, ascending. A process sees no others and counts these from
    /// 0. Empty on the CPU, and where the device variable was set by somebody else (a cluster).
    #[serde(default)]
    pub indices: Vec<u32>,
    /// Machines that take part, with `count` devices each.
    #[serde(default = "one")]
    pub nodes: usize,
}

impl DeviceGrant {
    /// The CPU of one machine, for one worker.
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
