//! JSON: an object per line, an array of objects, or objects one after the other.

use std::fmt;
use std::io::BufRead;
use std::ops::{ControlFlow, Range};
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::Value;

use super::{BadRecord, ReadError, Record, Visit, open, text};

/// Reads an object per line; blank lines are no rows.
pub(super) fn read_lines(path: &Path, range: Range<u64>, visit: &mut Visit<'_>) -> Result<u64, ReadError> {
    let mut seen = 0;
    text::for_each_line(path, |number, line| {
        if line.trim_ascii().is_empty() {
            return ControlFlow::Continue(());
        }
        if seen >= range.end {
            return ControlFlow::Break(());
        }
        seen += 1;
        if seen <= range.start {
            return ControlFlow::Continue(());
        }
        let parsed = serde_json::from_slice::<Value>(line).map_err(|error| problem(&error));
        visit(
            parsed
                .and_then(object)
                .map(|fields| Record { fields, number })
                .map_err(|problem| BadRecord { number, problem }),
        )
    })?;
    Ok(seen)
}

type Fields = serde_json::Map<String, Value>;

fn object(value: Value) -> Result<Fields, String> {
    match value {
        Value::Object(fields) => Ok(fields),
        Value::Array(_) => Err("it is a list, and an object is expected".to_owned()),
        _ => Err("it is a bare value, and an object is expected".to_owned()),
    }
}

/// The message of a JSON error in a line: the position inside it is a column.
fn problem(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let words = message.rsplit_once(" at line ").map_or(message.as_str(), |(words, _)| words);
    format!("it is not JSON: {words} at column {}", error.column())
}

/// Reads an array of objects, or objects one after the other.
pub(super) fn read_values(path: &Path, range: Range<u64>, visit: &mut Visit<'_>) -> Result<u64, ReadError> {
    each_value(path, &mut |number, value: Value| {
        if number > range.end {
            return ControlFlow::Break(());
        }
        if number <= range.start {
            return ControlFlow::Continue(());
        }
        visit(object(value).map(|fields| Record { fields, number }).map_err(|problem| BadRecord { number, problem }))
    })
    .map(|seen| seen.min(range.end))
}

/// Counts the objects.
pub(super) fn count_values(path: &Path) -> Result<u64, ReadError> {
    each_value(path, &mut |_, _: IgnoredAny| ControlFlow::Continue(()))
}

/// Calls `visit` with each value and its number from 1, and returns how many there were.
fn each_value<T: serde::de::DeserializeOwned>(
    path: &Path,
    visit: &mut dyn FnMut(u64, T) -> ControlFlow<()>,
) -> Result<u64, ReadError> {
    let mut reader = open(path)?;
    let malformed = |error: serde_json::Error| ReadError::Malformed(format!("it is not JSON: {error}"));
    if first_letter(&mut reader)? != Some(b'[') {
        let mut seen = 0;
        for value in serde_json::Deserializer::from_reader(reader).into_iter::<T>() {
            seen += 1;
            if visit(seen, value.map_err(malformed)?).is_break() {
                break;
            }
        }
        return Ok(seen);
    }
    let mut elements = Elements { visit, seen: 0, stopped: false, item: std::marker::PhantomData };
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    let result = (&mut elements).deserialize(&mut deserializer).and_then(|()| deserializer.end());
    match (result, elements.stopped) {
        (Err(error), false) => Err(malformed(error)),
        _ => Ok(elements.seen),
    }
}

/// The first byte that is no white space; what comes before it is taken.
fn first_letter(reader: &mut impl BufRead) -> Result<Option<u8>, ReadError> {
    loop {
        let buffer = reader.fill_buf()?;
        if buffer.is_empty() {
            return Ok(None);
        }
        let blank = buffer.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let found = buffer.get(blank).copied();
        reader.consume(blank);
        if found.is_some() {
            return Ok(found);
        }
    }
}

/// Takes an array element by element, so that it is never in memory as a whole.
struct Elements<'a, T> {
    visit: &'a mut dyn FnMut(u64, T) -> ControlFlow<()>,
    seen: u64,
    stopped: bool,
    item: std::marker::PhantomData<T>,
}

impl<'de, T: serde::de::DeserializeOwned> DeserializeSeed<'de> for &mut Elements<'_, T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: serde::de::DeserializeOwned> Visitor<'de> for &mut Elements<'_, T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<(), A::Error> {
        while let Some(value) = sequence.next_element()? {
            self.seen += 1;
            if (self.visit)(self.seen, value).is_break() {
                self.stopped = true;
                return Err(serde::de::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}
