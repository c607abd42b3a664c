//! Text to tree: YAML 1.2, every key and value with its place, nothing merged, dropped or guessed.
//!
//! The parser is asked for bare events with positions; what a plain scalar stands for ([`super::scalar`]), where a
//! container ends, and what to think of duplicate keys and `<<` is decided here.

use std::collections::HashMap;
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_yaml::options::{DuplicateKeyPolicy, MergeKeyPolicy, NonFiniteFloatPolicy};
use serde_yaml::{Location, Spanned};

use super::problem::Problem;
use super::scalar;
use super::source::{SourceId, Span};
use super::syntax_error;
use super::tree::{Entry, MAX_DEPTH, Node, Value};

/// The largest pipeline file.
pub const MAX_BYTES: usize = 1 << 20;

/// How many values a file may hold, aliases written out; a thousand stages have about fifty thousand.
const MAX_VALUES: usize = 250_000;

/// How many values may come from aliases: enough to share a block between all stages, far from an alias bomb.
const MAX_ALIASED_EVENTS: usize = 100_000;

/// Reads a text. Duplicate keys and the like are added to `problems` and the tree goes on without them; a text that is
/// not YAML is the error, and the only one.
///
/// # Errors
/// The text is not one YAML document, or is larger or deeper than a pipeline file can be.
pub fn parse(source: SourceId, text: &str, problems: &mut Vec<Problem>) -> Result<Node, Box<Problem>> {
    read(source, text, options(), problems)
}

/// Reads a text of another tool, in which a value may have a tag of that tool's: the value is what it would be without.
///
/// # Errors
/// As for [`parse`].
pub fn parse_tagged(source: SourceId, text: &str, problems: &mut Vec<Problem>) -> Result<Node, Box<Problem>> {
    let mut options = options();
    options.reject_unsupported_tags = false;
    read(source, text, options, problems)
}

fn read(
    source: SourceId,
    text: &str,
    options: serde_yaml::Options,
    problems: &mut Vec<Problem>,
) -> Result<Node, Box<Problem>> {
    if text.len() > MAX_BYTES {
        let message = format!("the file is {} bytes long, and at most {MAX_BYTES} are read", text.len());
        return Err(Problem::error(
            "too-large",
            Span { source, offset: 0, len: 0 },
            message,
            "a pipeline file is small",
        )
        .into());
    }
    let raw: Spanned<Raw> = serde_yaml::from_str_with_options(text, options)
        .map_err(|error| Box::new(syntax_error::explain(&error, source, text)))?;
    Ok(Builder { source, text, problems }.node(raw))
}

fn options() -> serde_yaml::Options {
    serde_yaml::options! {
        strict_booleans: true,
        reject_unsupported_tags: true,
        with_snippet: false,
        // All three are reported by the builder or by the field that is read, beside the other problems.
        duplicate_keys: DuplicateKeyPolicy::LastWins,
        merge_keys: MergeKeyPolicy::AsOrdinary,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        alias_limits: serde_yaml::alias_limits! { max_total_replayed_events: MAX_ALIASED_EVENTS },
        budget: serde_yaml::budget! {
            max_nodes: MAX_VALUES,
            max_depth: MAX_DEPTH,
            flow_nesting_limit: MAX_DEPTH,
        },
    }
}

/// A value as the parser hands it over.
enum Raw {
    Null,
    Bool,
    Number(f64),
    Text(String),
    List(Vec<Spanned<Raw>>),
    Map(Vec<(Spanned<Raw>, Spanned<Raw>)>),
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Null)
    }

    fn visit_none<E>(self) -> Result<Raw, E> {
        Ok(Raw::Null)
    }

    fn visit_bool<E>(self, _value: bool) -> Result<Raw, E> {
        Ok(Raw::Bool)
    }

    fn visit_i64<E>(self, value: i64) -> Result<Raw, E> {
        Ok(Raw::Number(value as f64))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Raw, E> {
        Ok(Raw::Number(value as f64))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Raw, E> {
        Ok(Raw::Number(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Raw, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Raw::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Raw, A::Error> {
        let mut map = Vec::new();
        while let Some(entry) = entries.next_entry()? {
            map.push(entry);
        }
        Ok(Raw::Map(map))
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

/// Turns what the parser hands over into the tree.
struct Builder<'a> {
    source: SourceId,
    text: &'a str,
    problems: &'a mut Vec<Problem>,
}

impl Builder<'_> {
    fn node(&mut self, raw: Spanned<Raw>) -> Node {
        let used = self.span(&raw.referenced);
        let value = match raw.value {
            Raw::Null => Value::Null,
            Raw::Bool => scalar::plain(self.slice(self.span(&raw.defined))),
            Raw::Number(value) => self.number(value, self.span(&raw.defined)),
            Raw::Text(text) => Value::String(text),
            Raw::List(items) => Value::List(items.into_iter().map(|item| self.node(item)).collect()),
            Raw::Map(entries) => Value::Map(self.entries(entries)),
        };
        let span = match &value {
            Value::List(items) => self.whole(used, ']', items.first().map(|i| i.span), items.last().map(|i| i.span)),
            Value::Map(entries) => {
                self.whole(used, '}', entries.first().map(|e| e.key_span), entries.last().map(|e| e.value.span))
            }
            _ => used,
        };
        Node { span, value }
    }

    /// A number is what its text says, unless it is tagged (`!!float "1"`), where the parser knows.
    fn number(&self, parsed: f64, defined: Span) -> Value {
        match scalar::plain(self.slice(defined)) {
            Value::String(text) if text.starts_with(['"', '\'']) => Value::Float(parsed),
            value => value,
        }
    }

    fn entries(&mut self, raw: Vec<(Spanned<Raw>, Spanned<Raw>)>) -> Vec<Entry> {
        let mut entries: Vec<Entry> = Vec::with_capacity(raw.len());
        let mut places: HashMap<String, Span> = HashMap::with_capacity(raw.len());
        for (key, value) in raw {
            let key_span = self.span(&key.referenced);
            let value = self.node(value);
            let Some(key) = self.key(key, key_span) else { continue };
            if let Some(first) = places.get(&key) {
                self.problems.push(
                    Problem::error("duplicate-key", key_span, format!("`{key}` is set twice"), "the second time")
                        .with_related(*first, "the first time")
                        .with_help("remove one of the two"),
                );
                continue;
            }
            places.insert(key.clone(), key_span);
            entries.push(Entry { key, key_span, value });
        }
        entries
    }

    /// The text of a key; what is no text, and `<<`, is reported.
    fn key(&mut self, raw: Spanned<Raw>, span: Span) -> Option<String> {
        let plain = !self.slice(span).starts_with(['"', '\'']);
        let problem = match raw.value {
            Raw::Text(text) if text == "<<" && plain => {
                Problem::error("merge-key", span, "merge keys (`<<`) are not read", "not a key of YAML 1.2")
                    .with_help("write the keys out, or give the whole mapping by an alias")
            }
            Raw::Text(text) => return Some(text),
            Raw::Number(_) | Raw::Bool | Raw::Null => return Some(self.slice(self.span(&raw.defined)).to_owned()),
            Raw::List(_) | Raw::Map(_) => {
                Problem::error("bad-key", span, "a key must be a string, not a list or a mapping", "not a string")
            }
        };
        self.problems.push(problem);
        None
    }

    /// The span of a whole list or mapping, of which the parser gives the first byte.
    fn whole(&self, start: Span, close: char, first: Option<Span>, last: Option<Span>) -> Span {
        let opening = self.text[start.offset.min(self.text.len())..].chars().next();
        let from = match opening {
            Some('*') => return start,
            Some('[' | '{') => start.offset,
            Some('-') if close == ']' => start.offset,
            _ => first.map_or(start.offset, |first| first.offset),
        };
        let inner_end = last.map_or(from + opening.map_or(0, char::len_utf8), Span::end);
        let end = match opening {
            Some('[' | '{') => closing(self.text, inner_end, close).unwrap_or(inner_end),
            _ => inner_end,
        };
        Span { source: self.source, offset: from, len: end.saturating_sub(from) }
    }

    /// Where the parser says a value stands, without the line end that closes a block scalar.
    fn span(&self, location: &Location) -> Span {
        let span = location.span();
        let offset = span.byte_offset().map_or(0, |offset| offset as usize).min(self.text.len());
        let end = (offset + span.byte_len().map_or(0, |len| len as usize)).min(self.text.len());
        let text = self.text.get(offset..end).unwrap_or("");
        Span { source: self.source, offset, len: text.trim_end().len() }
    }

    fn slice(&self, span: Span) -> &str {
        self.text.get(span.offset..span.end()).unwrap_or("")
    }
}

/// The end of a container in flow form: past white space, commas and comments stands its closing bracket.
fn closing(text: &str, from: usize, close: char) -> Option<usize> {
    let mut in_comment = false;
    for (at, letter) in text.get(from..)?.char_indices() {
        match letter {
            '\n' => in_comment = false,
            _ if in_comment => {}
            '#' => in_comment = true,
            letter if letter == close => return Some(from + at + letter.len_utf8()),
            _ => {}
        }
    }
    None
}
