//! JSON: an object per line, an array of objects, objects one after the other, or an object that holds an array of
//! them.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io::{self, BufRead, Read};
use std::marker::PhantomData;
use std::ops::{ControlFlow, Range};
use std::rc::Rc;

use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::super::flaw::{Flaw, Reason};
use super::super::form::SourceFile;
use super::open::{Meter, Metered, open};
use super::{BadRecord, ReadError, Record, Visit, text};
use crate::data::number;

/// Reads an object per line; blank lines are no rows.
pub(super) fn read_lines(file: &SourceFile, range: Range<u64>, visit: &mut Visit<'_>) -> Result<u64, ReadError> {
    let mut seen = 0;
    text::for_each_line(file, |number, line| {
        if line.is_some_and(|line| line.trim_ascii().is_empty()) {
            return ControlFlow::Continue(());
        }
        if seen >= range.end {
            return ControlFlow::Break(());
        }
        seen += 1;
        if seen <= range.start {
            return ControlFlow::Continue(());
        }
        let parsed = line.ok_or_else(|| BadRecord::too_long(number)).and_then(|line| {
            let fields = parse(line).and_then(object).map_err(|flaw| BadRecord { number, flaw })?;
            Ok(Record { fields, number })
        });
        visit(parsed)
    })?;
    Ok(seen)
}

type Fields = serde_json::Map<String, Value>;

fn parse(line: &[u8]) -> Result<Value, Flaw> {
    // Checking the whole line first is cheaper than checking each of its texts.
    let line = std::str::from_utf8(line).map_err(|_| Flaw::new(Reason::NotUtf8, "it is not UTF-8"))?;
    let parse = |json: &str| -> Result<Value, Flaw> {
        serde_json::from_str(json).map_err(|error| {
            let message = error.to_string();
            let words = message.rsplit_once(" at line ").map_or(message.as_str(), |(words, _)| words);
            let hint = if error.is_eof() && opens_value(json) { ONE_PER_LINE } else { "" };
            Flaw::new(Reason::Malformed, format!("it is not JSON: {words} at column {}{hint}", error.column()))
        })
    };
    match parse(line) {
        Ok(value) if number::may_be_rounded(&value) => parse(&number::with_digits_kept(line)),
        // Python writes words for numbers that JSON has none for.
        Err(flaw) if ["NaN", "Infinity"].iter().any(|word| line.contains(word)) => {
            parse(&number::with_digits_kept(line)).map_err(|_| flaw)
        }
        parsed => parsed,
    }
}

/// What is told of a value that goes over several lines.
const ONE_PER_LINE: &str =
    "; each line is to be a JSON value, and a file of values over several lines is named `.json`";

/// Whether a line opens a value that goes on in the next one, as those of indented JSON do.
fn opens_value(line: &str) -> bool {
    line.chars().all(|letter| letter.is_ascii_whitespace() || letter == '{' || letter == '[')
}

fn object(value: Value) -> Result<Fields, Flaw> {
    match value {
        Value::Object(fields) => Ok(fields),
        Value::Array(_) => Err(Flaw::new(Reason::Malformed, "it is a list, and an object is expected")),
        _ => Err(Flaw::new(Reason::Malformed, "it is a bare value, and an object is expected")),
    }
}

/// Reads an array of objects, objects one after the other, or the array under `field`.
pub(super) fn read_values(
    file: &SourceFile,
    field: Option<&str>,
    range: Range<u64>,
    visit: &mut Visit<'_>,
) -> Result<u64, ReadError> {
    each_value(file, field, Keep::Text, &mut |number, value: Value, text| {
        if number > range.end {
            return ControlFlow::Break(());
        }
        if number <= range.start {
            return ControlFlow::Continue(());
        }
        visit(
            object(with_digits_kept(value, text))
                .map(|fields| Record { fields, number })
                .map_err(|flaw| BadRecord { number, flaw }),
        )
    })
    .map(|seen| seen.min(range.end))
}

/// A value with the digits of its great integers, which are in its text.
fn with_digits_kept(value: Value, text: &[u8]) -> Value {
    if !number::may_be_rounded(&value) {
        return value;
    }
    // Before it stands what ended the value before.
    let text = std::str::from_utf8(text).unwrap_or_default().trim_start().trim_start_matches(',');
    serde_json::from_str(&number::with_digits_kept(text)).unwrap_or(value)
}

/// Counts the objects.
pub(super) fn count_values(file: &SourceFile, field: Option<&str>) -> Result<u64, ReadError> {
    each_value(file, field, Keep::Nothing, &mut |_, _: IgnoredAny, _| ControlFlow::Continue(()))
}

/// What is kept of values beside what they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keep {
    Nothing,
    /// Their text, one at a time.
    Text,
}

/// The bytes that were read since they were last forgotten, as long as any are kept.
#[derive(Default)]
struct Kept {
    keeps: Cell<bool>,
    bytes: RefCell<Vec<u8>>,
}

impl Kept {
    fn forget(&self) {
        self.bytes.borrow_mut().clear();
    }
}

/// Keeps what is read through it.
struct Keeping<R> {
    inner: R,
    kept: Rc<Kept>,
}

impl<R: Read> Read for Keeping<R> {
    fn read(&mut self, target: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(target)?;
        if self.kept.keeps.get() {
            self.kept.bytes.borrow_mut().extend_from_slice(&target[..read]);
        }
        Ok(read)
    }
}

/// Is given a value, its number from 1, and its text behind blanks and a comma.
type VisitValue<'a, T> = dyn FnMut(u64, T, &[u8]) -> ControlFlow<()> + 'a;

/// Calls `visit` with each value, and returns how many there were.
fn each_value<T: DeserializeOwned>(
    file: &SourceFile,
    field: Option<&str>,
    keep: Keep,
    visit: &mut VisitValue<'_, T>,
) -> Result<u64, ReadError> {
    let (reader, meter) = Metered::new(open(file)?);
    let mut reader = std::io::BufReader::new(reader);
    let first = first_letter(&mut reader)?;
    let kept = Rc::new(Kept::default());
    let reader = Keeping { inner: reader, kept: Rc::clone(&kept) };
    let mut elements = Elements { visit, meter, keep, kept, seen: 0, stopped: false, item: PhantomData };
    let result = match (first, field) {
        (None, _) => Ok(()),
        (Some(_), Some(field)) => of_field(reader, field, &mut elements),
        (Some(b'['), None) => of_array(reader, &mut elements),
        (Some(_), None) => one_by_one(reader, &mut elements),
    };
    match (result, elements.stopped) {
        (Err(error), false) => Err(malformed(&error, field)),
        _ => Ok(elements.seen),
    }
}

fn malformed(error: &serde_json::Error, field: Option<&str>) -> ReadError {
    let hint = match (error.is_io(), field) {
        (true, None) => "; where the rows lie under a key of one object, name it with `field:`",
        _ => "",
    };
    let what = if error.is_syntax() || error.is_eof() { "it is not JSON: " } else { "" };
    ReadError::Malformed(format!("{what}{error}{hint}"))
}

fn of_array<T: DeserializeOwned>(reader: impl Read, elements: &mut Elements<'_, T>) -> serde_json::Result<()> {
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    elements.deserialize(&mut deserializer).and_then(|()| deserializer.end())
}

fn one_by_one<T: DeserializeOwned>(reader: impl Read, elements: &mut Elements<'_, T>) -> serde_json::Result<()> {
    elements.begin();
    for value in serde_json::Deserializer::from_reader(reader).into_iter::<T>() {
        if elements.take(value?).is_break() {
            break;
        }
    }
    Ok(())
}

fn of_field<T: DeserializeOwned>(
    reader: impl Read,
    field: &str,
    elements: &mut Elements<'_, T>,
) -> serde_json::Result<()> {
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    let visitor = Holder { field, elements };
    deserializer.deserialize_map(visitor).and_then(|()| deserializer.end())
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
    visit: &'a mut VisitValue<'a, T>,
    meter: Meter,
    keep: Keep,
    kept: Rc<Kept>,
    seen: u64,
    stopped: bool,
    item: PhantomData<T>,
}

impl<T> Elements<'_, T> {
    /// What is read from here on are values, with something between them.
    fn begin(&mut self) {
        self.kept.forget();
        self.kept.keeps.set(self.keep == Keep::Text);
    }

    fn take(&mut self, value: T) -> ControlFlow<()> {
        self.meter.restart();
        self.seen += 1;
        let flow = (self.visit)(self.seen, value, &self.kept.bytes.borrow());
        self.kept.forget();
        self.stopped = flow.is_break();
        flow
    }
}

impl<'de, T: DeserializeOwned> DeserializeSeed<'de> for &mut Elements<'_, T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, T: DeserializeOwned> Visitor<'de> for &mut Elements<'_, T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<(), A::Error> {
        self.begin();
        while let Some(value) = sequence.next_element()? {
            if self.take(value).is_break() {
                return Err(serde::de::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}

/// How many keys of an object a message names.
const KEYS_NAMED: usize = 8;

/// An object that holds the array under one of its keys.
struct Holder<'a, 'b, T> {
    field: &'a str,
    elements: &'a mut Elements<'b, T>,
}

impl<'de, T: DeserializeOwned> Visitor<'de> for Holder<'_, '_, T> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the rows under `{}`", self.field)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut others = Vec::new();
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == self.field && !found {
                self.elements.meter.restart();
                map.next_value_seed(&mut *self.elements)?;
                found = true;
            } else {
                // It is passed over, however long it is.
                self.elements.meter.suspend();
                self.elements.kept.keeps.set(false);
                map.next_value::<IgnoredAny>()?;
                if others.len() < KEYS_NAMED {
                    others.push(key);
                }
            }
        }
        if found {
            return Ok(());
        }
        let others: Vec<String> = others.iter().map(|key| format!("`{key}`")).collect();
        let message = format!("the object has no key `{}`; it has {}", self.field, others.join(", "));
        Err(serde::de::Error::custom(message))
    }
}
