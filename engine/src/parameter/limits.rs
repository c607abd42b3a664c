//! The range of a number: checked where it is read, said in the problem, written into the schema.

use serde_json::{Map, Number};

use super::{Json, Reader, dotted};
use crate::file::tree::{Entry, Node, Value};

/// One end of a range.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Inclusive(f64),
    Exclusive(f64),
}

/// Between which ends a number lies; a field that holds several numbers has them all checked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    lower: Option<End>,
    upper: Option<End>,
}

impl Limits {
    pub const NONE: Self = Self { lower: None, upper: None };

    /// `value` or more.
    #[must_use]
    pub const fn at_least(self, value: f64) -> Self {
        Self { lower: Some(End::Inclusive(value)), ..self }
    }

    /// More than `value`.
    #[must_use]
    pub const fn above(self, value: f64) -> Self {
        Self { lower: Some(End::Exclusive(value)), ..self }
    }

    /// `value` or less.
    #[must_use]
    pub const fn at_most(self, value: f64) -> Self {
        Self { upper: Some(End::Inclusive(value)), ..self }
    }

    /// Less than `value`.
    #[must_use]
    pub const fn below(self, value: f64) -> Self {
        Self { upper: Some(End::Exclusive(value)), ..self }
    }

    /// Reports each number in `node` that is outside; whether there was none.
    pub fn check(&self, node: &Node, reader: &mut Reader) -> bool {
        let number = match &node.value {
            _ if *self == Self::NONE => return true,
            Value::Integer(value) => *value as f64,
            Value::Float(value) => *value,
            Value::List(items) => {
                let of_item = |(index, item): (usize, &Node)| {
                    reader.under(format!("{}[{index}]", reader.path), |reader| self.check(item, reader))
                };
                return all(items.iter().enumerate().map(of_item));
            }
            Value::Map(entries) => {
                let of_entry = |entry: &Entry| {
                    reader.under(dotted(&reader.path, &entry.key), |reader| self.check(&entry.value, reader))
                };
                return all(entries.iter().map(of_entry));
            }
            Value::Null | Value::Bool(_) | Value::String(_) => return true,
        };
        let fine = self.contain(number);
        if !fine {
            reader.out_of_range(node, &self.describe());
        }
        fine
    }

    /// Writes the limits into the schema of a number, or of those in a list or mapping.
    pub(super) fn into_schema(self, schema: &mut Map<String, Json>) {
        for inner in ["items", "additionalProperties"] {
            if let Some(inner) = schema.get_mut(inner).and_then(Json::as_object_mut) {
                return self.into_schema(inner);
            }
        }
        if let Some(end) = self.lower {
            let (name, value) = match end {
                End::Inclusive(value) => ("minimum", value),
                End::Exclusive(value) => ("exclusiveMinimum", value),
            };
            schema.insert(name.to_owned(), number(value));
        }
        if let Some(end) = self.upper {
            let (name, value) = match end {
                End::Inclusive(value) => ("maximum", value),
                End::Exclusive(value) => ("exclusiveMaximum", value),
            };
            schema.insert(name.to_owned(), number(value));
        }
    }

    fn contain(&self, number: f64) -> bool {
        let above = match self.lower {
            None => true,
            Some(End::Inclusive(value)) => number >= value,
            Some(End::Exclusive(value)) => number > value,
        };
        let below = match self.upper {
            None => true,
            Some(End::Inclusive(value)) => number <= value,
            Some(End::Exclusive(value)) => number < value,
        };
        above && below
    }

    fn describe(&self) -> String {
        let lower = self.lower.map(|end| match end {
            End::Inclusive(value) => format!("at least {value}"),
            End::Exclusive(value) => format!("above {value}"),
        });
        let upper = self.upper.map(|end| match end {
            End::Inclusive(value) => format!("at most {value}"),
            End::Exclusive(value) => format!("below {value}"),
        });
        [lower, upper].into_iter().flatten().collect::<Vec<_>>().join(" and ")
    }
}

/// Whether all hold; every one is looked at, also behind the first that does not.
fn all(results: impl Iterator<Item = bool>) -> bool {
    results.filter(|fine| !fine).count() == 0
}

/// A number of a schema: whole where it is whole, as a person would write it.
fn number(value: f64) -> Json {
    if value.fract() == 0.0 && value.abs() < 1e15 {
        return Json::from(value as i64);
    }
    Number::from_f64(value).map_or(Json::Null, Json::Number)
}
