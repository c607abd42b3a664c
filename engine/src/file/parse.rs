//! Text to tree: YAML 1.2, every key and value with its place, nothing merged, dropped or guessed.
//!
//! The parser is asked for bare events with positions. What a plain scalar stands for ([`super::scalar`]), what an
//! alias is, and what to think of duplicate keys, tags and `<<` is decided here.

use std::borrow::Cow;
use std::collections::HashMap;

use granit_parser::{Event, Options, Parser, ScalarStyle, StrInput, StructureStyle, Tag};

use super::problem::Problem;
use super::scalar;
use super::source::{SourceId, Span};
use super::syntax_error;
use super::tree::{Entry, MAX_DEPTH, Node, Value};

/// The largest pipeline file.
pub const MAX_BYTES: usize = 1 << 20;

/// How many values a file may hold, keys among them and aliases written out; a thousand stages have about fifty
/// thousand.
const MAX_VALUES: usize = 250_000;

/// How many of them may come from aliases: enough to share a block between all stages, far from an alias bomb.
const MAX_ALIASED_VALUES: usize = 100_000;

/// From how many entries on the keys of a mapping are looked up rather than gone through.
const MANY_ENTRIES: usize = 16;

/// Reads a text. Duplicate keys and the like are added to `problems` and the tree goes on without them; a text that is
/// not YAML is the error, and the only one.
///
/// # Errors
/// The text is not one YAML document, or is larger or deeper than a pipeline file can be.
pub fn parse(source: SourceId, text: &str, problems: &mut Vec<Problem>) -> Result<Node, Box<Problem>> {
    read(source, text, UnknownTags::Refused, problems)
}

/// Reads a text of another tool, in which a value may have a tag of that tool's: the value is what it would be without.
///
/// # Errors
/// As for [`parse`].
pub fn parse_tagged(source: SourceId, text: &str, problems: &mut Vec<Problem>) -> Result<Node, Box<Problem>> {
    read(source, text, UnknownTags::Ignored, problems)
}

fn read(
    source: SourceId,
    text: &str,
    unknown_tags: UnknownTags,
    problems: &mut Vec<Problem>,
) -> Result<Node, Box<Problem>> {
    if text.len() > MAX_BYTES {
        let message = format!("the file is {} bytes long, and at most {MAX_BYTES} are read", text.len());
        let span = Span { source, offset: 0, len: 0 };
        return Err(Problem::error("too-large", span, message, "a pipeline file is small").into());
    }
    let mut options = Options::default();
    options.set_emit_comments(false);
    options.emit_unresolved_aliases = true;
    options.flow_nesting_limit = MAX_DEPTH;
    let parser = Parser::new_from_str_with_options(text, options);
    let mut builder =
        Builder { parser, source, text, unknown_tags, anchors: HashMap::new(), values: 0, aliased: 0, problems };
    builder.document()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum UnknownTags {
    Refused,
    Ignored,
}

/// What a text is read into the tree with.
struct Builder<'a> {
    parser: Parser<'a, StrInput<'a>>,
    source: SourceId,
    text: &'a str,
    unknown_tags: UnknownTags,
    /// What each anchor stands for, by the parser's number of it; nothing as long as its value is not whole.
    anchors: HashMap<usize, Option<Anchored>>,
    /// Values and keys so far.
    values: usize,
    /// Those of them that came from aliases.
    aliased: usize,
    problems: &'a mut Vec<Problem>,
}

/// A value with an anchor.
struct Anchored {
    node: Node,
    /// The values and keys in it.
    values: usize,
    /// How deep it nests: 0 for a scalar.
    height: usize,
}

type Failed = Box<Problem>;

impl<'a> Builder<'a> {
    /// The one document of the text; an empty text is nothing.
    fn document(&mut self) -> Result<Node, Failed> {
        let mut root = None;
        loop {
            match self.next()? {
                (Event::StreamEnd, span) => {
                    return Ok(root.unwrap_or(Node { span: Span { len: 0, ..span }, value: Value::Null }));
                }
                (Event::StreamStart | Event::DocumentStart(..) | Event::DocumentEnd, _) => {}
                (_, span) if root.is_some() => return Err(syntax_error::second_document(span)),
                (event, span) => root = Some(self.node(event, span, 0)?),
            }
        }
    }

    /// The next event and its place.
    fn next(&mut self) -> Result<(Event<'a>, Span), Failed> {
        match self.parser.next_event() {
            Some(Ok((event, span))) => {
                let offset = |marker: granit_parser::Marker| marker.byte_offset().unwrap_or(0);
                let (from, to) = (offset(span.start), offset(span.end));
                let place = self.place(from, to);
                if let Some(tag) = tag(&event).filter(|tag| self.refuses(tag, &event)) {
                    let place = span.tag_span().map_or(place, |span| self.place(offset(span.start), offset(span.end)));
                    return Err(syntax_error::unknown_tag(&tag.original(), place));
                }
                Ok((event, place))
            }
            Some(Err(error)) => Err(syntax_error::explain(&error, self.source, self.text)),
            None => Ok((Event::StreamEnd, self.place(self.text.len(), self.text.len()))),
        }
    }

    /// A place, without the line end that closes a block scalar.
    fn place(&self, from: usize, to: usize) -> Span {
        let text = self.text.get(from..to).unwrap_or("");
        Span { source: self.source, offset: from.min(self.text.len()), len: text.trim_end().len() }
    }

    fn slice(&self, span: Span) -> &'a str {
        self.text.get(span.offset..span.end()).unwrap_or("")
    }

    /// Whether a tag is neither one of the core schema for such a value nor `!`, which makes a string of any scalar.
    fn refuses(&self, tag: &Tag, event: &Event<'_>) -> bool {
        let fits = match (tag.core_suffix(), event) {
            (Some("seq"), Event::SequenceStart(..)) | (Some("map"), Event::MappingStart(..)) => true,
            (Some("null" | "bool" | "int" | "float" | "str"), Event::Scalar(..)) => true,
            (None, Event::Scalar(..)) => is_of_string(tag),
            _ => false,
        };
        self.unknown_tags == UnknownTags::Refused && !fits
    }

    /// A value with all that is in it, so deep in others.
    fn node(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Node, Failed> {
        let nests = matches!(event, Event::SequenceStart(..) | Event::MappingStart(..));
        if nests && depth == MAX_DEPTH {
            return Err(syntax_error::too_deep(span));
        }
        let before = self.values;
        let anchor = anchor(&event);
        if anchor != 0 {
            self.anchors.insert(anchor, None);
        }
        let node = match event {
            Event::Alias(target) => return self.alias(target, span, depth),
            Event::UnresolvedAlias(_) => return Err(syntax_error::unknown_anchor(span)),
            Event::Scalar(text, style, _, tag) => {
                self.count(1, span)?;
                let value = scalar_value(text, style, tag.as_deref(), span)?;
                self.problems.extend(lost_number(self.slice(span), &value, span));
                Node { span, value }
            }
            Event::SequenceStart(style, ..) => {
                self.count(1, span)?;
                self.list(style, span, depth + 1)?
            }
            Event::MappingStart(style, ..) => {
                self.count(1, span)?;
                self.map(style, span, depth + 1)?
            }
            _ => return Err(syntax_error::not_a_value(span)),
        };
        if anchor != 0 {
            let anchored = Anchored { values: self.values - before, height: height(&node), node: node.clone() };
            self.anchors.insert(anchor, Some(anchored));
        }
        Ok(node)
    }

    /// What an alias stands for, as if all of it stood where the alias does.
    fn alias(&mut self, target: usize, span: Span, depth: usize) -> Result<Node, Failed> {
        let Some(found) = self.anchors.get(&target) else { return Err(syntax_error::unknown_anchor(span)) };
        let Some(Anchored { node, values, height }) = found else { return Err(syntax_error::alias_in_itself(span)) };
        if depth + height > MAX_DEPTH {
            return Err(syntax_error::too_deep(span));
        }
        if self.aliased + values > MAX_ALIASED_VALUES {
            return Err(syntax_error::too_many_aliases(span));
        }
        let (mut node, values) = (node.clone(), *values);
        self.aliased += values;
        self.count(values, span)?;
        put_at(&mut node, span);
        Ok(node)
    }

    fn count(&mut self, values: usize, span: Span) -> Result<(), Failed> {
        self.values += values;
        if self.values > MAX_VALUES { Err(syntax_error::too_many_values(span)) } else { Ok(()) }
    }

    fn list(&mut self, style: StructureStyle, start: Span, depth: usize) -> Result<Node, Failed> {
        let mut items: Vec<Node> = Vec::new();
        let end = loop {
            match self.next()? {
                (Event::SequenceEnd, end) => break end,
                (event, span) => items.push(self.node(event, span, depth)?),
            }
        };
        let first = items.first().map(|item| item.span);
        let span = self.whole(style, (start, end), first, items.last().map(|item| item.span));
        Ok(Node { span, value: Value::List(items) })
    }

    fn map(&mut self, style: StructureStyle, start: Span, depth: usize) -> Result<Node, Failed> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut places: HashMap<String, Span> = HashMap::new();
        let end = loop {
            let (event, key_span) = match self.next()? {
                (Event::MappingEnd, end) => break end,
                key => key,
            };
            let key = self.key(event, key_span, depth)?;
            let (event, span) = self.next()?;
            let value = self.node(event, span, depth)?;
            let Some(key) = key else { continue };
            if entries.len() == MANY_ENTRIES {
                places.extend(entries.iter().map(|entry| (entry.key.clone(), entry.key_span)));
            }
            let first = if entries.len() < MANY_ENTRIES {
                entries.iter().find(|entry| entry.key == key).map(|entry| entry.key_span)
            } else {
                places.get(&key).copied()
            };
            if let Some(first) = first {
                self.problems.push(
                    Problem::error("duplicate-key", key_span, format!("`{key}` is set twice"), "the second time")
                        .with_related(first, "the first time")
                        .with_help("remove one of the two"),
                );
                continue;
            }
            if entries.len() >= MANY_ENTRIES {
                places.insert(key.clone(), key_span);
            }
            entries.push(Entry { key, key_span, value });
        };
        let first = entries.first().map(|entry| entry.key_span);
        let span = self.whole(style, (start, end), first, entries.last().map(|entry| entry.value.span));
        Ok(Node { span, value: Value::Map(entries) })
    }

    /// The text of a key, as it is written where it has no quotes; what is no text, and `<<`, is reported.
    fn key(&mut self, event: Event<'a>, span: Span, depth: usize) -> Result<Option<String>, Failed> {
        let aliased = matches!(event, Event::Alias(_));
        if let Event::Scalar(text, style, 0, _) = event {
            self.count(1, span)?;
            if style == ScalarStyle::Plain && text == "<<" {
                let message = "merge keys (`<<`) are not read";
                self.problems.push(
                    Problem::error("merge-key", span, message, "not a key of YAML 1.2")
                        .with_help("write the keys out, or give the whole mapping by an alias"),
                );
                return Ok(None);
            }
            // The parser says `~` where a key is missing.
            return Ok(Some(if span.len == 0 { String::new() } else { text.into_owned() }));
        }
        match self.node(event, span, depth)?.value {
            Value::String(text) => Ok(Some(text)),
            Value::List(_) | Value::Map(_) => {
                let message = "a key must be a string, not a list or a mapping";
                self.problems.push(Problem::error("bad-key", span, message, "not a string"));
                Ok(None)
            }
            Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Float(_) if !aliased => {
                Ok(Some(self.slice(span).to_owned()))
            }
            value => Ok(Some(Node { span, value }.to_json().to_string())),
        }
    }

    /// The place of a whole list or mapping. In flow form its brackets are at both ends, which a mapping in a list may
    /// lack: of `[a: 1]` it is `a: 1`. In block form it is what is in it, with the first dash.
    fn whole(
        &self,
        style: StructureStyle,
        (start, end): (Span, Span),
        first: Option<Span>,
        last: Option<Span>,
    ) -> Span {
        let opening = self.text.as_bytes().get(start.offset);
        let (from, to) = match (style, opening) {
            (StructureStyle::Flow, Some(b'[' | b'{')) => (start.offset, end.end()),
            (StructureStyle::Block, Some(b'-')) => (start.offset, last.unwrap_or(start).end()),
            _ => (first.unwrap_or(start).offset, last.unwrap_or(start).end()),
        };
        Span { source: self.source, offset: from, len: to.saturating_sub(from) }
    }
}

fn anchor(event: &Event<'_>) -> usize {
    match event {
        Event::Scalar(_, _, anchor, _) | Event::SequenceStart(_, anchor, _) | Event::MappingStart(_, anchor, _) => {
            *anchor
        }
        _ => 0,
    }
}

fn tag<'e>(event: &'e Event<'_>) -> Option<&'e Tag> {
    match event {
        Event::Scalar(.., tag) | Event::SequenceStart(.., tag) | Event::MappingStart(.., tag) => tag.as_deref(),
        _ => None,
    }
}

/// `!`, which says that a scalar is a string whatever it looks like.
fn is_of_string(tag: &Tag) -> bool {
    tag.original() == "!"
}

/// A number of which something would be lost.
pub(super) fn lost_number(text: &str, value: &Value, span: Span) -> Option<Problem> {
    let why = scalar::lost(text, value)?;
    let message = format!("the number `{}` cannot be kept: {why}", crate::visible::visible(text));
    let help = "what is text, such as an identifier, is written in quotes";
    Some(Problem::error("out-of-range", span, message, "another number would be taken").with_help(help))
}

/// What a scalar stands for: by its tag, by its quotes, or by what it looks like.
fn scalar_value(text: Cow<'_, str>, style: ScalarStyle, tag: Option<&Tag>, span: Span) -> Result<Value, Failed> {
    let kind = tag.and_then(Tag::core_suffix);
    let value = match kind {
        Some("null" | "bool" | "int" | "float") => scalar::plain(&text),
        Some("str") => return Ok(Value::String(text.into_owned())),
        None if style == ScalarStyle::Plain && !tag.is_some_and(is_of_string) => return Ok(scalar::plain(&text)),
        _ => return Ok(Value::String(text.into_owned())),
    };
    match (kind, value) {
        (Some("float"), Value::Integer(value)) => Ok(Value::Float(value as f64)),
        (Some("null"), value @ Value::Null)
        | (Some("bool"), value @ Value::Bool(_))
        | (Some("int"), value @ Value::Integer(_))
        | (Some("float"), value @ Value::Float(_)) => Ok(value),
        (kind, _) => Err(syntax_error::not_as_tagged(&text, kind.unwrap_or_default(), span)),
    }
}

fn height(node: &Node) -> usize {
    match &node.value {
        Value::List(items) => 1 + items.iter().map(height).max().unwrap_or(0),
        Value::Map(entries) => 1 + entries.iter().map(|entry| height(&entry.value)).max().unwrap_or(0),
        _ => 0,
    }
}

/// Makes all of a value stand at one place.
fn put_at(node: &mut Node, span: Span) {
    node.span = span;
    match &mut node.value {
        Value::List(items) => items.iter_mut().for_each(|item| put_at(item, span)),
        Value::Map(entries) => entries.iter_mut().for_each(|entry| {
            entry.key_span = span;
            put_at(&mut entry.value, span);
        }),
        _ => {}
    }
}
