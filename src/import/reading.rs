//! Reads a tool's configuration by its table of keys, into parameters and the three lists of what was carried over.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use engine::file::problem::Problem;
use engine::file::scalar;
use engine::file::source::Span;
use engine::file::tree::{Entry, Node, Value};
use engine::suggest;
use serde_json::Value as Json;

use super::key::{Becomes, Key, Keys};
use super::parameters::{Note, Parameters};

/// Something of the tool's configuration, as the lists show it.
#[derive(Debug, Clone)]
pub(super) struct Item {
    pub(super) key: String,
    pub(super) value: Json,
    /// Where it was written; `None` for a default of the tool.
    pub(super) span: Option<Span>,
    /// The parameter, where it became one.
    pub(super) becomes: Option<String>,
    /// What differs, what is missing, or why nothing is needed.
    pub(super) reason: Option<String>,
}

/// What became of a configuration.
#[derive(Debug, Default)]
pub(super) struct Lists {
    pub(super) same: Vec<Item>,
    pub(super) differing: Vec<Item>,
    pub(super) missing: Vec<Item>,
}

impl Lists {
    /// Adds those of others.
    pub(super) fn extend(&mut self, others: &Self) {
        self.same.extend_from_slice(&others.same);
        self.differing.extend_from_slice(&others.differing);
        self.missing.extend_from_slice(&others.missing);
    }
}

/// A configuration that is being read.
pub(super) struct Reading<'a> {
    /// The tool's name and version, as comments have it.
    pub(super) tool: String,
    keys: Keys,
    given: Vec<&'a Entry>,
    reported: BTreeSet<&'static str>,
    /// Keys that a function has looked at.
    looked_at: RefCell<BTreeSet<&'static str>>,
    /// What became of keys that no parameter of their own was put for.
    consumed: BTreeMap<&'static str, String>,
    /// Prefixes of paths that have no meaning in this job, and why.
    without: Vec<(&'static str, &'static str)>,
    pub(super) parameters: Parameters,
    pub(super) lists: Lists,
    pub(super) problems: Vec<Problem>,
}

impl<'a> Reading<'a> {
    /// Begins with the entries of a mapping; unknown ones are problems.
    pub(super) fn new(tool: String, keys: Keys, entries: impl IntoIterator<Item = &'a Entry>) -> Self {
        let mut problems = Vec::new();
        let mut given = Vec::new();
        for entry in entries {
            if keys.find(&entry.key).is_some() {
                given.push(entry);
                continue;
            }
            // Whatever it is, it is not set.
            if entry.value.value == Value::Null {
                continue;
            }
            let help = suggest::nearest(&entry.key, keys.0.iter().map(|key| key.name))
                .map(|name| format!("did you mean `{name}`?"));
            problems.push(unknown_key(&entry.key, entry.key_span, &tool).with_help_if(help));
        }
        let (parameters, lists, reported, looked_at, consumed) = Default::default();
        Self { tool, keys, given, reported, looked_at, consumed, without: Vec::new(), parameters, lists, problems }
    }

    /// Another configuration of the same job, such as a mapping below this one.
    pub(super) fn below<'b>(&self, keys: Keys, node: &'b Node) -> Reading<'b> {
        let entries = match &node.value {
            Value::Map(entries) => entries.as_slice(),
            _ => &[],
        };
        Reading::new(self.tool.clone(), keys, entries)
    }

    /// Takes over what another one found.
    pub(super) fn take(&mut self, other: Reading<'_>) -> Parameters {
        self.lists.same.extend(other.lists.same);
        self.lists.differing.extend(other.lists.differing);
        self.lists.missing.extend(other.lists.missing);
        self.problems.extend(other.problems);
        other.parameters
    }

    /// The same, of parameters that are those of a stage.
    pub(super) fn take_below(&mut self, stage: &str, mut other: Reading<'_>) -> Parameters {
        let Lists { same, differing, missing } = &mut other.lists;
        for item in same.iter_mut().chain(differing).chain(missing) {
            item.becomes = item.becomes.take().map(|path| format!("{stage}.{path}"));
        }
        self.take(other)
    }

    fn key(&self, name: &str) -> &Key {
        self.keys.find(name).unwrap_or_else(|| panic!("`{name}` has no row in the table of {}", self.tool))
    }

    /// Takes another default of a key, where the tool has several.
    pub(super) fn by_default(&mut self, name: &str, default: &'static str) {
        if let Some(key) = self.keys.0.iter_mut().find(|key| key.name == name) {
            key.default = Some(default);
        }
    }

    /// Whether it is known what becomes of a key.
    pub(super) fn is_reported(&self, name: &str) -> bool {
        self.reported.contains(name) || self.consumed.contains_key(name)
    }

    /// Whether the tool has a key at all.
    pub(super) fn has(&self, name: &str) -> bool {
        self.keys.find(name).is_some()
    }

    /// What the configuration says of a key, where that is something.
    pub(super) fn entry(&self, name: &str) -> Option<&'a Entry> {
        self.looked_at.borrow_mut().extend(self.keys.find(name).map(|key| key.name));
        let given = self.given.iter().find(|entry| entry.key == name)?;
        (given.value.value != Value::Null).then_some(given)
    }

    pub(super) fn is_given(&self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// Whether the configuration says that a key is nothing, where the tool has a default for it.
    pub(super) fn is_nothing(&self, name: &str) -> bool {
        self.given.iter().any(|entry| entry.key == name && entry.value.value == Value::Null)
    }

    /// The value of a key, the tool's default where it is not given.
    pub(super) fn value(&self, name: &str) -> Value {
        match self.entry(name) {
            Some(entry) => entry.value.value.clone(),
            None => self.key(name).default.map_or(Value::Null, default_value),
        }
    }

    pub(super) fn text(&mut self, name: &str) -> Option<String> {
        match self.value(name) {
            Value::Null => None,
            Value::String(text) => Some(text),
            value => {
                let text = Node { span: Span::default(), value }.to_json().to_string();
                Some(text.trim_matches('"').to_owned())
            }
        }
    }

    pub(super) fn flag(&mut self, name: &str) -> bool {
        self.choice(name).unwrap_or(false)
    }

    /// A boolean that may be nothing.
    pub(super) fn choice(&mut self, name: &str) -> Option<bool> {
        match self.value(name) {
            Value::Null => None,
            Value::Bool(value) => Some(value),
            Value::Integer(0) => Some(false),
            Value::Integer(1) => Some(true),
            Value::String(text) if matches!(text.to_lowercase().as_str(), "no" | "off" | "false") => Some(false),
            Value::String(text) if matches!(text.to_lowercase().as_str(), "yes" | "on" | "true") => Some(true),
            _ => self.bad(name, "true or false"),
        }
    }

    pub(super) fn number(&mut self, name: &str) -> Option<f64> {
        match numeric(self.value(name)) {
            Value::Null => None,
            Value::Integer(value) => Some(value as f64),
            Value::Float(value) => Some(value),
            _ => self.bad(name, "a number"),
        }
    }

    pub(super) fn whole(&mut self, name: &str) -> Option<i64> {
        match numeric(self.value(name)) {
            Value::Null => None,
            Value::Integer(value) => Some(value),
            Value::Float(value) if value.fract() == 0.0 => Some(value as i64),
            _ => self.bad(name, "an integer"),
        }
    }

    /// Texts of a list, or of one text with commas between them.
    pub(super) fn texts(&mut self, name: &str) -> Vec<String> {
        match self.value(name) {
            Value::Null => Vec::new(),
            Value::String(text) => text.split([',', ' ']).map(str::trim).map(str::to_owned).collect(),
            Value::List(items) => {
                let text = |item: &Node| item.to_json().as_str().map_or(item.to_json().to_string(), str::to_owned);
                items.iter().map(text).collect()
            }
            _ => self.bad(name, "a list").unwrap_or_default(),
        }
    }

    fn bad<T>(&mut self, name: &str, expected: &str) -> Option<T> {
        if let Some(entry) = self.entry(name) {
            let message = format!("`{name}` is {}, and {} takes {expected}", entry.value.describe(), self.tool);
            let problem = Problem::error("bad-value", entry.value.span, message, format!("expected {expected}"));
            if !self.problems.iter().any(|known| known.says_the_same(&problem)) {
                self.problems.push(problem);
            }
        }
        None
    }

    /// A required key that is not there.
    pub(super) fn require(&mut self, name: &str, span: Span) {
        if !self.is_given(name) {
            let message = format!("`{name}` is missing");
            let label = format!("a training by {} requires it", self.tool);
            self.problems.push(Problem::error("missing-key", span, message, label));
        }
    }

    fn item(&self, name: &'static str, becomes: Option<&str>, reason: Option<String>) -> Item {
        let value = Node { span: Span::default(), value: self.value(name) }.to_json();
        // A report is shown to others.
        let value = if is_secret(name) && value.is_string() { Json::from("…") } else { value };
        let span = self.entry(name).map(|entry| entry.key_span);
        Item { key: name.to_owned(), value, span, becomes: becomes.map(str::to_owned), reason }
    }

    /// Where a value comes from: the configuration, or a default of the tool.
    fn origin(&self, name: &str) -> Note {
        if self.is_given(name) { Note::Given } else { Note::Default(format!("default of {}", self.tool)) }
    }

    /// Carries a key over to a parameter of the same meaning.
    pub(super) fn put(&mut self, name: &'static str, path: &str, value: impl Into<Json>) {
        let name = self.key(name).name;
        let note = self.origin(name);
        let item = self.item(name, Some(path), None);
        self.lists.same.push(item);
        self.reported.insert(name);
        self.parameters.set(path, value, note);
    }

    /// Carries a key over to a parameter of another meaning.
    pub(super) fn put_differing(
        &mut self,
        name: &'static str,
        path: &str,
        value: impl Into<Json>,
        reason: impl Into<String>,
    ) {
        let name = self.key(name).name;
        let reason = reason.into();
        let item = self.item(name, Some(path), Some(reason.clone()));
        self.lists.differing.push(item);
        self.reported.insert(name);
        let default = if self.is_given(name) { None } else { Some(format!("default of {}", self.tool)) };
        self.parameters.set(path, value, Note::Differs { name: name.to_owned(), reason, default });
    }

    /// Something that the whole job has otherwise here, without a parameter for it.
    pub(super) fn differs(&mut self, name: &'static str, reason: impl Into<String>) {
        let name = self.key(name).name;
        let item = self.item(name, None, Some(reason.into()));
        self.lists.differing.push(item);
        self.reported.insert(name);
    }

    /// A key that needs nothing here.
    pub(super) fn nothing(&mut self, name: &'static str, why: &str) {
        let name = self.key(name).name;
        if self.is_given(name) {
            let item = self.item(name, None, Some(why.to_owned()));
            self.lists.same.push(item);
        }
        self.reported.insert(name);
    }

    /// A key that was carried over to what is no parameter of its own, such as a stage or a part of an expression.
    pub(super) fn consumed(&mut self, name: &'static str, path: &str) {
        let name = self.key(name).name;
        self.consumed.insert(name, path.to_owned());
    }

    /// A key that cannot be carried over.
    pub(super) fn missing(&mut self, name: &'static str, what: impl Into<String>) {
        let name = self.key(name).name;
        let item = self.item(name, None, Some(what.into()));
        self.lists.missing.push(item);
        self.reported.insert(name);
    }

    /// Leaves out parameters below a path, which have no meaning in this job.
    pub(super) fn leave_out(&mut self, prefix: &'static str, why: &'static str) {
        self.without.push((prefix, why));
    }

    /// Goes through the rows that need no function of their own.
    pub(super) fn finish(&mut self) {
        let rows: Vec<Key> = self.keys.0.clone();
        let looked_at = self.looked_at.take();
        for Key { name, default, becomes } in rows {
            if self.reported.contains(name) {
                continue;
            }
            let given = self.is_given(name);
            if let Some(path) = self.consumed.get(name) {
                let item = self.item(name, Some(path.as_str()), None);
                self.lists.same.extend(given.then_some(item));
                continue;
            }
            match becomes {
                Becomes::Same(path) | Becomes::Whole(path) => {
                    if let Some((_, why)) = self.without.iter().find(|(prefix, _)| path.starts_with(prefix)).copied() {
                        self.nothing(name, why);
                    } else if given || default.is_some() {
                        self.plain(name, path, becomes);
                    }
                }
                Becomes::Read(_)
                    if given && self.value(name) == Value::Bool(false) && self.is_harmless(name, default) =>
                {
                    self.nothing(name, "off, as here");
                }
                // The method is the job's, and no parameter.
                Becomes::Read(path)
                    if given
                        && looked_at.contains(name)
                        && (self.parameters.touches(path) || path == "train.method") =>
                {
                    let item = self.item(name, Some(path), None);
                    self.lists.same.push(item);
                }
                Becomes::Read(_) if given && self.is_harmless(name, default) => self.nothing(name, "off, as here"),
                Becomes::Read(_) if given => {
                    self.differs(
                        name,
                        "nothing is written for it: it is the default here, or has no effect on this job",
                    );
                }
                Becomes::Nothing(why) => self.nothing(name, why),
                Becomes::Missing(what) if given && !self.is_harmless(name, default) => self.missing(name, what),
                Becomes::Missing(_) => self.nothing(name, "off, as here"),
                Becomes::Read(_) => {}
            }
        }
    }

    fn plain(&mut self, name: &'static str, path: &str, becomes: Becomes) {
        let value = match kind(path) {
            Kind::Number => self.number(name).map_or(Value::Null, |_| numeric(self.value(name))),
            Kind::Flag => self.choice(name).map_or(Value::Null, Value::Bool),
            Kind::Text if matches!(self.value(name), Value::Bool(_) | Value::List(_) | Value::Map(_)) => {
                self.bad::<()>(name, "a text");
                Value::Null
            }
            Kind::Text => self.text(name).map_or(Value::Null, Value::String),
            Kind::Any => self.value(name),
        };
        match (becomes, value) {
            (_, Value::Null) => {}
            (_, Value::String(text)) if text.is_empty() && path.ends_with("system_prompt") => {
                self.nothing(name, "no system message is added");
            }
            (Becomes::Whole(_), Value::Float(value)) if value.fract() == 0.0 => self.put(name, path, value as i64),
            (Becomes::Whole(_), Value::Float(_)) => drop(self.bad::<()>(name, "an integer")),
            (_, value) => {
                let value = Node { span: Span::default(), value }.to_json();
                self.put(name, path, value);
            }
        }
    }

    /// Whether a value that is given asks for nothing.
    fn is_harmless(&self, name: &str, default: Option<&str>) -> bool {
        let value = self.value(name);
        let is_default = default.map(default_value).is_some_and(|default| same(&default, &value));
        let is_nothing = match &value {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) => matches!(text.as_str(), "" | "none" | "None" | "no"),
            Value::List(items) => items.is_empty(),
            Value::Map(entries) => entries.is_empty(),
            Value::Integer(_) | Value::Float(_) | Value::Bool(true) => false,
        };
        is_default || (is_nothing && default.is_none_or(|default| !matches!(default_value(default), Value::Bool(true))))
    }
}

/// What is said of a key that a tool does not have, or that is not known here.
pub(super) fn unknown_key(key: &str, span: Span, tool: &str) -> Problem {
    Problem::error("unknown-key", span, format!("`{key}` is no key of {tool}"), "not known here")
}

/// Whether a key holds what only its owner should know.
fn is_secret(name: &str) -> bool {
    const ENDS: &[&str] = &["hub_token", "swanlab_token", "_api_key", "_experiment_key", "_secret", "_webhook_url"];
    ENDS.iter().any(|end| name.ends_with(end))
}

/// What a parameter holds, where a string can be told to be none.
enum Kind {
    Number,
    Flag,
    Text,
    Any,
}

fn kind(path: &str) -> Kind {
    const NUMBERS: &[&str] = &[
        "rank",
        "alpha",
        "dropout",
        "learning_rate",
        "learning_rate_ratio",
        "weight_decay",
        "eps",
        "momentum",
        "neftune_noise_alpha",
        "clip_grad_norm",
        "label_smoothing",
        "num_cycles",
        "warmup_steps",
        "epochs",
        "max_steps_per_epoch",
    ];
    const FLAGS: &[&str] = &[
        "use_dora",
        "use_rslora",
        "apply_lora_to_mlp",
        "apply_lora_to_output",
        "shuffle",
        "nesterov",
        "activation_checkpointing",
    ];
    let name = path.rsplit('.').next().unwrap_or(path);
    match name {
        "system_prompt" => Kind::Text,
        _ if NUMBERS.contains(&name) => Kind::Number,
        _ if FLAGS.contains(&name) => Kind::Flag,
        _ => Kind::Any,
    }
}

fn default_value(text: &str) -> Value {
    match text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        Some("") => Value::List(Vec::new()),
        Some(items) => {
            let item = |text: &str| Node { span: Span::default(), value: scalar::plain(text.trim()) };
            Value::List(items.split(',').map(item).collect())
        }
        None => scalar::plain(text),
    }
}

/// A number that was quoted: PyYAML takes `1e-4` for a string, so tools make numbers of strings.
fn numeric(value: Value) -> Value {
    match &value {
        // PyYAML reads underscores between digits.
        Value::String(text) if !text.is_empty() => match scalar::plain(&text.replace('_', "")) {
            number @ (Value::Integer(_) | Value::Float(_)) => number,
            _ => value,
        },
        _ => value,
    }
}

fn same(one: &Value, other: &Value) -> bool {
    let plain = |value: &Value| match numeric(value.clone()) {
        Value::Integer(value) => Json::from(value as f64),
        value => Node { span: Span::default(), value }.to_json(),
    };
    plain(one) == plain(other)
}
