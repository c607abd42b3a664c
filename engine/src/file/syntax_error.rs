//! What the parser says of a text that is not YAML, in our words and with a place in bytes.

use granit_parser::{ErrorKind, ScanError};

use super::problem::Problem;
use super::source::{SourceId, Span};
use super::tree::MAX_DEPTH;

/// The one problem of a text that could not be parsed.
pub(super) fn explain(error: &ScanError, source: SourceId, text: &str) -> Box<Problem> {
    let (kind, span) = (error.kind(), place_of(error, source, text));
    let message = kind.to_string();
    let problem = match kind {
        ErrorKind::RecursionLimitExceeded => return too_deep(span),
        ErrorKind::UnknownAnchor => return unknown_anchor(span),
        _ if message.contains("tab") => {
            Problem::error("syntax", tab_after(text, span), "a tab in the indentation", "a tab")
                .with_help("indent with spaces")
        }
        _ => Problem::error("syntax", span, format!("not YAML: {message}"), "here")
            .with_help_if(advice(&message, line_of(text, span))),
    };
    problem.into()
}

pub(super) fn second_document(span: Span) -> Box<Problem> {
    Problem::error("second-document", span, "the file contains a second document", "it begins here")
        .with_help("one file is one pipeline: remove the `---`")
        .into()
}

pub(super) fn too_deep(span: Span) -> Box<Problem> {
    let message = format!("nested deeper than {MAX_DEPTH} levels");
    Problem::error("too-deep", span, message, "the limit is reached here").into()
}

pub(super) fn too_many_values(span: Span) -> Box<Problem> {
    Problem::error("too-large", span, "the file contains too many values", "the limit is reached here").into()
}

pub(super) fn too_many_aliases(span: Span) -> Box<Problem> {
    Problem::error("too-many-aliases", span, "aliases stand for too many values", "the limit is reached here").into()
}

pub(super) fn alias_in_itself(span: Span) -> Box<Problem> {
    Problem::error("syntax", span, "an alias is inside its own anchor", "it would never end").into()
}

pub(super) fn unknown_anchor(span: Span) -> Box<Problem> {
    Problem::error("syntax", span, "the alias has no anchor", "no anchor of this name")
        .with_help("a string that begins with `*` needs quotes")
        .into()
}

pub(super) fn unknown_tag(tag: &str, span: Span) -> Box<Problem> {
    Problem::error("unknown-tag", span, format!("unknown tag `{tag}`"), "not read")
        .with_help("remove it, or put a string that begins with `!` in quotes")
        .into()
}

/// A scalar whose tag (`int`) says what it is not.
pub(super) fn not_as_tagged(text: &str, tag: &str, span: Span) -> Box<Problem> {
    Problem::error("syntax", span, format!("`{text}` is not what its tag `!!{tag}` says"), "here")
        .with_help("remove the tag")
        .into()
}

/// An event where there can be none.
pub(super) fn not_a_value(span: Span) -> Box<Problem> {
    Problem::error("syntax", span, "not YAML: a value is missing", "here").into()
}

/// Scan errors come with line and column alone, and those count characters.
fn place_of(error: &ScanError, source: SourceId, text: &str) -> Span {
    let line = error.marker().line().saturating_sub(1);
    let line_start = text.split_inclusive('\n').take(line).map(str::len).sum::<usize>().min(text.len());
    let rest = &text[line_start..];
    let offset = line_start + rest.char_indices().nth(error.marker().col()).map_or(rest.trim_end().len(), |(at, _)| at);
    let len = text[offset..].chars().next().filter(|letter| *letter != '\n').map_or(0, char::len_utf8);
    Span { source, offset, len }
}

/// The first tab at or behind the place where the parser noticed.
fn tab_after(text: &str, span: Span) -> Span {
    let line_start = text[..span.offset].rfind('\n').map_or(0, |at| at + 1);
    match text[line_start..].find('\t') {
        Some(at) => Span { offset: line_start + at, len: 1, ..span },
        None => span,
    }
}

fn line_of(text: &str, span: Span) -> &str {
    let start = text[..span.offset].rfind('\n').map_or(0, |at| at + 1);
    text[start..].lines().next().unwrap_or("")
}

/// What to write where the line has a text without quotes in which a colon stands: YAML takes that for a key.
fn unquoted(message: &str, line: &str) -> Option<String> {
    let is_of_colons = ["mapping values are not allowed", "did not find expected ','"];
    if !is_of_colons.iter().any(|known| message.contains(known)) {
        return None;
    }
    let plain = |text: &&str| !text.starts_with(['"', '\'', '{', '[', '|', '>', '$']);
    let (before, rest) = line.split_once(": ").filter(|_| !line.trim_start().starts_with('#'))?;
    let (mut key, mut text) = (before, rest);
    // The innermost key whose text has a colon of its own.
    loop {
        let name = key.rsplit(['{', ',', ' ']).next().unwrap_or(key);
        if plain(&text.trim_start())
            && let Some((first, _)) = text.split_once([',', '}']).or(Some((text, "")))
            && first.contains(": ")
        {
            let ends = text.trim_end();
            let whole = if message.contains("flow") { in_flow(ends) } else { ends };
            return Some(format!(
                "a text with `: ` in it needs quotes: `{name}: \"{}\"`",
                whole.replace('\\', "\\\\").replace('"', "\\\"")
            ));
        }
        (key, text) = text.split_once(": ")?;
    }
}

/// A text up to where the mapping in one line that holds it ends, as far as brackets tell.
fn in_flow(text: &str) -> &str {
    let mut open = 0_u32;
    for (at, letter) in text.char_indices() {
        match letter {
            '{' | '[' => open += 1,
            '}' | ']' | ',' if open == 0 => return text[..at].trim_end(),
            '}' | ']' => open -= 1,
            _ => {}
        }
    }
    text
}

fn advice(message: &str, line: &str) -> Option<String> {
    if let Some(advice) = unquoted(message, line) {
        return Some(advice);
    }
    let advice = if message.contains("flow mapping") && line.contains("${") {
        "inside `{ }` a `${…}` needs quotes: `\"${vars.x}\"`"
    } else if message.contains("mapping values are not allowed") {
        "is the indentation right, and is a string with `: ` in quotes?"
    } else if message.contains("bracket") {
        "close the bracket"
    } else if message.contains("did not find expected key") {
        "keys of one mapping begin in the same column"
    } else if message.contains("unexpected character") {
        "put the text in quotes"
    } else {
        return None;
    };
    Some(advice.to_owned())
}
