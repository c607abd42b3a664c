//! What there is to know of a vendor's devices: what they are called, how they are found and asked for, and what can be
//! wrong with them.
//!
//! A vendor is a folder that implements [`Vendor`], and a line of the list in `kind`.

use crate::doctor::{Finding, Installed, Subject};
use crate::{Device, Inventory, Machine};

/// A vendor's devices.
pub trait Vendor: Sync {
    /// What is said of them, and by which names others know them.
    fn facts(&self) -> Facts;

    /// The devices of a machine, as the driver's own library or tool lists them.
    fn ask(&self, machine: &Machine) -> Inventory;

    /// Whether a cluster's own name for a generic resource, such as `gpu:ascend910b`, can mean no other vendor's.
    fn owns_gres(&self, _name: &str) -> bool {
        false
    }

    /// What to do about a device that is not well.
    fn when_unwell(&self, _device: &Device) -> String {
        "its driver's own tool says more".to_owned()
    }

    /// What a process opens to compute on the devices that were found.
    fn nodes(&self, _subject: &Subject) -> Option<DeviceNodes> {
        None
    }

    /// What is wrong with lists of visible devices, beside what [`ListForm`] says.
    fn check_visible(&self, _subject: &Subject) -> Option<Finding> {
        None
    }

    /// What is wrong with the ports at which ranks meet, of which `listening` are in use. Queried where there is a
    /// device.
    fn check_ports(&self, _subject: &Subject, _listening: &[u16]) -> Vec<Finding> {
        Vec::new()
    }

    /// Versions of driver, toolkit and torch that do not go together.
    fn check_torch(&self, _subject: &Subject, _installed: &Installed) -> Vec<Finding> {
        Vec::new()
    }
}

/// What is said of a vendor's devices, and by which names others know them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Facts {
    /// One of them: `an NPU`.
    pub one: &'static str,
    /// Several: `NPUs`.
    pub several: &'static str,
    /// Whose they are.
    pub maker: Option<&'static str>,
    /// What stood in for such a device so far; None where this program has run on one.
    pub untried: Option<&'static str>,
    /// What stood in for several at once, where this program has run on one alone.
    pub untried_together: Option<&'static str>,
    /// The driver's libraries and tools that are asked.
    pub tools: &'static [&'static str],
    /// What to do where one of them fails.
    pub when_a_tool_fails: &'static str,
    /// How a process is told which of them it sees.
    pub visible: Option<VisibleDevices>,
    /// What the torch worker has for them; None where it does not compute on them.
    pub torch: Option<TorchSupport>,
    /// What Slurm calls them (`--gres`).
    pub gres: Option<&'static str>,
    /// What Kubernetes calls them, by the vendor's device plugin.
    pub kubernetes_resource: Option<&'static str>,
    /// The environment variables that the runtime reads, in the form that `doctor/variables.rs` describes.
    pub variables: &'static str,
}

/// How a process is told which of a machine's devices it sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VisibleDevices {
    /// The variable that the process reads: indices of an [`Inventory`].
    pub variable: &'static str,
    /// One that is read before it, whose devices it then counts from 0.
    pub outer: Option<&'static str>,
    /// One that container runtimes alone read.
    pub of_containers: Option<&'static str>,
    /// What is set with it, so that its numbers are those of the [`Inventory`].
    pub beside: Option<(&'static str, &'static str)>,
    /// Which values are read.
    pub form: ListForm,
    /// Whether Slurm sets it for a job.
    pub is_set_by_slurm: bool,
}

/// Which lists of devices a runtime reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListForm {
    /// Indices or UUIDs in any order, with blanks between them.
    Any,
    /// Indices in ascending order, with commas and nothing else between them.
    Ascending,
}

/// What the torch worker has for a vendor's devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TorchSupport {
    /// Whether nothing else in this project computes on them.
    pub alone: bool,
    /// Whether bitsandbytes does.
    pub bitsandbytes: bool,
}

/// Files of the driver that a process opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNodes {
    pub paths: Vec<String>,
    /// What to do where some are missing.
    pub when_missing: &'static str,
    /// Whether those who may open them are a group of users.
    pub are_of_a_group: bool,
}
