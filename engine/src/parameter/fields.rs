//! What derived readers call: the fields of a closed mapping, and the names of a choice.

use super::{Choice, Limits, Parameter, Reader, dotted};
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Entry, Node, Value};
use crate::suggest;

/// A closed mapping while its fields are read.
pub struct Fields<'a> {
    entries: &'a [Entry],
    /// Where a missing field is reported.
    span: Span,
    reader: &'a mut Reader,
    /// Every key that the mapping may have.
    names: Vec<&'static str>,
    /// The variant whose options are read.
    chosen: Option<&'static str>,
}

impl<'a> Fields<'a> {
    /// Opens a mapping and reports every key that is not among `names`. An empty `with:` is a mapping without keys.
    pub fn of(node: &'a Node, reader: &'a mut Reader, names: &[&'static str]) -> Option<Self> {
        let entries = match &node.value {
            Value::Map(entries) => entries.as_slice(),
            Value::Null => &[],
            _ => {
                reader.wrong_type(node, "a mapping");
                return None;
            }
        };
        for entry in entries.iter().filter(|entry| !names.contains(&entry.key.as_str())) {
            reader.problems.push(unknown_key(&entry.key, entry.key_span, names));
        }
        Some(Self { entries, span: opening(node, entries), reader, names: names.to_vec(), chosen: None })
    }

    /// Reads a field that has no default. A type with a value for absence (`Option`) takes that one.
    pub fn required<T: Parameter>(&mut self, name: &str, limits: &Limits) -> Option<T> {
        if let Some(entry) = self.given(name) {
            return self.read(entry, limits);
        }
        if let Some(absent) = T::when_absent() {
            return Some(absent);
        }
        let field = dotted(&self.reader.path, name);
        let problem = match self.entries.iter().find(|entry| entry.key == name) {
            Some(entry) => {
                // An override takes the value away in a text of its own.
                let taken_away = entry.value.span.source != entry.key_span.source;
                let span = if taken_away { entry.value.span } else { entry.key_span };
                Problem::error("missing-key", span, format!("`{field}` has no value"), "a value is required")
            }
            None => {
                let label = match self.chosen {
                    Some(chosen) => format!("`{chosen}` needs `{name}`"),
                    None => format!("`{name}` is required in this mapping"),
                };
                Problem::error("missing-key", self.span, format!("`{field}` is missing"), label).at(field)
            }
        };
        self.reader.problems.push(problem);
        None
    }

    /// Reads a field that has a default.
    pub fn or_default<T: Parameter>(&mut self, name: &str, limits: &Limits, default: impl FnOnce() -> T) -> Option<T> {
        match self.given(name) {
            Some(entry) => self.read(entry, limits),
            None => Some(default()),
        }
    }

    /// Checks the value of a field, where it is given, and makes nothing of it.
    pub fn check_given<T: Parameter>(&mut self, name: &str, limits: &Limits) {
        if let Some(entry) = self.given(name) {
            self.read::<T>(entry, limits);
        }
    }

    /// Reads the tag of a choice, and reports every option that only other variants have.
    pub fn choose(
        &mut self,
        tag: &'static str,
        default: Option<&'static str>,
        choices: &[Choice],
    ) -> Option<&'static str> {
        let names: Vec<&'static str> = choices.iter().map(|choice| choice.name).collect();
        let name = match (self.given(tag), default) {
            (Some(entry), _) => {
                self.reader.under(dotted(&self.reader.path, tag), |reader| read_choice(&entry.value, reader, &names))?
            }
            (None, Some(default)) => default,
            (None, None) => {
                self.required::<String>(tag, &Limits::NONE);
                let help = format!("one of {}", quoted(&names));
                self.reader.problems.last_mut().expect("it is missing").help = Some(help);
                return None;
            }
        };
        let chosen = choices.iter().find(|choice| choice.name == name)?;
        self.report_options_of_others(tag, chosen, choices);
        self.chosen = Some(name);
        Some(name)
    }

    /// Which of several keys is given, of which one alone may be.
    pub fn one_of(&mut self, names: &[&'static str], default: Option<&'static str>) -> Option<&'static str> {
        let given: Vec<_> = names.iter().filter_map(|name| Some((*name, self.given(name)?))).collect();
        match given[..] {
            [] if default.is_some() => default,
            [] => {
                let message = self.reader.said_of_field(format!("one of {} is required", quoted(names)));
                let label = match self.chosen {
                    Some(chosen) => format!("`{chosen}` needs one of them"),
                    None => "none of them is in this mapping".to_owned(),
                };
                self.reader.problems.push(Problem::error("missing-key", self.span, message, label));
                None
            }
            [(name, _)] => Some(name),
            [(first, entry), (second, other), ..] => {
                let message = self.reader.said_of_field(format!("`{first}` and `{second}` exclude each other"));
                let problem = Problem::error("bad-value", other.key_span, message, "give one of them");
                self.reader.problems.push(problem.with_related(entry.key_span, "the other"));
                // It is reported, and keeps nothing else from being checked.
                Some(first)
            }
        }
    }

    fn report_options_of_others(&mut self, tag: &str, chosen: &Choice, choices: &[Choice]) {
        let name = chosen.name;
        let is_option = |key: &str| choices.iter().any(|choice| choice.options.contains(&key));
        let shared = self.names.iter().filter(|known| **known != tag && !is_option(known));
        let takes: Vec<&str> = shared.chain(&chosen.options).copied().collect();
        let takes = match takes.is_empty() {
            true => format!("`{name}` has no options"),
            false => format!("`{name}` has {}", quoted(&takes)),
        };
        for entry in self.entries.iter().filter(|entry| entry.value.value != Value::Null) {
            let key = entry.key.as_str();
            if chosen.options.contains(&key) || !is_option(key) {
                continue;
            }
            let having = choices.iter().filter(|choice| choice.options.contains(&key)).map(|choice| choice.name);
            let having = having.collect::<Vec<_>>();
            let message = self.reader.said_of_field(format!("`{name}` has no option `{key}`"));
            let label = format!("not an option of `{name}`");
            let help = format!("an option of {}; {takes}", quoted(&having));
            self.reader.problems.push(Problem::error("wrong-option", entry.key_span, message, label).with_help(help));
        }
    }

    /// The entry of a field; a key without a value counts as absent.
    fn given(&self, name: &str) -> Option<&'a Entry> {
        self.entries.iter().find(|entry| entry.key == name && entry.value.value != Value::Null)
    }

    fn read<T: Parameter>(&mut self, entry: &Entry, limits: &Limits) -> Option<T> {
        self.reader.under(dotted(&self.reader.path, &entry.key), |reader| {
            let value = T::read(&entry.value, reader)?;
            limits.check(&entry.value, reader).then_some(value)
        })
    }
}

/// Reads one of a few names; an unknown one is reported with the nearest.
pub fn read_choice(node: &Node, reader: &mut Reader, names: &[&'static str]) -> Option<&'static str> {
    let Value::String(text) = &node.value else {
        reader.wrong_type(node, &format!("one of {}", quoted(names)));
        return None;
    };
    let known = names.iter().find(|name| *name == text);
    if known.is_none() {
        let message = reader.said_of_field(format!("unknown value `{text}`"));
        reader.problems.push(
            Problem::error("unknown-value", node.span, message, format!("expected one of {}", quoted(names)))
                .with_help_if(suggest::help(text, "known values", names)),
        );
    }
    known.copied()
}

/// The problem of a key that a closed mapping does not have.
pub(crate) fn unknown_key<'a, S>(key: &str, span: Span, known: impl IntoIterator<Item = &'a S> + Clone) -> Problem
where
    S: AsRef<str> + ?Sized + 'a,
{
    let help = suggest::help(key, "known keys", known).unwrap_or_else(|| "nothing may be set here".to_owned());
    Problem::error("unknown-key", span, format!("unknown key `{key}`"), "not a key of this mapping").with_help(help)
}

/// What to underline for a whole mapping: of one in block form its first key, so that a page of text is not underlined.
pub(crate) fn opening(node: &Node, entries: &[Entry]) -> Span {
    match entries.first() {
        Some(first) if first.key_span.source == node.span.source && first.key_span.offset == node.span.offset => {
            first.key_span
        }
        _ => node.span,
    }
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
