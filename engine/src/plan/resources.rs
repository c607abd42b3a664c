//! `resources:` of a stage: what it asks of the machine.

use std::collections::{BTreeSet, HashMap};

use devices::DeviceKind;
use serde_json::json;

use super::entry::Document;
use super::{DeviceCount, Resources};
use crate::file::problem::{Problem, Severity};
use crate::file::source::Span;
use crate::file::tree::{Node, Value};
use crate::parameter::{ByteSize, Json, KeyWriter, Mapping, Parameter, Parameters, Reader, choice_schema, read_choice};
use crate::suggest;

/// What a stage may ask of the machine.
#[derive(Parameters)]
pub(crate) struct ResourceKeys {
    /// The kind of device; `auto` takes the first of those that the stage prefers and the machine has.
    #[cosmetic(default)]
    device: DeviceChoice,
    /// How many devices, or `all` of that kind; on the CPU, workers that share its cores.
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
        Self { device: device.0, count: count.unwrap_or_default(), nodes: nodes.unwrap_or(1), memory, threads, slots }
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

/// A kind of device by its name, or `auto` for none.
#[derive(Default)]
struct DeviceChoice(Option<DeviceKind>);

const AUTO: &str = "auto";

impl Parameter for DeviceChoice {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let mut names = vec![AUTO];
        names.extend(DeviceKind::ALL.map(DeviceKind::name));
        read_choice(node, reader, &names).map(|name| Self(DeviceKind::of_name(name)))
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(self.0.map_or(AUTO, DeviceKind::name));
    }

    fn schema() -> Json {
        let mut names = vec![(AUTO, "The first of those that the stage prefers and the machine has.")];
        names.extend(DeviceKind::ALL.map(|kind| (kind.name(), kind.description())));
        choice_schema("A device asked for.", &names)
    }
}

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

// Slots: things of which there are so many, such as licences, that stages take while they run.

/// Checks that what stages take is declared and that there is enough of it for each of them alone.
pub(super) fn check_slots(document: &Document, problems: &mut Vec<Problem>) {
    let total = |name: &str| document.slots.get(name).copied();
    let known: Vec<&str> = document.slots.keys().map(String::as_str).collect();
    for stage in &document.stages {
        let spans: HashMap<&str, Span> = stage.slot_spans.iter().map(|(name, span)| (name.as_str(), *span)).collect();
        for (name, wanted) in &stage.resources.slots {
            let span = spans.get(name.as_str()).copied().unwrap_or(stage.id.span);
            let id = &stage.declared;
            match total(name) {
                None => problems.push(
                    Problem::error(
                        "unknown-slot",
                        span,
                        format!("stage `{id}` uses slots of `{name}`, which the file does not declare"),
                        "not declared under `slots:`",
                    )
                    .with_help(format!("say how many there are: `slots: {{ {name}: {wanted} }}`"))
                    .with_help_if(suggest::nearest(name, &known).map(|near| format!("did you mean `{near}`?"))),
                ),
                Some(total) if *wanted > total => problems.push(
                    Problem::error(
                        "never-fits",
                        span,
                        format!("stage `{id}` needs {wanted} of `{name}`, and there are {total}: it could never run"),
                        format!("more than {total}"),
                    )
                    .with_help(format!("lower it, or raise `slots.{name}` (for one run: `--slots {name}={wanted}`)")),
                ),
                Some(_) => {}
            }
        }
    }
    if problems.iter().all(|problem| problem.severity == Severity::Warning) {
        warn_of_unused_slots(document, problems);
    }
}

/// Says which declared slots no stage takes: a wrong name on the command line would limit nothing.
fn warn_of_unused_slots(document: &Document, problems: &mut Vec<Problem>) {
    let taken: BTreeSet<&str> =
        document.stages.iter().flat_map(|stage| stage.resources.slots.keys()).map(String::as_str).collect();
    let taken: Vec<&str> = taken.into_iter().collect();
    for (name, span) in document.slot_spans.iter().filter(|(name, _)| !taken.contains(&name.as_str())) {
        let warning =
            Problem::warning("unused-slot", *span, format!("no stage takes a slot of `{name}`"), "limits nothing");
        problems
            .push(warning.with_help_if(suggest::nearest(name, &taken).map(|near| format!("did you mean `{near}`?"))));
    }
}
