//! Truth values, numbers and texts.

use serde_json::json;

use super::{Json, KeyWriter, Parameter, Reader};
use crate::file::tree::{Node, Value};

impl Parameter for bool {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match &node.value {
            Value::Bool(value) => Some(*value),
            Value::String(word) => {
                reader.wrong_type(node, "true or false");
                if let (Some(meant), Some(problem)) = (truth(word), reader.problems.last_mut()) {
                    problem.help = Some(match word.as_str() {
                        "true" | "false" => "write it without quotes".to_owned(),
                        _ => format!("write {meant}: in YAML 1.2 `{word}` is a string"),
                    });
                }
                None
            }
            _ => {
                reader.wrong_type(node, "true or false");
                None
            }
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(self.to_string());
    }

    fn schema() -> Json {
        json!({ "type": "boolean" })
    }
}

macro_rules! whole_number {
    ($($ty:ty),*) => {$(
        impl Parameter for $ty {
            fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
                let whole = read_integer(node, reader)?;
                let value = <$ty>::try_from(whole).ok();
                if value.is_none() {
                    not_in(node, reader, &<$ty>::MIN, &<$ty>::MAX);
                }
                value
            }

            fn write_key(&self, key: &mut KeyWriter<'_>) {
                key.value(self.to_string());
            }

            fn schema() -> Json {
                if <$ty>::MIN == 0 { json!({ "type": "integer", "minimum": 0 }) } else { json!({ "type": "integer" }) }
            }
        }
    )*};
}

whole_number!(u32, u64, usize, i64, i32);

macro_rules! number {
    ($($ty:ty),*) => {$(
        impl Parameter for $ty {
            fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
                let value = read_number(node, reader)? as $ty;
                if !value.is_finite() {
                    reader.bad_value(node, "not a finite number", "a finite number");
                    return None;
                }
                Some(value)
            }

            fn write_key(&self, key: &mut KeyWriter<'_>) {
                // The shortest text that reads back as the same number; -0 and 0 are one value to a user.
                key.value(format!("{:?}", if *self == 0.0 { 0.0 } else { *self }));
            }

            fn schema() -> Json {
                json!({ "type": "number" })
            }
        }
    )*};
}

number!(f64, f32);

impl Parameter for String {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        read_text(node, reader, "a string").map(str::to_owned)
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(Json::from(self.as_str()).to_string());
    }

    fn schema() -> Json {
        json!({ "type": "string" })
    }
}

/// The text of a string; `expected` says what the string is for.
pub(super) fn read_text<'a>(node: &'a Node, reader: &mut Reader, expected: &str) -> Option<&'a str> {
    let Value::String(text) = &node.value else {
        reader.wrong_type(node, expected);
        return None;
    };
    Some(text)
}

fn read_integer(node: &Node, reader: &mut Reader) -> Option<i64> {
    match &node.value {
        Value::Integer(value) => return Some(*value),
        Value::Float(value) if value.fract() == 0.0 && value.abs() < 1e15 => {
            reader.wrong_type(node, "an integer");
            help(reader, format!("write {value}"));
        }
        _ => {
            reader.wrong_type(node, "an integer");
            unquote(node, reader, |text| text.parse::<i64>().is_ok());
        }
    }
    None
}

fn read_number(node: &Node, reader: &mut Reader) -> Option<f64> {
    match &node.value {
        Value::Integer(value) => Some(*value as f64),
        Value::Float(value) => Some(*value),
        _ => {
            reader.wrong_type(node, "a number");
            unquote(node, reader, |text| text.parse::<f64>().is_ok());
            None
        }
    }
}

/// A number in quotes is the usual reason for a string where a number should be.
fn unquote(node: &Node, reader: &mut Reader, is_number: impl Fn(&str) -> bool) {
    if matches!(&node.value, Value::String(text) if is_number(text)) {
        help(reader, "write it without quotes".to_owned());
    }
}

fn not_in(node: &Node, reader: &mut Reader, least: &dyn std::fmt::Display, most: &dyn std::fmt::Display) {
    let expected = match &node.value {
        Value::Integer(value) if *value < 0 => format!("at least {least}"),
        _ => format!("at most {most}"),
    };
    reader.out_of_range(node, &expected);
}

fn help(reader: &mut Reader, text: String) {
    if let Some(problem) = reader.problems.last_mut() {
        problem.help = Some(text);
    }
}

fn truth(word: &str) -> Option<bool> {
    match word.to_ascii_lowercase().as_str() {
        "yes" | "on" | "true" | "y" => Some(true),
        "no" | "off" | "false" | "n" => Some(false),
        _ => None,
    }
}
