//! What is wrong with a machine, or with the variables set on it: the things that people get wrong, each with what to
//! do.
//!
//! Nothing is changed, and nothing is taken for wrong that may be meant: what is certain is an error, what is likely a
//! warning, and what is only good to know a note.

mod access;
mod limits;
mod memory;
mod ports;
mod python;
mod toolkit;
mod variables;
mod versions;
mod visible;

use serde::Serialize;

use crate::inventory::{Health, Inventory};
use crate::{Device, DeviceKind, Machine};

pub use limits::Limits;
pub use python::{Installed, Python};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// It will fail, or do something else than was meant.
    Error,
    /// It may.
    Warning,
    /// Good to know.
    Note,
}

impl Severity {
    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        }
    }
}

/// One thing that was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Which check found it: a name that stays.
    pub check: &'static str,
    /// What is wrong, in a line.
    pub message: String,
    /// What was seen that says so.
    pub seen: String,
    /// What to do.
    pub help: String,
}

/// An environment variable that a process will have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    pub name: String,
    pub value: String,
    /// Where it is set.
    pub place: VariableSource,
}

/// Where a variable is set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VariableSource {
    /// In the environment of this program.
    Environment,
    /// In a pipeline file; how a person finds it.
    File(String),
}

/// What is examined.
#[derive(Debug, Clone)]
pub struct Subject<'a> {
    pub machine: &'a Machine,
    pub inventory: &'a Inventory,
    /// The variables that are set.
    pub variables: &'a [Variable],
    /// What a process may use.
    pub limits: Limits,
    /// The Python that the torch worker runs on.
    pub python: &'a Python,
}

/// Examines a machine. The worst comes first.
pub fn examine(subject: &Subject) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.extend(tools(subject.inventory));
    findings.extend(health(subject.inventory));
    findings.extend(access::check(subject));
    findings.extend(memory::check(subject.inventory));
    findings.extend(variables::check(subject.variables));
    findings.extend(visible::check(subject.inventory, subject.variables));
    findings.extend(ports::check(subject));
    findings.extend(limits::check(subject));
    findings.extend(versions::check(subject));
    findings.sort_by_key(|finding| finding.severity);
    findings
}

impl Variable {
    /// The variables of this process.
    pub fn of_this_process() -> Vec<Self> {
        let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
        let mut variables: Vec<Self> = std::env::vars_os()
            .map(|(name, value)| Self { name: text(name), value: text(value), place: VariableSource::Environment })
            .collect();
        variables.sort_by(|a, b| a.name.cmp(&b.name));
        variables
    }

    /// `HCCL_BUFFSIZE=x in the environment`.
    fn seen(&self) -> String {
        match &self.place {
            VariableSource::Environment => format!("{}={} in the environment", self.name, self.value),
            VariableSource::File(place) => format!("{}={} at {place}", self.name, self.value),
        }
    }
}

impl Subject<'_> {
    /// The value of a variable; one in a file is the nearer.
    fn variable(&self, name: &str) -> Option<&str> {
        value(self.variables, name)
    }

    fn has(&self, kind: DeviceKind) -> bool {
        self.inventory.of_kind(kind).next().is_some()
    }
}

/// The value of a variable that is set and not empty.
fn value<'a>(variables: &'a [Variable], name: &str) -> Option<&'a str> {
    let set = variables.iter().rev().find(|variable| variable.name == name)?;
    Some(set.value.as_str()).filter(|value| !value.is_empty())
}

/// `npu:3`.
fn name(device: &Device) -> String {
    format!("{}:{}", device.kind, device.index)
}

fn tools(inventory: &Inventory) -> impl Iterator<Item = Finding> {
    inventory.asked.iter().filter_map(|asked| {
        let problem = asked.problem.as_ref()?;
        let help = match asked.device {
            DeviceKind::Cpu => "look into /proc and /sys",
            DeviceKind::Npu => "run `npu-smi info` by hand; in a container, mount /usr/local/Ascend/driver and pass /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc",
            DeviceKind::Cuda => "run `nvidia-smi` by hand: a driver that was updated needs a reboot, a container needs `--gpus`",
            DeviceKind::Rocm => "run `amd-smi list` by hand: the user must be in the groups `render` and `video`, a container needs --device=/dev/kfd --device=/dev/dri",
            DeviceKind::Metal => "run `system_profiler SPDisplaysDataType` by hand",
        };
        Some(Finding {
            severity: if inventory.of_kind(asked.device).next().is_some() { Severity::Warning } else { Severity::Error },
            check: "tool-failed",
            message: format!("`{}` could not tell all about {}", asked.tool, asked.device.in_words()),
            seen: problem.clone(),
            help: help.to_owned(),
        })
    })
}

fn health(inventory: &Inventory) -> impl Iterator<Item = Finding> {
    inventory.devices.iter().filter_map(|device| {
        let severity = match device.health {
            Health::Ok | Health::Unknown => return None,
            Health::Warning => Severity::Warning,
            Health::Alarm | Health::Critical | Health::Offline => Severity::Error,
        };
        let help = match device.kind {
            DeviceKind::Npu => {
                let card = device.physical_index.unwrap_or(device.index);
                format!("`npu-smi info -t health -i {card}` and `npu-smi info -t err-count -i {card}` say more; leave the device out until it is well")
            }
            DeviceKind::Cuda => format!("`nvidia-smi -q -i {}` and `dmesg | grep -i xid` say more; a reset or a reboot may help", device.index),
            DeviceKind::Cpu | DeviceKind::Rocm | DeviceKind::Metal => "its driver's own tool says more".to_owned(),
        };
        let seen = format!("{}, at {}", device.name, device.bus_id.as_deref().unwrap_or("no place on the bus that is known"));
        let message = format!("{} is not well: {}", name(device), device.health.name());
        Some(Finding { severity, check: "device-health", message, seen, help })
    })
}
