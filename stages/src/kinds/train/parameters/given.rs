//! A value with its place in the file: for checks that take several values together.

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use engine::parameter::{Json, KeyWriter, Parameter, Reader, Reference};

/// A value, where it stands, and of a mapping which keys the file gives. Of a default: nowhere, and none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Given<T> {
    pub value: T,
    /// Where it stands.
    pub span: Span,
    /// The keys of the mapping that have a value, each with its place.
    pub keys: Vec<(String, Span)>,
}

impl<T> Given<T> {
    /// A value that the file does not give.
    pub fn default_of(value: T) -> Self {
        Self { value, span: Span::default(), keys: Vec::new() }
    }

    /// Where one of the mapping's keys stands, if it is given.
    pub fn key(&self, name: &str) -> Option<Span> {
        self.keys.iter().find(|(key, _)| key == name).map(|(_, span)| *span)
    }
}

impl<T: Parameter> Parameter for Given<T> {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let value = T::read(node, reader)?;
        Some(Self { value, span: node.span, keys: given_keys(node) })
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        self.value.write_key(key);
    }

    fn schema() -> Json {
        T::schema()
    }

    fn visit_inputs(&self, visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {
        self.value.visit_inputs(visit);
    }
}

/// The keys of a mapping that have a value.
pub(super) fn given_keys(node: &Node) -> Vec<(String, Span)> {
    let Value::Map(entries) = &node.value else { return Vec::new() };
    let given = entries.iter().filter(|entry| entry.value.value != Value::Null);
    given.map(|entry| (entry.key.clone(), entry.key_span)).collect()
}

/// Reports the given keys that the choice `name` of a `what` does not have; `options` are those that it has.
pub(super) fn only_options_of(what: &str, name: &str, options: &[&str], node: &Node, reader: &mut Reader) {
    let foreign = given_keys(node).into_iter().filter(|(key, _)| key != "name" && !options.contains(&key.as_str()));
    let quoted = |name: &&str| format!("`{name}`");
    let known = match options {
        [] => format!("`{name}` has no options"),
        some => format!("`{name}` takes {}", some.iter().map(quoted).collect::<Vec<_>>().join(", ")),
    };
    // What is no option of any choice has been reported as an unknown key.
    let unknown: Vec<Span> =
        reader.problems.iter().filter(|problem| problem.code == "unknown-key").map(|problem| problem.span).collect();
    for (key, span) in foreign.filter(|(_, span)| !unknown.contains(span)) {
        let message = format!("the {what} `{name}` has no `{key}`");
        let label = format!("not an option of `{name}`");
        reader.problems.push(Problem::error("wrong-option", span, message, label).with_help(known.clone()));
    }
}
