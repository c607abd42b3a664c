//! What the parser says of a text that is not YAML, in our words and with a place in bytes.

use serde_yaml::Error;
use serde_yaml::budget::BudgetBreach;

use super::problem::Problem;
use super::source::{SourceId, Span};
use super::tree::MAX_DEPTH;

/// The one problem of a text that could not be parsed.
pub(super) fn explain(error: &Error, source: SourceId, text: &str) -> Problem {
    let message = message_of(error);
    let span = place_of(error, source, text);
    let report = |code, message: String, label: &str| Problem::error(code, span, message, label);
    match inner(error) {
        Error::MultipleDocuments { .. } => {
            report("second-document", "the file contains a second document".to_owned(), "it begins here")
                .with_help("one file is one pipeline: remove the `---`")
        }
        Error::Budget { breach: BudgetBreach::Depth { .. }, .. } => too_deep(span),
        _ if message.contains("recursion limit") => too_deep(span),
        Error::Budget { .. } => {
            report("too-large", "the file contains too many values".to_owned(), "the limit is reached here")
        }
        Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. } => {
            report("too-many-aliases", "aliases stand for too many values".to_owned(), "the limit is reached here")
        }
        Error::RecursiveReferencesRequireWeakTypes { .. } => {
            report("syntax", "an alias is inside its own anchor".to_owned(), "it would never end")
        }
        Error::UnknownAnchor { .. } => report("syntax", "the alias has no anchor".to_owned(), "no anchor of this name")
            .with_help("a string that begins with `*` needs quotes"),
        _ if message.starts_with("unsupported tag") => {
            let tag = message.split('`').nth(1).unwrap_or_default();
            Problem::error("unknown-tag", tag_before(text, span, tag), format!("unknown tag `{tag}`"), "not read")
                .with_help("remove it, or put a string that begins with `!` in quotes")
        }
        _ if message.contains("tab") => {
            Problem::error("syntax", tab_after(text, span), "a tab in the indentation", "a tab")
                .with_help("indent with spaces")
        }
        _ => {
            report("syntax", format!("not YAML: {message}"), "here").with_help_if(advice(&message, line_of(text, span)))
        }
    }
}

fn too_deep(span: Span) -> Problem {
    Problem::error("too-deep", span, format!("nested deeper than {MAX_DEPTH} levels"), "the limit is reached here")
}

fn inner(error: &Error) -> &Error {
    match error.without_snippet() {
        Error::AliasError { error, .. } => inner(error),
        error => error,
    }
}

/// The parser's own message; it ends with ` at line 3, column 1`, which the span says.
fn message_of(error: &Error) -> String {
    let message = error.to_string();
    match message.find(" at line ") {
        Some(at) => message[..at].to_owned(),
        None => message,
    }
}

/// Scan errors come with line and column alone, and those count characters.
fn place_of(error: &Error, source: SourceId, text: &str) -> Span {
    let Some(location) = error.location() else { return Span { source, offset: 0, len: 0 } };
    let line = (location.line() as usize).saturating_sub(1);
    let line_start = text.split_inclusive('\n').take(line).map(str::len).sum::<usize>().min(text.len());
    let rest = &text[line_start..];
    let column = (location.column() as usize).saturating_sub(1);
    let offset = line_start + rest.char_indices().nth(column).map_or(rest.trim_end().len(), |(at, _)| at);
    let len = text[offset..].chars().next().filter(|letter| *letter != '\n').map_or(0, char::len_utf8);
    Span { source, offset, len }
}

/// The parser points behind a tag.
fn tag_before(text: &str, span: Span, tag: &str) -> Span {
    match text[..span.offset].rfind(tag) {
        Some(offset) if !tag.is_empty() => Span { offset, len: tag.len(), ..span },
        _ => span,
    }
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
