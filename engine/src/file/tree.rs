//! The tree: a pipeline file in which every key and value knows where it is.

use super::source::Span;

/// How deep mappings and lists may nest.
pub const MAX_DEPTH: usize = 64;

/// A value and where it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The value's own text.
    pub span: Span,
    pub value: Value,
}

/// What a node holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `null`, `~` or nothing.
    Null,
    /// `true` or `false`; `yes`, `no`, `on` and `off` are strings.
    Bool(bool),
    /// An integer.
    Integer(i64),
    /// A number with a point or an exponent.
    Float(f64),
    /// Text.
    String(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the order of the file, without duplicates.
    Map(Vec<Entry>),
}

/// One key of a mapping and its value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The key's text.
    pub key: String,
    /// Where the key stands.
    pub key_span: Span,
    pub value: Node,
}

impl Node {
    /// The value of a key, if this is a mapping that has it.
    pub fn get(&self, key: &str) -> Option<&Node> {
        match &self.value {
            Value::Map(entries) => entries.iter().find(|entry| entry.key == key).map(|entry| &entry.value),
            _ => None,
        }
    }

    /// The tree without its positions.
    pub fn to_json(&self) -> serde_json::Value {
        match &self.value {
            Value::Null => serde_json::Value::Null,
            Value::Bool(value) => (*value).into(),
            Value::Integer(value) => (*value).into(),
            Value::Float(value) => (*value).into(),
            Value::String(value) => value.clone().into(),
            Value::List(items) => items.iter().map(Node::to_json).collect(),
            Value::Map(entries) => entries
                .iter()
                .map(|entry| (entry.key.clone(), entry.value.to_json()))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        }
    }

    /// A tree without positions, as a stage process receives it.
    pub fn from_json(json: &serde_json::Value) -> Node {
        let span = Span::default();
        let value = match json {
            serde_json::Value::Null => Value::Null,
            serde_json::Value::Bool(value) => Value::Bool(*value),
            serde_json::Value::Number(number) => {
                number.as_i64().map_or_else(|| Value::Float(number.as_f64().unwrap_or(f64::NAN)), Value::Integer)
            }
            serde_json::Value::String(text) => Value::String(text.clone()),
            serde_json::Value::Array(items) => Value::List(items.iter().map(Node::from_json).collect()),
            serde_json::Value::Object(map) => Value::Map(
                map.iter()
                    .map(|(key, value)| Entry { key: key.clone(), key_span: span, value: Node::from_json(value) })
                    .collect(),
            ),
        };
        Node { span, value }
    }

    /// What this is, for messages: `a string`, `a list`.
    pub fn describe(&self) -> &'static str {
        match &self.value {
            Value::Null => "nothing",
            Value::Bool(_) => "true or false",
            Value::Integer(_) => "an integer",
            Value::Float(_) => "a number",
            Value::String(_) => "a string",
            Value::List(_) => "a list",
            Value::Map(_) => "a mapping",
        }
    }
}
