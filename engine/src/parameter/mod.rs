//! Parameters: what a pipeline file may say under `with:`, read strictly and all problems at once.
//!
//! A stage kind declares a struct with `#[derive(Parameters)]`; each field is `#[semantic]`, `#[resumable]` or
//! `#[cosmetic]`. One declaration gives the reader, the defaults, the checks, the key and the JSON Schema.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::time::Duration;

use cache::{Digest, KeyDocument};

use crate::artifact::{Facts, InputFacts};
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Node, Value};

mod collection;
mod declared;
mod fields;
mod input;
mod later;
mod limits;
mod object_schema;
mod record;
mod scalar;
#[cfg(test)]
mod tests;
mod unit;

pub use cache::Class;
pub(crate) use collection::COLLECT;
pub use collection::{OneOrMore, only_reference};
pub use declared::{DeclaredField, declared_fields};
pub(crate) use fields::unknown_key;
pub use fields::{Fields, read_choice};
pub use later::{Given, Later};
pub use limits::Limits;
pub use object_schema::{CLASS, ObjectSchema, choice_schema};
pub use parameters_derive::Parameters;
pub use record::{Choice, Record, have_equal_keys, names_of_choices, only_tag, read_record, tag_first};
/// A JSON Schema.
pub use serde_json::Value as Json;

/// A value that a pipeline file can give.
pub trait Parameter {
    /// Reads the value; on `None` at least one problem has been reported.
    fn read(node: &Node, reader: &mut Reader) -> Option<Self>
    where
        Self: Sized;

    /// Writes the value into a key, at the writer's present path.
    fn write_key(&self, key: &mut KeyWriter<'_>);

    /// The value's JSON Schema.
    fn schema() -> serde_json::Value
    where
        Self: Sized;

    /// Visits every reference to another stage's output inside this value.
    fn visit_inputs(&self, _visit: &mut dyn FnMut(&Reference, &'static [&'static str])) {}

    /// The value of a field that the file leaves out, for types that have one of their own (`Option`).
    fn when_absent() -> Option<Self>
    where
        Self: Sized,
    {
        None
    }

    /// Where the name of a stage goes in a list of such values; `None` where they name none, or more than one.
    fn collected() -> Option<Collected>
    where
        Self: Sized,
    {
        None
    }
}

/// What to do with a number that is meant as a string.
pub(crate) const QUOTES: &str = "put it in quotes";

/// What a key holds for an input that has no identity yet.
pub(crate) const NOT_KNOWN: &str = "not known yet";

/// Collects the problems met while reading.
#[derive(Debug, Default)]
pub struct Reader {
    /// What was wrong so far.
    pub problems: Vec<Problem>,
    /// The references met so far, with the kinds that each accepts: known even where the parameters around them are
    /// wrong.
    pub references: Vec<(Reference, &'static [&'static str])>,
    /// Where stages are named, for what replaces the name of a swept stage by those of its children.
    pub(crate) named: Vec<Named>,
    /// The field that is read currently, as keys spell it.
    path: String,
}

/// A place that names a stage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Named {
    /// The field, as keys spell it.
    pub path: String,
    /// The name there.
    pub reference: Reference,
    /// `None` for one stage; for `{ collect: stage }` where in an item of the list a child goes.
    pub collected: Option<Collected>,
}

/// Where in an item of a list the name of a stage goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Collected {
    /// The item is the name.
    Itself,
    /// The item is a mapping, and this key of it takes the name.
    Field(&'static str),
}

impl Reader {
    /// Notes a reference to another stage's output.
    pub(crate) fn refer(&mut self, reference: Reference, kinds: &'static [&'static str]) {
        self.named.push(Named { path: self.path.clone(), reference: reference.clone(), collected: None });
        self.references.push((reference, kinds));
    }

    /// Reports that a value has the wrong type.
    pub fn wrong_type(&mut self, node: &Node, expected: &str) {
        let message = self.said_of_field(format!("expected {expected}, found {}", node.describe()));
        let mut problem = Problem::error("wrong-type", node.span, message, format!("expected {expected}"));
        if expected.starts_with("a string")
            && matches!(node.value, Value::Integer(_) | Value::Float(_) | Value::Bool(_))
        {
            problem = problem.with_help(QUOTES);
        } else if expected.starts_with("a string") && matches!(node.value, Value::Map(_)) {
            problem = problem.with_help("a text that begins with `{` needs quotes");
        }
        self.problems.push(problem);
    }

    /// Reports a value outside its range; `expected` is like `at least 1`.
    pub fn out_of_range(&mut self, node: &Node, expected: &str) {
        let field = if self.path.is_empty() { "the value".to_owned() } else { format!("`{}`", self.path) };
        let message = format!("{field} must be {expected}");
        self.problems.push(Problem::error("out-of-range", node.span, message, format!("must be {expected}")));
    }

    /// Reports a text that is of the right type and does not read as what it should be.
    pub fn bad_value(&mut self, node: &Node, message: impl Into<String>, expected: &str) {
        let message = self.said_of_field(message.into());
        self.problems.push(Problem::error("bad-value", node.span, message, format!("expected {expected}")));
    }

    /// Reads a field, an entry or an item, by its path.
    fn under<T>(&mut self, path: String, read: impl FnOnce(&mut Self) -> T) -> T {
        let outer = std::mem::replace(&mut self.path, path);
        let value = read(self);
        self.path = outer;
        value
    }

    /// A message with the field before it that it is about.
    fn said_of_field(&self, message: String) -> String {
        if self.path.is_empty() { message } else { format!("`{}`: {message}", self.path) }
    }
}

/// Writes a key while it walks a parameter tree.
pub struct KeyWriter<'a> {
    document: &'a mut KeyDocument,
    path: String,
    class: Class,
    identity: &'a dyn Fn(&Reference, &'static [&'static str]) -> Option<Digest>,
    /// References whose identity is not known yet, since their stage has still to run.
    pub unresolved: Vec<Reference>,
    /// References that take an input of any kind, with their fields: which kind it is, is for whoever reads it to act
    /// upon.
    pub of_any_kind: Vec<(String, Reference)>,
}

impl<'a> KeyWriter<'a> {
    /// A writer into `document`; `identity` gives the identity of an input that exists already.
    pub fn new(
        document: &'a mut KeyDocument,
        identity: &'a dyn Fn(&Reference, &'static [&'static str]) -> Option<Digest>,
    ) -> Self {
        let (unresolved, of_any_kind) = (Vec::new(), Vec::new());
        Self { document, path: String::new(), class: Class::Semantic, identity, unresolved, of_any_kind }
    }

    /// Writes a field of a struct: the class that holds is the outermost one that is not semantic.
    pub fn field(&mut self, name: &str, class: Class, write: impl FnOnce(&mut Self)) {
        let outer = self.class;
        self.class = outer.within(class);
        self.under(&dotted(&self.path, name), write);
        self.class = outer;
    }

    /// Writes an entry of a mapping whose keys the user chooses.
    pub fn entry(&mut self, name: &str, write: impl FnOnce(&mut Self)) {
        self.under(&dotted(&self.path, name), write);
    }

    /// Writes an item of a list.
    pub fn item(&mut self, index: usize, write: impl FnOnce(&mut Self)) {
        self.under(&format!("{}[{index}]", self.path), write);
    }

    /// Writes one canonical value at the present path.
    pub fn value(&mut self, canonical: impl Into<String>) {
        self.document.push(self.path.clone(), canonical, self.class);
    }

    /// Writes the identity of an input.
    pub fn input(&mut self, reference: &Reference, kinds: &'static [&'static str]) {
        if kinds.is_empty() {
            self.of_any_kind.push((self.path.clone(), reference.clone()));
        }
        match (self.identity)(reference, kinds) {
            Some(identity) => self.value(identity.to_string()),
            None => {
                self.unresolved.push(reference.clone());
                self.value(NOT_KNOWN);
            }
        }
    }

    fn under(&mut self, path: &str, write: impl FnOnce(&mut Self)) {
        let outer = std::mem::replace(&mut self.path, path.to_owned());
        write(self);
        self.path = outer;
    }
}

/// The path of a key below `path`, as keys and explanations spell it. A key with other characters than letters, digits,
/// `_` and `-` is quoted, so that no two paths read the same.
pub(crate) fn dotted(path: &str, key: &str) -> String {
    let plain = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    let dot = if path.is_empty() { "" } else { "." };
    if plain { format!("{path}{dot}{key}") } else { format!("{path}{dot}{key:?}") }
}

/// A reference to another stage's output: `stage` or `stage.output`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Reference {
    /// The stage's id.
    pub stage: String,
    /// The output, where the file names it.
    pub output: Option<String>,
    /// Where it stands.
    pub span: Span,
}

impl Reference {
    /// The facts of the output it names; of the stage's only output where it names none.
    pub fn facts_in<'a>(&self, inputs: &'a InputFacts) -> Option<&'a Facts> {
        let prefix = format!("{}.", self.stage);
        match &self.output {
            Some(output) => inputs.get(&format!("{prefix}{output}")),
            None => inputs.iter().find(|(name, _)| name.starts_with(&prefix)).map(|(_, facts)| facts),
        }
    }
}

/// A kind of artefact, as a type: `struct Rows; impl ArtifactKind for Rows { const KINDS: … = &["rows"]; }`.
pub trait ArtifactKind: 'static {
    /// The kinds that an input of this type accepts, the preferred one first; empty where it accepts every kind.
    const KINDS: &'static [&'static str];
}

/// A field that takes another stage's output.
pub struct Input<K> {
    /// The stage and output it names.
    pub reference: Reference,
    kind: PhantomData<fn() -> K>,
}

impl<K: ArtifactKind> Input<K> {
    /// An input that refers to `reference`.
    pub fn new(reference: Reference) -> Self {
        Self { reference, kind: PhantomData }
    }
}

impl<K> Clone for Input<K> {
    fn clone(&self) -> Self {
        Self { reference: self.reference.clone(), kind: PhantomData }
    }
}

impl<K> std::fmt::Debug for Input<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Input({})", self.reference.stage)
    }
}

/// A literal list, or a stage whose output holds the values: a list is literal and a plain string is a stage.
#[derive(Debug, Clone)]
pub enum OneOf<L, I> {
    /// Written in the file.
    Literal(L),
    /// Another stage's output.
    Stage(I),
}

/// A path to a local file, folder or glob, relative to the pipeline file; its text enters no key, its content does
/// (see [`crate::stage::Stage::outside`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalPath {
    pub text: String,
    /// Where it stands.
    pub span: Span,
}

/// A length of time, written `90s`, `5m`, `12h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Period(pub Duration);

/// A number of bytes, written `40GiB` or `500MB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

/// A mapping with keys of the user's choice, such as `column_map`.
pub type Mapping<T> = BTreeMap<String, T>;
