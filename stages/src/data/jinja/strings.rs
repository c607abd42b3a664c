//! Python's methods of strings that minijinja lacks, or has with fewer arguments.

use minijinja::value::{Tuple, from_args};
use minijinja::{Error, ErrorKind, Value};

use super::methods::is_space;

/// What a method returns; `None` if it is none of these.
pub(super) fn call(text: &str, method: &str, values: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "find" | "rfind" => Value::from(position(text, method, values)?.unwrap_or(-1)),
        "index" | "rindex" => {
            let missing = || refused(format!("`{method}` looks for what the string does not contain"));
            Value::from(position(text, method, values)?.ok_or_else(missing)?)
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(values)?;
            Value::from(Tuple::from(partition(text, method, separator)?.map(Value::from)))
        }
        "rsplit" => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(values)?;
            let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
            rsplit(text, separator, most)?.into_iter().map(Value::from).collect()
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(values)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(values)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "center" | "ljust" | "rjust" => Value::from(padded(text, method, values)?),
        "zfill" => {
            let (width,): (&Value,) = from_args(values)?;
            Value::from(zero_filled(text, columns(width)?))
        }
        "expandtabs" => {
            let size = match values {
                [] => TAB,
                values => columns(from_args::<(&Value,)>(values)?.0)?,
            };
            Value::from(with_spaces(text, size))
        }
        "swapcase" => {
            let () = from_args(values)?;
            Value::from(swapped(text))
        }
        "casefold" => {
            let () = from_args(values)?;
            Value::from(folded(text))
        }
        _ => return Ok(None),
    }))
}

/// The default number of columns from one tab stop to the next.
pub(super) const TAB: usize = 8;

fn refused(problem: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem)
}

/// A number of columns; one below 0 is 0.
fn columns(value: &Value) -> Result<usize, Error> {
    match value.as_usize() {
        Some(columns) => Ok(columns),
        None if value.as_i64().is_some() => Ok(0),
        None => Err(refused(format!("an integer of 64 bits is expected, not {}", value.kind()))),
    }
}

/// Where a string is in the characters of another from `start` to `end`, counted in characters.
fn position(text: &str, method: &str, values: &[Value]) -> Result<Option<i64>, Error> {
    let (sought, start, end): (&str, Option<i64>, Option<i64>) = from_args(values)?;
    let length = text.chars().count() as i64;
    let from_begin = |place: i64| if place < 0 { place.saturating_add(length).max(0) } else { place };
    let (start, end) = (from_begin(start.unwrap_or(0)), from_begin(end.unwrap_or(length)).min(length));
    if start > end {
        return Ok(None);
    }
    let byte = |place: i64| match place {
        0 => 0,
        place if place == length => text.len(),
        place => text.char_indices().nth(place as usize).map_or(text.len(), |(byte, _)| byte),
    };
    let within = &text[byte(start)..byte(end)];
    let found = if method.starts_with('r') { within.rfind(sought) } else { within.find(sought) };
    Ok(found.map(|byte| start + within[..byte].chars().count() as i64))
}

/// What is before a separator, the separator, and what is behind it.
fn partition<'a>(text: &'a str, method: &str, separator: &'a str) -> Result<[&'a str; 3], Error> {
    if separator.is_empty() {
        return Err(refused("the separator is empty"));
    }
    let is_last = method == "rpartition";
    let parts = if is_last { text.rsplit_once(separator) } else { text.split_once(separator) };
    Ok(match parts {
        Some((before, behind)) => [before, separator, behind],
        None if is_last => ["", "", text],
        None => [text, "", ""],
    })
}

/// The parts of a string, from its end split at most `most` times.
fn rsplit<'a>(text: &'a str, separator: Option<&str>, most: usize) -> Result<Vec<&'a str>, Error> {
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(refused("the separator is empty")),
        Some(separator) => text.rsplitn(most.saturating_add(1), separator).collect(),
        None => last_words(text, most),
    };
    parts.reverse();
    Ok(parts)
}

/// The last `most` words of a string, from its end, and what is before them.
fn last_words(text: &str, most: usize) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        let last = rest.rsplit_once(is_space).filter(|_| words.len() < most);
        let (before, word) = last.unwrap_or(("", rest));
        words.push(word);
        rest = before.trim_end_matches(is_space);
    }
    words
}

/// A string of at least a width, filled up before it, behind it, or on both sides.
fn padded(text: &str, method: &str, values: &[Value]) -> Result<String, Error> {
    let (width, fill): (&Value, Option<&str>) = from_args(values)?;
    let mut letters = fill.unwrap_or(" ").chars();
    let (Some(fill), None) = (letters.next(), letters.next()) else {
        return Err(refused("the fill character has to be one character"));
    };
    let width = columns(width)?;
    let missing = width.saturating_sub(text.chars().count());
    let before = match method {
        "ljust" => 0,
        "rjust" => missing,
        // As in CPython: of an odd number the greater half is before the string if the width is odd.
        _ => missing / 2 + (missing & width & 1),
    };
    let filled = |count: usize| std::iter::repeat_n(fill, count);
    Ok(filled(before).chain(text.chars()).chain(filled(missing - before)).collect())
}

/// A number of at least a width, with zeros behind its sign.
fn zero_filled(text: &str, width: usize) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
    format!("{sign}{}{digits}", "0".repeat(missing))
}

/// A string with spaces in place of its tabs.
fn with_spaces(text: &str, size: usize) -> String {
    let (mut spaced, mut column) = (String::with_capacity(text.len()), 0);
    for letter in text.chars() {
        match letter {
            '\t' => {
                let missing = if size == 0 { 0 } else { size - column % size };
                spaced.extend(std::iter::repeat_n(' ', missing));
                column += missing;
            }
            letter => {
                spaced.push(letter);
                column = if matches!(letter, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    spaced
}

/// A string with its letters in the other case.
fn swapped(text: &str) -> String {
    let mut swapped = String::with_capacity(text.len());
    for letter in text.chars() {
        if letter.is_uppercase() {
            swapped.extend(letter.to_lowercase());
        } else if letter.is_lowercase() {
            swapped.extend(letter.to_uppercase());
        } else {
            swapped.push(letter);
        }
    }
    swapped
}

/// A string for comparisons without case.
fn folded(text: &str) -> String {
    let mut folded = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            'ı' => folded.push(letter),
            'ẞ' => folded.push_str("ss"),
            // Cherokee is folded to its capitals.
            '\u{13a0}'..='\u{13fd}' | '\u{ab70}'..='\u{abbf}' => folded.extend(letter.to_uppercase()),
            _ => folded.extend(letter.to_uppercase().flat_map(char::to_lowercase)),
        }
    }
    folded
}
