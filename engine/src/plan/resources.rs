//! `resources:` of a stage: what it asks of the machine.

use serde_json::json;

use crate::file::source::Span;
use crate::file::tree::{Node, Value};
use crate::parameter::{ByteSize, Json, KeyWriter, Mapping, Parameter, Parameters, Reader};

use super::{DeviceCount, DeviceRequest, Resources};

/// What a stage may ask of the machine.
#[derive(Parameters)]
pub(crate) struct ResourceKeys {
    /// The kind of device; `auto` takes the first of those that the stage prefers and the machine has.
    #[cosmetic(default)]
    device: DeviceRequest,
    /// How many devices, or `all` of that kind; on the processor, workers that share its cores.
    #[cosmetic(range = 1..)]
    count: Option<DeviceCount>,
    /// Machines that take part, with so many devices each.
    #[cosmetic(range = 1..)]
    nodes: Option<u32>,
    /// Memory it needs, such as `40GiB`: the machine's, or that of each device.
    #[cosmetic]
    memory: Option<ByteSize>,
    /// Threads it may use.
    #[cosmetic(range = 1..)]
    threads: Option<usize>,
    /// Slots it takes while it runs, of those that the file declares.
    #[cosmetic(default, range = 1..)]
    slots: Mapping<u32>,
}

impl From<ResourceKeys> for Resources {
    fn from(keys: ResourceKeys) -> Self {
        let ResourceKeys { device, count, nodes, memory, threads, slots } = keys;
        let memory = memory.map(|size| size.0);
        Self { device, count: count.unwrap_or_default(), nodes: nodes.unwrap_or(1), memory, threads, slots }
    }
}

impl Parameter for DeviceCount {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match &node.value {
            Value::String(text) if text == ALL => Some(Self::All),
            Value::String(text) => {
                reader.bad_value(node, format!("cannot read `{text}`"), "a number of devices, or `all`");
                None
            }
            _ => u32::read(node, reader).map(Self::Exactly),
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        match self {
            Self::Exactly(count) => count.write_key(key),
            Self::All => key.value(ALL),
        }
    }

    fn schema() -> Json {
        json!({ "anyOf": [{ "type": "integer", "minimum": 1 }, { "enum": [ALL] }] })
    }
}

const ALL: &str = "all";

/// Where a stage says what it asks of devices.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ResourceSpans {
    pub device: Option<Span>,
    pub count: Option<Span>,
}

impl ResourceSpans {
    /// Those of a stage's entry.
    pub(super) fn of(stage: &Node) -> Self {
        let resources = stage.get("resources");
        let at = |key| Some(resources?.get(key)?.span);
        Self { device: at("device"), count: at("count") }
    }
}
