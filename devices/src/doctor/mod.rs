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
mod variables;
mod versions;
mod visible;

use serde::Serialize;

use crate::inventory::{Health, Inventory};
use crate::{Device, DeviceKind, Machine, TorchSupport};

pub use limits::Limits;
pub use python::{Installed, Python};
pub(crate) use versions::rows;

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
    findings.extend(visible::check(subject));
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
    pub(crate) fn seen(&self) -> String {
        match &self.place {
            VariableSource::Environment => format!("{}={} in the environment", self.name, self.value),
            VariableSource::File(place) => format!("{}={} at {place}", self.name, self.value),
        }
    }
}

impl Subject<'_> {
    /// The value of a variable; one in a file is the nearer.
    pub(crate) fn variable(&self, name: &str) -> Option<&str> {
        let set = self.variables.iter().rev().find(|variable| variable.name == name)?;
        Some(set.value.as_str()).filter(|value| !value.is_empty())
    }

    pub(crate) fn has(&self, kind: DeviceKind) -> bool {
        self.inventory.of_kind(kind).next().is_some()
    }

    /// Whether there is a device beside the CPU for which the torch worker has this.
    fn has_accelerator(&self, is_such: impl Fn(TorchSupport) -> bool) -> bool {
        DeviceKind::accelerators().any(|kind| self.has(kind) && kind.facts().torch.is_some_and(&is_such))
    }

    /// The driver's files of a kind, which end with the numbers of the devices.
    pub(crate) fn numbered_nodes(&self, kind: DeviceKind, start: &str) -> impl Iterator<Item = String> {
        self.inventory.of_kind(kind).filter_map(move |device| Some(format!("{start}{}", device.physical_index?)))
    }
}

/// A finding.
pub(crate) fn finding(
    severity: Severity,
    check: &'static str,
    message: impl Into<String>,
    seen: impl Into<String>,
    help: impl Into<String>,
) -> Finding {
    Finding { severity, check, message: message.into(), seen: seen.into(), help: help.into() }
}

/// `npu:3`.
fn name(device: &Device) -> String {
    format!("{}:{}", device.kind, device.index)
}

fn tools(inventory: &Inventory) -> impl Iterator<Item = Finding> {
    inventory.asked.iter().filter_map(|asked| {
        let problem = asked.problem.as_ref()?;
        let is_seen = inventory.of_kind(asked.device).next().is_some();
        let severity = if is_seen { Severity::Warning } else { Severity::Error };
        let message = format!("`{}` could not tell all about {}", asked.tool, asked.device.in_words());
        Some(finding(severity, "tool-failed", message, problem, asked.device.facts().when_a_tool_fails))
    })
}

fn health(inventory: &Inventory) -> impl Iterator<Item = Finding> {
    inventory.devices.iter().filter_map(|device| {
        let severity = match device.health {
            Health::Ok | Health::Unknown => return None,
            Health::Warning => Severity::Warning,
            Health::Alarm | Health::Critical | Health::Offline => Severity::Error,
        };
        let help = device.kind.vendor().when_unwell(device);
        let seen =
            format!("{}, at {}", device.name, device.bus_id.as_deref().unwrap_or("no place on the bus that is known"));
        let message = format!("{} is not well: {}", name(device), device.health.name());
        Some(Finding { severity, check: "device-health", message, seen, help })
    })
}
