//! How large and how deep a value is, and lists in place of what is worked out anew each time it is walked.

use std::fmt;
use std::sync::{Arc, OnceLock};

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, Value};

use super::meter::{self, Limit};
use super::space::Space;

/// How deep lists and objects may be nested in what a name holds. Dropping, printing and comparing a value take the
/// stack once per level; JSON is not read deeper than 128.
pub(super) const DEEPEST: usize = 200;

/// Bytes that an entry of a list takes, with its share of what holds it.
pub(super) const ENTRY: u64 = 32;

/// Bytes that a value takes that is printed and no text.
const PRINTED: u64 = 48;

/// How large a value is, all that it holds included; what it holds twice counts twice.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Size {
    /// Bytes of the texts in it.
    pub text: u64,
    /// Values in it, itself included.
    pub values: u64,
    /// How deep it is nested: 1 for a list of numbers.
    pub depth: usize,
    /// The number of the newest namespace in it, 0 where there is none.
    pub newest_space: u64,
    /// Whether a loop's own variable is in it, which remembers what it walks.
    pub has_loop: bool,
}

impl Size {
    /// Bytes that it takes at most when it is printed: with escapes, quotes, brackets and commas.
    pub(super) fn printed(self) -> u64 {
        self.text.saturating_mul(6).saturating_add(self.values.saturating_mul(PRINTED))
    }

    /// Bytes that a copy of it takes, all that it holds included.
    pub(super) fn copied(self) -> u64 {
        self.text.saturating_add(self.values.saturating_mul(2 * ENTRY))
    }

    /// Bytes that are looked through when it is compared or hashed.
    pub(super) fn compared(self) -> u64 {
        self.text.saturating_add(self.values.saturating_mul(ENTRY))
    }

    fn with(&mut self, part: Self) {
        self.text = self.text.saturating_add(part.text);
        self.values = self.values.saturating_add(part.values);
        self.depth = self.depth.max(part.depth + 1);
        self.newest_space = self.newest_space.max(part.newest_space);
        self.has_loop |= part.has_loop;
    }
}

/// The size of a value. Each value in it costs a step, so that one that holds itself many times over is not walked to
/// the end.
pub(super) fn measure(value: &Value) -> Result<Size, Error> {
    measure_at(value, 0)
}

fn measure_at(value: &Value, depth: usize) -> Result<Size, Error> {
    meter::steps(1)?;
    if let Some(text) = value.as_str() {
        return Ok(Size { text: text.len() as u64, values: 1, ..Size::default() });
    }
    let Some(object) = value.as_object() else { return Ok(Size { values: 1, ..Size::default() }) };
    if depth >= DEEPEST {
        return Err(meter::meet(Limit::Depth));
    }
    if let Some(size) = object.downcast_ref::<Settled>().and_then(|settled| settled.size.get().copied()) {
        return if depth + size.depth > DEEPEST { Err(meter::meet(Limit::Depth)) } else { Ok(size) };
    }
    if object.type_name().ends_with("::Loop") {
        return Ok(Size { values: 1, depth: 1, has_loop: true, ..Size::default() });
    }
    let mut size = Size { values: 1, ..Size::default() };
    match object.repr() {
        ObjectRepr::Map => {
            for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                size.with(measure_at(&key, depth + 1)?);
                size.with(measure_at(&value, depth + 1)?);
            }
        }
        ObjectRepr::Seq | ObjectRepr::Iterable => {
            for item in object.try_iter().into_iter().flatten() {
                size.with(measure_at(&item, depth + 1)?);
            }
        }
        _ => {}
    }
    if let Some(space) = object.downcast_ref::<Space>() {
        size.newest_space = size.newest_space.max(space.number());
    }
    // A namespace changes, and with it what holds it.
    if size.newest_space == 0
        && let Some(settled) = object.downcast_ref::<Settled>()
    {
        settled.size.get_or_init(|| size);
    }
    Ok(size)
}

/// Bytes of a value as text: exactly those of a text, more than enough for what is printed.
pub(super) fn text_size(value: &Value) -> Result<u64, Error> {
    match value.as_str() {
        Some(text) => Ok(text.len() as u64),
        None if value.as_object().is_some() => Ok(measure(value)?.printed()),
        None => Ok(PRINTED),
    }
}

/// Entries of a value that is walked: characters of a text.
pub(super) fn entries(value: &Value) -> u64 {
    match value.as_str() {
        Some(text) => text.len() as u64,
        None => value.len().unwrap_or(0) as u64,
    }
}

/// A list in place of what is worked out anew each time it is walked: a slice of a slice of a slice is as deep in the
/// stack as there are slices, and as long as it likes. Other values as they are.
pub(super) fn settled(value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable || value.downcast_object_ref::<Settled>().is_some() {
        return Ok(value);
    }
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        meter::steps(1)?;
        meter::made(ENTRY)?;
        items.push(item?);
    }
    Ok(Value::from_object(Settled { items, size: OnceLock::new() }))
}

/// A value that is looked like an iterable, and is a list.
pub(super) struct Settled {
    items: Vec<Value>,
    /// Known once it was measured, unless it holds a namespace.
    size: OnceLock<Size>,
}

impl fmt::Debug for Settled {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.items.fmt(formatter)
    }
}

impl Object for Settled {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }
}
