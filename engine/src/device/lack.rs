//! What a stage asks for and cannot have, now or ever.

use devices::DeviceKind;

use super::{Demand, Seen, demand};
use crate::memory::size;
use crate::plan::PlannedStage;

/// A stage that asks for what it cannot have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("stage `{stage}` requests {lack}")]
pub struct DeviceMissing {
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
        stage_kind: &'static str,
        /// What that computes on.
        served: Vec<DeviceKind>,
    },
    /// The machine has none that this process may use.
    #[error("{}, and {}", .device.in_words(), .instead)]
    NotHere {
        /// What it asks for.
        device: DeviceKind,
        /// What there is, as a fragment: `this machine has none`.
        instead: String,
    },
    /// The machine has fewer.
    #[error("{wanted} devices ({device}), and {instead}")]
    TooFew {
        /// What it asks for.
        device: DeviceKind,
        wanted: usize,
        /// What there is, as a fragment.
        instead: String,
    },
    /// Too few of them have the memory.
    #[error("{wanted} devices ({device}) with {} of memory, and this machine has {there} that large", size(*.memory))]
    TooSmall {
        /// What it asks for.
        device: DeviceKind,
        wanted: usize,
        /// How much memory each is to have.
        memory: u64,
        /// How many have it.
        there: usize,
    },
    /// The executor has one machine.
    #[error("{0} nodes, and this machine is one")]
    Nodes(u32),
}

impl DeviceMissing {
    /// What the user can do about it.
    pub fn help(&self) -> String {
        let declared = &self.declared;
        match &self.lack {
            Lack::NotServed { .. } | Lack::NotHere { .. } => {
                format!("to run it on the CPU add `{declared}.resources.device=cpu` to the command")
            }
            Lack::TooFew { .. } => format!("to run it on fewer add `{declared}.resources.count=all` to the command"),
            Lack::TooSmall { .. } => {
                format!("say that it needs less, such as `{declared}.resources.memory=1GiB`, or request fewer devices")
            }
            Lack::Nodes(_) => format!("to run it on this machine add `{declared}.resources.nodes=1` to the command"),
        }
    }
}

/// What a stage that is to run on this machine lacks there; `seen` is the machine, where that has been looked at.
pub(crate) fn lack_of(stage: &PlannedStage, seen: Option<&Seen>) -> Option<DeviceMissing> {
    let lack = match demand(stage, seen) {
        _ if stage.resources.nodes > 1 => Lack::Nodes(stage.resources.nodes),
        Ok(Demand { .. }) => return None,
        Err(lack) => lack,
    };
    Some(DeviceMissing { stage: stage.id.clone(), declared: stage.declared.clone(), lack })
}

/// Kinds of device in words: `cpu, cuda or npu`.
pub(crate) fn names(kinds: &[DeviceKind]) -> String {
    match kinds {
        [] => "nothing".to_owned(),
        [only] => only.in_words(),
        [others @ .., last] => {
            let others: Vec<&str> = others.iter().map(|kind| kind.name()).collect();
            format!("{} or {last}", others.join(", "))
        }
    }
}
