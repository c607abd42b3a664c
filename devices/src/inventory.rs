//! What a machine has to compute on, as its drivers' own tools tell it. Who asks them is `survey`.

use serde::Serialize;

use crate::link::{Link, LinkKind};
use crate::{CpuList, DeviceKind};

/// The devices of a machine.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Inventory {
    /// The devices: by kind, then by index. The CPU is always there.
    pub devices: Vec<Device>,
    /// What joins each two of a kind, where a tool says so.
    pub links: Vec<Link>,
    /// Whom was asked, and how each answered; a tool that is not installed is not among them.
    pub asked: Vec<Queried>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Device {
    pub kind: DeviceKind,
    /// The number by which a process asks for it: what the device variable of its kind takes. Counted from 0 over what
    /// there is.
    pub index: u32,
    /// The number by which the driver knows it (`/dev/davinciN`, `/dev/nvidiaN`), which differs where devices have
    /// dropped out or a container sees some of them.
    pub physical_index: Option<u32>,
    /// A name for it that no other device has.
    pub uuid: Option<String>,
    /// What it is called: `910B3`, `NVIDIA H200`.
    pub name: String,
    /// Whether it can be computed on.
    pub health: Health,
    /// Its memory in bytes.
    pub memory_total: Option<u64>,
    /// What of it is in use, by whomever.
    pub memory_used: Option<u64>,
    pub memory_free: Option<u64>,
    /// What it draws.
    pub power_watts: Option<f64>,
    /// How warm it is.
    pub temperature_celsius: Option<f64>,
    /// Its place on the PCI bus: `0000:c1:00.0`, in lower case.
    pub bus_id: Option<String>,
    /// The NUMA node that it hangs on.
    pub numa_node: Option<u32>,
    /// The processors that are near to it. For the processor: those that this process may use.
    pub affinity: Option<CpuList>,
    /// The processes that hold memory on it, as far as the tool shows them.
    pub processes: Vec<Process>,
}

/// A process on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Process {
    /// Its id, as the tool prints it: within a container it may be another than ours.
    pub pid: u32,
    /// Its name, where the tool tells it.
    pub name: Option<String>,
    /// The device memory that it holds, in bytes.
    pub memory: Option<u64>,
}

/// What its driver says of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Health {
    /// Fine.
    Ok,
    /// It works, and something is to be looked at.
    Warning,
    /// It does not work as it should: an important fault (Ascend's `Alarm`).
    Alarm,
    /// It does not work: an urgent fault.
    Critical,
    /// The driver lists it and cannot reach it.
    Offline,
    /// The tool does not say.
    Unknown,
}

impl Health {
    /// Whether work may be given to such a device.
    pub fn is_usable(self) -> bool {
        match self {
            Self::Ok | Self::Warning | Self::Unknown => true,
            Self::Alarm | Self::Critical | Self::Offline => false,
        }
    }

    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Alarm => "alarm",
            Self::Critical => "critical",
            Self::Offline => "offline",
            Self::Unknown => "unknown",
        }
    }
}

/// One question that was put to a tool or a library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Queried {
    pub device: DeviceKind,
    /// Whom: `npu-smi info`, `NVML`.
    pub tool: String,
    /// Its version or its driver's, where it said so.
    pub version: Option<String>,
    /// What was wrong with the answer, with what the tool said. None where it was understood.
    pub problem: Option<String>,
}

impl Queried {
    /// A question that was answered well.
    pub(crate) fn new(device: DeviceKind, tool: impl Into<String>) -> Self {
        Self { device, tool: tool.into(), version: None, problem: None }
    }

    /// One that was not.
    pub(crate) fn failed(self, problem: String) -> Self {
        Self { problem: Some(problem), ..self }
    }

    /// An inventory of which this question is all that was asked.
    pub(crate) fn alone_with(self, devices: Vec<Device>) -> Inventory {
        Inventory { devices, links: Vec::new(), asked: vec![self] }
    }
}

impl Device {
    /// A device of which no more is known than that it is there.
    pub fn new(kind: DeviceKind, index: u32, name: impl Into<String>) -> Self {
        Self {
            kind,
            index,
            physical_index: None,
            uuid: None,
            name: name.into(),
            health: Health::Unknown,
            memory_total: None,
            memory_used: None,
            memory_free: None,
            power_watts: None,
            temperature_celsius: None,
            bus_id: None,
            numa_node: None,
            affinity: None,
            processes: Vec::new(),
        }
    }

    /// Fills in of total, used and free memory the one that follows from the other two.
    pub(crate) fn with_memory(mut self, total: Option<u64>, used: Option<u64>, free: Option<u64>) -> Self {
        let less = |total: Option<u64>, part: Option<u64>| Some(total?.saturating_sub(part?));
        self.memory_total = total;
        self.memory_used = used.or_else(|| less(total, free));
        self.memory_free = free.or_else(|| less(total, used));
        self
    }

    /// What tells this physical device from every other of the machine, for whoever sees it under whichever index: its
    /// place on the bus, else its UUID, else its number.
    pub fn identity(&self) -> String {
        match (&self.bus_id, &self.uuid) {
            (Some(bus_id), _) => format!("{}-{}", self.kind, bus_id),
            (None, Some(uuid)) => format!("{}-{uuid}", self.kind),
            (None, None) => format!("{}-{}", self.kind, self.physical_index.unwrap_or(self.index)),
        }
    }
}

impl Inventory {
    /// The devices of a kind, ascending.
    pub fn of_kind(&self, kind: DeviceKind) -> impl Iterator<Item = &Device> {
        self.devices.iter().filter(move |device| device.kind == kind)
    }

    /// What joins two devices of a kind; unknown where nothing was said.
    pub fn link(&self, kind: DeviceKind, a: u32, b: u32) -> LinkKind {
        if a == b {
            return LinkKind::Same;
        }
        let between = [a.min(b), a.max(b)];
        let link = self.links.iter().find(|link| link.device == kind && link.between == between);
        link.map_or(LinkKind::Unknown, |link| link.link)
    }
}
