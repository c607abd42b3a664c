//! Python's methods on texts, lists and objects, with their price.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::checks::look;
use super::filters::{CALL, cased, formatted, lines, listed_text, materialized, replaced, split, trimmed};
use super::measure::{ENTRY, entries, settled};
use super::{meter, strings};

pub(super) fn call(state: &mut State<'_, '_>, value: &Value, method: &str, values: &[Value]) -> Result<Value, Error> {
    meter::steps(CALL)?;
    let values = values.iter().cloned().map(settled).collect::<Result<Vec<Value>, Error>>()?;
    let values = if value.as_str().is_some() { in_order(method, values)? } else { values };
    charge(value, method, &values)?;
    if let Some(text) = value.as_str()
        && let Some(result) = strings::call(text, method, &values)?
    {
        return Ok(result);
    }
    if let ("index", ValueKind::Seq, [sought]) = (method, value.kind(), values.as_slice()) {
        return index(value, sought);
    }
    match (method, value.as_str(), values.as_slice()) {
        ("title", Some(text), []) => Ok(title(text).into()),
        ("splitlines", Some(text), [] | [_]) => Ok(lines_of(text, values.first().is_some_and(Value::is_true)).into()),
        ("strip", Some(text), []) => Ok(text.trim_matches(is_space).into()),
        ("lstrip", Some(text), []) => Ok(text.trim_start_matches(is_space).into()),
        ("rstrip", Some(text), []) => Ok(text.trim_end_matches(is_space).into()),
        ("split", Some(text), []) => {
            Ok(text.split(is_space).filter(|word| !word.is_empty()).map(Value::from).collect())
        }
        _ => materialized(pycompat::unknown_method_callback(state, value, method, &values)?),
    }
}

/// The arguments of a method of strings, those that were given by their names in their places.
fn in_order(method: &str, values: Vec<Value>) -> Result<Vec<Value>, Error> {
    let names: &[&str] = match method {
        "split" | "rsplit" => &["sep", "maxsplit"],
        "expandtabs" => &["tabsize"],
        _ => return Ok(values),
    };
    if !values.last().is_some_and(Value::is_kwargs) {
        return Ok(values);
    }
    let (given, named): (&[Value], Kwargs) = from_args(&values)?;
    let mut all = given.to_vec();
    for name in names.iter().skip(given.len()) {
        all.push(named.get::<Option<Value>>(name)?.unwrap_or_else(|| Value::from(())));
    }
    named.assert_all_used()?;
    Ok(all)
}

/// What Python takes for white space: four separators more than Unicode.
pub(crate) fn is_space(letter: char) -> bool {
    letter.is_whitespace() || matches!(letter, '\u{1c}'..='\u{1f}')
}

/// Each letter behind none in upper case, the others in lower case: `a_b` is `A_B`.
fn title(text: &str) -> String {
    let mut is_behind_letter = false;
    let mut titled = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_behind_letter {
            titled.extend(letter.to_lowercase())
        } else {
            titled.extend(letter.to_uppercase())
        }
        is_behind_letter = letter.is_lowercase() || letter.is_uppercase();
    }
    titled
}

/// Whether Python takes a character for the end of a line.
pub(super) fn ends_line(letter: char) -> bool {
    matches!(letter, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// The lines of a text.
fn lines_of(text: &str, keeps_ends: bool) -> Vec<Value> {
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends_line) {
        let length =
            if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(0, char::len_utf8) };
        lines.push(Value::from(&rest[..if keeps_ends { at + length } else { at }]));
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    lines
}

/// Where a list has a value first, as Python's `list.index`.
fn index(list: &Value, sought: &Value) -> Result<Value, Error> {
    let position = list.try_iter()?.position(|item| item == *sought);
    position.map(Value::from).ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, format!("`index` looks for {sought:?}, which the list does not have"))
    })
}

fn charge(value: &Value, method: &str, values: &[Value]) -> Result<(), Error> {
    let Some(text) = value.as_str() else {
        values.iter().try_for_each(look)?;
        return match method {
            "keys" | "values" | "items" => meter::made(entries(value).saturating_mul(2 * ENTRY)),
            "count" | "index" => look(value),
            _ => Ok(()),
        };
    };
    let whole: Vec<Value> = std::iter::once(value).chain(values).cloned().collect();
    match method {
        "upper" | "lower" | "title" | "capitalize" | "swapcase" | "casefold" => cased(&whole),
        "replace" => replaced(&whole),
        "split" | "rsplit" | "partition" | "rpartition" => split(&whole),
        "splitlines" => lines(&whole),
        "format" => formatted(&whole),
        "strip" | "lstrip" | "rstrip" => trimmed(&whole),
        "center" | "ljust" | "rjust" | "zfill" => {
            let width = values.first().and_then(Value::as_usize).unwrap_or(0) as u64;
            // A character has four bytes at most.
            meter::made(width.saturating_mul(4).saturating_add(text.len() as u64))
        }
        "expandtabs" => {
            meter::looked_at(text.len() as u64)?;
            let size = values.first().map_or(Some(strings::TAB), Value::as_usize).unwrap_or(0) as u64;
            let tabs = text.matches('\t').count() as u64;
            meter::made(tabs.saturating_mul(size).saturating_add(text.len() as u64))
        }
        "removeprefix" | "removesuffix" => {
            values.iter().try_for_each(look)?;
            meter::made(text.len() as u64)
        }
        "join" => {
            let Some(list) = values.first() else { return Ok(()) };
            let between = entries(list).saturating_mul(text.len() as u64);
            meter::made(between.saturating_add(listed_text(list)?))
        }
        // It looks no further than what it looks for is long.
        "startswith" | "endswith" => values.iter().try_for_each(look),
        _ => {
            meter::looked_at(text.len() as u64)?;
            values.iter().try_for_each(look)
        }
    }
}
