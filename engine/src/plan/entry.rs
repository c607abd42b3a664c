//! The frame of a pipeline file: its own keys and those of each stage, read as far as they can be read.

use std::time::Duration;

use super::gate::GateKeys;
use super::resources::{ResourceKeys, ResourceSpans};
use super::{Link, Resources, Retries};
use crate::executor::ExecutorSettings;
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Entry, Node, Value};
use crate::parameter::{Fields, Json, KeyWriter, Limits, Mapping, Parameter, Parameters, Period, Reader};
use crate::remote::RemoteKey;
use crate::track::{TrackKey, Tracker};

/// The version of the file's form that this program reads.
pub(crate) const FORMAT_VERSION: u32 = 1;

/// Stands between the prefix of an included file and the id of a stage in it.
pub(super) const SEPARATOR: char = '/';

pub(crate) const FILE_KEYS: [&str; 11] =
    ["version", "name", "include", "vars", "slots", "executor", "stages", "gates", "publish", "remote", "track"];

/// A pipeline file, before its stages are looked at by their kinds. What could not be read is left out.
pub(super) struct Document {
    pub name: Option<Text>,
    /// How many there are of each slot.
    pub slots: Mapping<u32>,
    /// Where each of them is named.
    pub slot_spans: Vec<(String, Span)>,
    pub executor: ExecutorSettings,
    pub stages: Vec<StageEntry>,
    pub gates: Vec<GateEntry>,
    pub publish: Vec<PublishEntry>,
    pub remote: Option<RemoteKey>,
    pub track: Vec<Tracker>,
}

/// A stage as the file declares it.
pub(super) struct StageEntry {
    pub id: Text,
    /// The id in the file, that of all children of a sweep.
    pub declared: String,
    /// The values that make it this child.
    pub axes: Vec<AxisOf>,
    pub uses: Option<Text>,
    pub with: Node,
    pub needs: Vec<Text>,
    pub resources: Resources,
    pub resource_spans: ResourceSpans,
    /// Where each slot that it takes is named.
    pub slot_spans: Vec<(String, Span)>,
    pub retries: Retries,
    pub timeout: Option<Duration>,
    pub executor: ExecutorSettings,
    /// Whether its time is recorded.
    pub profile: bool,
    /// What it is swept over, in the file.
    pub matrix: Option<Node>,
    /// Where the file says that it is left out.
    pub left_out: Option<Span>,
}

/// The value that a child has on an axis.
#[derive(Debug, Clone)]
pub(super) struct AxisOf {
    pub name: String,
    pub value: Json,
    /// Where the value stands.
    pub span: Span,
    /// Whether it changes no result of this stage, so that the child is a measurement.
    pub measured: bool,
}

/// A string and where it is.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Text {
    pub text: String,
    pub span: Span,
}

/// An entry of `gates:`.
#[derive(Debug, Clone)]
pub(super) struct GateEntry {
    /// `stage.figure`.
    pub figure: Text,
    pub keys: GateKeys,
}

/// An entry of `publish:`.
#[derive(Debug, Clone)]
pub(super) struct PublishEntry {
    pub target: Text,
    pub path: Text,
    pub link: Link,
}

/// Where something is published: a folder, or a folder and how.
pub(crate) struct PublishTarget {
    path: Text,
    link: Link,
}

/// The long form.
#[derive(Parameters)]
struct PublishKeys {
    /// The folder, from the pipeline file's.
    #[cosmetic]
    path: Text,
    /// What its files are: copies, or symbolic links into the store.
    #[cosmetic(default = Link::Copy)]
    link: Link,
}

impl Parameter for PublishTarget {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        if let Value::Map(_) = node.value {
            return PublishKeys::read(node, reader).map(|PublishKeys { path, link }| Self { path, link });
        }
        Some(Self { path: Text::read(node, reader)?, link: Link::Copy })
    }

    /// Where a result is published does not decide what it is.
    fn write_key(&self, _key: &mut KeyWriter<'_>) {}

    fn schema() -> Json {
        serde_json::json!({ "anyOf": [String::schema(), PublishKeys::schema()] })
    }
}

/// Reads the frame and reports all that is wrong with it.
pub(super) fn read(root: &Node, reader: &mut Reader) -> Document {
    let mut document = Document {
        name: None,
        slots: Mapping::new(),
        slot_spans: slot_spans(root),
        executor: ExecutorSettings::default(),
        stages: Vec::new(),
        gates: Vec::new(),
        publish: Vec::new(),
        remote: None,
        track: Vec::new(),
    };
    let Some(mut fields) = Fields::of(root, reader, &FILE_KEYS) else { return document };
    let version = fields.required::<u32>("version", &Limits::NONE);
    document.name = fields.required::<Option<Text>>("name", &Limits::NONE).flatten();
    fields.or_default::<Entries>("vars", &Limits::NONE, Entries::default);
    document.slots = fields.or_default("slots", &Limits::NONE, Mapping::new).unwrap_or_default();
    document.executor = fields.or_default("executor", &Limits::NONE, ExecutorSettings::default).unwrap_or_default();
    let stages = fields.required::<Entries>("stages", &Limits::NONE);
    let gates = fields.or_default::<Entries>("gates", &Limits::NONE, Entries::default);
    let publish = fields.or_default::<Entries>("publish", &Limits::NONE, Entries::default);
    document.remote = fields.or_default::<Option<RemoteKey>>("remote", &Limits::NONE, || None).flatten();
    document.track = fields.or_default("track", &Limits::NONE, TrackKey::default).unwrap_or_default().0;

    reader.problems.extend(document.remote.as_ref().and_then(RemoteKey::problem));
    if version.is_some_and(|version| version != FORMAT_VERSION) {
        reader.problems.push(unknown_version(root));
    }
    if stages.as_ref().is_some_and(|stages| stages.0.is_empty())
        && let Some(node) = root.get("stages")
    {
        reader.problems.push(Problem::error(
            "no-stages",
            node.span,
            "the pipeline has no stages",
            "no stage is declared here",
        ));
    }
    for entry in stages.unwrap_or_default().0 {
        document.stages.push(read_stage(&entry, reader));
    }
    // What is null counts as left out.
    let is_given = |entry: &Entry| entry.value.value != Value::Null;
    for entry in gates.unwrap_or_default().0.into_iter().filter(is_given) {
        if let Some(keys) = GateKeys::read(&entry.value, reader) {
            document.gates.push(GateEntry { figure: Text { text: entry.key, span: entry.key_span }, keys });
        }
    }
    for entry in publish.unwrap_or_default().0.into_iter().filter(is_given) {
        if let Some(PublishTarget { path, link }) = PublishTarget::read(&entry.value, reader) {
            document.publish.push(PublishEntry { target: Text { text: entry.key, span: entry.key_span }, path, link });
        }
    }
    document
}

/// Bytes of the longest id.
const LONGEST_ID: usize = 100;

/// Reads the frame of one stage.
pub(super) fn read_stage(entry: &Entry, reader: &mut Reader) -> StageEntry {
    let id = Text { text: entry.key.clone(), span: entry.key_span };
    // Ids with a prefix are those of included stages: where a file writes one itself has been said.
    let own = id.text.rsplit(SEPARATOR).next().unwrap_or_default();
    if !is_id(own) || id.text.len() > LONGEST_ID {
        reader.problems.push(
            Problem::error("bad-stage-id", id.span, format!("`{}` cannot be the id of a stage", id.text), "not an id")
                .with_help(format!("an id has letters, digits, `_` and `-`, {LONGEST_ID} at most")),
        );
    }
    let absent = Node { span: id.span, value: Value::Null };
    let mut stage = StageEntry {
        declared: id.text.clone(),
        id,
        axes: Vec::new(),
        uses: None,
        with: absent.clone(),
        needs: Vec::new(),
        resources: Resources::default(),
        resource_spans: ResourceSpans::default(),
        slot_spans: Vec::new(),
        retries: Retries::default(),
        timeout: None,
        executor: ExecutorSettings::default(),
        profile: false,
        matrix: None,
        left_out: None,
    };
    // A stage without anything lacks its `uses:`, and the place to say so is its id.
    let node = if entry.value.value == Value::Null { &absent } else { &entry.value };
    let Some(mut fields) = Fields::of(node, reader, &crate::file::overrides::STAGE_KEYS) else { return stage };
    stage.uses = fields.required::<Text>("uses", &Limits::NONE);
    if let Some(Some(Anything(with))) = fields.required::<Option<Anything>>("with", &Limits::NONE) {
        stage.with = with;
    }
    stage.needs = fields.or_default::<Vec<Text>>("needs", &Limits::NONE, Vec::new).unwrap_or_default();
    let resources = fields.required::<Option<ResourceKeys>>("resources", &Limits::NONE).flatten();
    stage.resources = resources.map(Resources::from).unwrap_or_default();
    stage.resource_spans = ResourceSpans::of(node);
    stage.slot_spans = node.get("resources").map(slot_spans).unwrap_or_default();
    stage.retries = fields.or_default("retries", &Limits::NONE, Retries::default).unwrap_or_default();
    let timeout = fields.required::<Option<Period>>("timeout", &Limits::NONE).flatten();
    stage.timeout = timeout.map(|period| period.0);
    stage.executor = fields.or_default("executor", &Limits::NONE, ExecutorSettings::default).unwrap_or_default();
    stage.profile = fields.or_default("profile", &Limits::NONE, || false).unwrap_or_default();
    if let Some(Some(Anything(matrix))) = fields.required::<Option<Anything>>("matrix", &Limits::NONE) {
        // One whose last axis was taken away on the command line is none.
        let taken_away = matches!(&matrix.value, Value::Map(axes) if !axes.is_empty() && axes.iter().all(|axis| axis.value.value == Value::Null));
        stage.matrix = Some(matrix).filter(|_| !taken_away);
    }
    if fields.or_default("when", &Limits::NONE, || true) == Some(false) {
        stage.left_out = node.get("when").map(|when| when.span);
    }
    stage
}

/// Where the names stand under `slots:`.
fn slot_spans(above: &Node) -> Vec<(String, Span)> {
    match above.get("slots").map(|slots| &slots.value) {
        Some(Value::Map(entries)) => entries.iter().map(|entry| (entry.key.clone(), entry.key_span)).collect(),
        _ => Vec::new(),
    }
}

pub(super) fn unknown_version(root: &Node) -> Problem {
    let span = root.get("version").map_or(root.span, |node| node.span);
    let message = format!("this program reads files of version {FORMAT_VERSION}");
    Problem::error("unknown-version", span, message, format!("expected {FORMAT_VERSION}"))
}

/// A stage's id is part of file names, which have a longest length, and of references, where a dot ends it.
pub(super) fn is_id(text: &str) -> bool {
    (1..=LONGEST_ID).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-')
}

impl Parameter for Text {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        Some(Self { text: String::read(node, reader)?, span: node.span })
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        self.text.write_key(key);
    }

    fn schema() -> Json {
        String::schema()
    }
}

/// A value that someone else reads.
struct Anything(Node);

impl Parameter for Anything {
    fn read(node: &Node, _reader: &mut Reader) -> Option<Self> {
        Some(Self(node.clone()))
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(self.0.to_json().to_string());
    }

    fn schema() -> Json {
        Json::Bool(true)
    }
}

/// The entries of a mapping, in the order of the file.
#[derive(Default)]
struct Entries(Vec<Entry>);

impl Parameter for Entries {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let Value::Map(entries) = &node.value else {
            reader.wrong_type(node, "a mapping");
            return None;
        };
        Some(Self(entries.clone()))
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        for entry in &self.0 {
            key.entry(&entry.key, |key| key.value(entry.value.to_json().to_string()));
        }
    }

    fn schema() -> Json {
        serde_json::json!({ "type": "object" })
    }
}
