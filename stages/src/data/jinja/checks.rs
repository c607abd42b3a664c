//! What is inserted before instructions: filters that charge what the instruction is about to do, and give back what
//! they were given.

use std::fmt::{self, Write as _};

use minijinja::value::{Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};

use super::measure::{ENTRY, entries, measure, settled, text_size};
use super::meter;

// No name of a template can be one of these: they are no identifiers.
/// Of what is about to be stored under a name.
pub(super) const KEPT: &str = "=kept";
/// Of the right side of `~`, and then of the left: both are charged with the second.
pub(super) const CONCAT: [&str; 2] = ["=concat-right", "=concat-left"];
/// Of the right side of `+`, and then of the left.
pub(super) const ADD: [&str; 2] = ["=add-right", "=add-left"];
/// Of the two sides of `*`.
pub(super) const REPEAT: &str = "=repeat";
/// Of something that is looked through.
pub(super) const LOOK: &str = "=look";
/// Of two values that are compared.
pub(super) const COMPARE: &str = "=compare";
/// Of a value and its key.
pub(super) const ITEM: &str = "=item";
/// Of a value, where a slice of it begins and ends, and its step.
pub(super) const SLICE: &str = "=slice";
/// Of what a slice or a repetition gave.
pub(super) const SETTLE: &str = "=settle";
/// Of what a loop walks.
pub(super) const EACH: &str = "=each";
/// Of what is taken apart into names.
pub(super) const UNPACK: &str = "=unpack";
/// Of keys and values that become an object, and of objects that become arguments.
pub(super) const KEYS: &str = "=keys";
/// Of what a loop is asked to remember: `loop.changed(…)`.
pub(super) const REMEMBER: &str = "=remember";
/// Of lists whose entries become arguments.
pub(super) const SPLAT: &str = "=splat";

pub(super) fn install(environment: &mut Environment<'_>) {
    environment.add_filter(KEPT, kept);
    sides(environment, CONCAT, text_size);
    sides(environment, ADD, copied);
    environment.add_filter(LOOK, |value: ValueOrKwargs| {
        let value = value.into_value();
        look(&value)?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(SETTLE, settled);
    environment.add_filter(EACH, |value: Value| {
        // Characters of a text are counted before the first is taken.
        meter::looked_at(value.as_str().map_or(0, |text| text.len() as u64))?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(UNPACK, unpack);
    environment.add_filter(SPLAT, splat);
    several(environment, REPEAT, repeat);
    several(environment, COMPARE, |values| match values {
        [left, right] => compare(left, right),
        _ => Ok(()),
    });
    several(environment, ITEM, item);
    environment.add_filter(SLICE, |values: Rest<ValueOrKwargs>| -> Result<Value, Error> {
        let mut values = values.into_values();
        let Some(value) = values.first() else { return Ok(Value::from(Tuple::from(values))) };
        meter::looked_at(entries(value).saturating_mul(4))?;
        meter::made(value.as_str().map_or(0, |text| text.len() as u64))?;
        if let Some(backwards) = backwards(&values)? {
            // What is left to do takes all of it.
            values = vec![backwards, Value::from(()), Value::from(()), Value::from(())];
        }
        values.reverse();
        Ok(Value::from(Tuple::from(values)))
    });
    several(environment, KEYS, |values| values.iter().try_for_each(look));
    several(environment, REMEMBER, remember);
}

/// A slice with a step below zero, as Python has it: the library ends the process where there is nothing to take, and
/// takes what lies before the beginning for the beginning. None for every other slice, and for what has none.
fn backwards(values: &[Value]) -> Result<Option<Value>, Error> {
    let [value, start, stop, step] = values else { return Ok(None) };
    let whole = |bound: &Value| (!bound.is_none()).then(|| i64::try_from(bound.clone()).ok());
    let (Some(Some(step)), start, stop) = (whole(step), whole(start), whole(stop)) else { return Ok(None) };
    if step >= 0 || start == Some(None) || stop == Some(None) {
        return Ok(None);
    }
    let (start, stop) = (start.flatten(), stop.flatten());
    let places = |length: usize| {
        let length = length as i64;
        let within =
            |bound: i64| if bound < 0 { (bound.saturating_add(length)).max(-1) } else { bound.min(length - 1) };
        let (first, end) = (start.map_or(length - 1, within), stop.map_or(-1, within));
        let step = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
        (end + 1..=first).rev().step_by(step).map(|place| place as usize)
    };
    if let Some(text) = value.as_str() {
        let characters: Vec<char> = text.chars().collect();
        return Ok(Some(Value::from(places(characters.len()).map(|place| characters[place]).collect::<String>())));
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        return Ok(None);
    }
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        meter::steps(1)?;
        meter::made(ENTRY)?;
        items.push(item?);
    }
    let taken: Vec<Value> = places(items.len()).map(|place| items[place].clone()).collect();
    Ok(Some(if value.is_tuple() { Value::from(Tuple::from(taken)) } else { Value::from(taken) }))
}

/// The checks of the two sides of an operator that copies both. It is the most frequent one of all, and this takes no
/// memory.
fn sides(environment: &mut Environment<'_>, [right, left]: [&'static str; 2], size: fn(&Value) -> Result<u64, Error>) {
    environment.add_filter(right, move |value: ValueOrKwargs| -> Result<Value, Error> {
        let value = value.into_value();
        meter::note(size(&value)?);
        Ok(value)
    });
    environment.add_filter(left, move |value: ValueOrKwargs| -> Result<Value, Error> {
        let value = value.into_value();
        meter::made(size(&value)?.saturating_add(meter::noted()))?;
        Ok(value)
    });
}

/// The text of a value, where it is written in another way than the library writes it.
pub(crate) type Word = fn(&Value) -> Option<String>;

/// A value as text in the words of [`Word`]; itself where they have none for it.
pub(super) fn in_words(value: Value, word: Word) -> Result<Value, Error> {
    if value.as_object().is_some() {
        printed(&value)?;
    }
    Ok(word(&value).map_or(value, Value::from))
}

/// Has `~` write values in these words.
pub(super) fn write_by(environment: &mut Environment<'_>, word: Word) {
    let [right, left] = CONCAT;
    environment.add_filter(right, move |value: ValueOrKwargs| -> Result<Value, Error> {
        let value = in_words(value.into_value(), word)?;
        meter::note(text_size(&value)?);
        Ok(value)
    });
    environment.add_filter(left, move |value: ValueOrKwargs| -> Result<Value, Error> {
        let value = in_words(value.into_value(), word)?;
        meter::made(text_size(&value)?.saturating_add(meter::noted()))?;
        Ok(value)
    });
}

/// A check of several values, which gives them back in reverse: taking a list apart turns them round.
fn several(environment: &mut Environment<'_>, name: &'static str, check: fn(&[Value]) -> Result<(), Error>) {
    environment.add_filter(name, move |values: Rest<ValueOrKwargs>| -> Result<Value, Error> {
        let mut values = values.into_values();
        check(&values)?;
        values.reverse();
        Ok(Value::from(Tuple::from(values)))
    });
}

/// What is to be stored under a name: no deeper than can be dropped and printed, and worked out.
pub(super) fn kept(value: Value) -> Result<Value, Error> {
    if value.as_object().is_none() {
        return Ok(value);
    }
    let value = settled(value)?;
    let size = measure(&value)?;
    meter::made(size.values.saturating_mul(ENTRY))?;
    Ok(value)
}

/// Bytes that a copy of a text or a list takes; none for a number.
fn copied(value: &Value) -> Result<u64, Error> {
    Ok(match (value.as_str(), value.kind()) {
        (Some(text), _) => text.len() as u64,
        (None, ValueKind::Seq | ValueKind::Iterable) => entries(value).saturating_mul(ENTRY),
        (None, _) => 0,
    })
}

/// Charges looking through a value, all that it holds included.
pub(crate) fn look(value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => meter::looked_at(text.len() as u64),
        None if value.as_object().is_some() => meter::looked_at(measure(value)?.compared()),
        None => Ok(()),
    }
}

/// Charges printing a list or an object, with all that it holds.
pub(crate) fn printed(value: &Value) -> Result<(), Error> {
    meter::made(measure(value)?.printed())
}

/// Charges comparing two values.
pub(crate) fn compare(left: &Value, right: &Value) -> Result<(), Error> {
    match (left.as_str(), right.as_str()) {
        (Some(left), Some(right)) => meter::looked_at(left.len().min(right.len()) as u64),
        _ if left.as_object().is_some() && right.as_object().is_some() => {
            look(left)?;
            look(right)
        }
        _ => Ok(()),
    }
}

fn repeat(values: &[Value]) -> Result<(), Error> {
    let [left, right] = values else { return Ok(()) };
    let times = left.as_usize().or(right.as_usize()).unwrap_or(1) as u64;
    let size = copied(left)?.max(copied(right)?);
    meter::made(size.saturating_mul(times))
}

/// The loop is the first of the values; that it remembers itself would never be freed.
fn remember(values: &[Value]) -> Result<(), Error> {
    for value in values.iter().skip(1) {
        look(value)?;
        if value.as_object().is_some() && measure(value)?.has_loop {
            return Err(Error::new(ErrorKind::InvalidOperation, "`loop.changed` cannot compare loops"));
        }
    }
    Ok(())
}

fn item(values: &[Value]) -> Result<(), Error> {
    let [value, key] = values else { return Ok(()) };
    look(key)?;
    match value.kind() {
        // The characters before it are counted.
        ValueKind::String => meter::looked_at(entries(value)),
        ValueKind::Iterable if key.is_integer() => meter::steps(entries(value)),
        _ => Ok(()),
    }
}

/// All of what is unpacked is taken before its length is compared with the number of names.
fn unpack(value: Value) -> Result<Value, Error> {
    let value = settled(value)?;
    meter::made(entries(&value).saturating_mul(ENTRY))?;
    Ok(value)
}

/// The entries of lists as one list.
fn splat(lists: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let mut all = Vec::new();
    for list in lists.into_values() {
        let list = settled(list)?;
        look(&list)?;
        for item in list.try_iter()?.checked() {
            meter::made(ENTRY)?;
            all.push(item?);
        }
    }
    Ok(Value::from(all))
}

/// Prints a value where a template says so; `word` stands for a value that is printed in another way.
pub(crate) fn print(out: &mut Output, state: &mut State, value: &Value, word: Option<&str>) -> Result<(), Error> {
    let plain = matches!(state.auto_escape(), AutoEscape::None) || value.is_safe();
    match word.or_else(|| value.as_str().filter(|_| plain)) {
        Some(text) => {
            meter::made(text.len() as u64)?;
            out.write_str(text).map_err(Error::from)
        }
        None if plain => write!(Charged { out }, "{value}").map_err(Error::from),
        None => {
            meter::made(text_size(value)?.saturating_mul(6))?;
            minijinja::escape_formatter(out, state, value)
        }
    }
}

/// Charges what is written to it before it is written.
struct Charged<'a, 'b> {
    out: &'a mut Output<'b>,
}

impl fmt::Write for Charged<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // A value that holds others is printed in many small pieces.
        meter::steps(1).and_then(|()| meter::made(text.len() as u64)).map_err(|_| fmt::Error)?;
        self.out.write_str(text)
    }
}
