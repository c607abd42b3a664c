//! `resources:` of a stage: what it asks of the machine, and what of that its kind can use.

use serde_json::json;

use super::entry::StageEntry;
use super::resolve::Bound;
use crate::device::names;
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Node, Value};
use crate::parameter::{ByteSize, Json, KeyWriter, Mapping, Parameter, Parameters, Reader};
use crate::stage::Workers;

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
    device: Option<Span>,
    count: Option<Span>,
}

impl ResourceSpans {
    /// Those of a stage's entry.
    pub fn of(stage: &Node) -> Self {
        let resources = stage.get("resources");
        let at = |key| Some(resources?.get(key)?.span);
        Self { device: at("device"), count: at("count") }
    }
}

/// What a stage asks for and its kind has no use for, so that nobody counts on it.
pub(super) fn warnings(stage: &StageEntry, bound: &Bound) -> Vec<Problem> {
    let Some(kind) = &bound.kind else { return Vec::new() };
    let (id, name, served) = (&stage.declared, bound.name, kind.devices());
    let device = stage.resource_spans.device.zip(stage.resources.device.kind());
    let device = device.filter(|(_, wanted)| !served.contains(wanted)).map(|(span, wanted)| {
        let message = format!("{} is asked for, and `{name}` computes on {}", wanted.in_words(), names(&served));
        let help = format!("leave it out, or run with `{id}.resources.device={}`", served[0]);
        Problem::warning("no-device", span, message, "not served by this kind of stage").with_help(help)
    });
    let several = !matches!(stage.resources.count, DeviceCount::Exactly(1));
    let count = stage.resource_spans.count.filter(|_| several && kind.workers() == Workers::One).map(|span| {
        let message = format!("`resources.count` has no effect: `{name}` computes on one device");
        Problem::warning("no-effect", span, message, "more than it can use")
    });
    device.into_iter().chain(count).collect()
}
