//! What chat templates expect of Python: how values print, `tojson` and `strftime`.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, Output, State};

use crate::jinja;

/// Gives templates what they expect of Python.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.set_formatter(format);
    environment.add_filter("tojson", |value: &Value, kwargs: Kwargs| {
        let arguments: Value = kwargs.clone().into();
        jinja::priced_as_json(&[value.clone(), arguments])?;
        tojson(value, kwargs)
    });
    environment.add_function("strftime_now", |pattern: &str| -> Result<String, Error> {
        // Two letters of a pattern become ten at most.
        jinja::made(pattern.len() as u64 * 5)?;
        Ok(strftime(pattern))
    });
}

/// Prints a value as Python does: `None`, `True`, `False`.
fn format(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let word = match value.kind() {
        ValueKind::None => Some("None"),
        ValueKind::Bool if value.is_true() => Some("True"),
        ValueKind::Bool => Some("False"),
        _ => None,
    };
    jinja::print(out, state, value, word)
}

/// `json.dumps` as transformers calls it: no HTML escapes, a space after `,` and `:`, keys in their order, unless
/// `ensure_ascii`, `indent`, `separators` or `sort_keys` say otherwise.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let separators: Option<Value> = kwargs.get("separators")?;
    let separator = |index: usize| {
        let given = separators.as_ref()?.get_item_by_index(index).ok()?;
        given.as_str().map(str::to_owned)
    };
    let between_items = separator(0).unwrap_or_else(|| if indent.is_some() { "," } else { ", " }.to_owned());
    let after_key = separator(1).unwrap_or_else(|| ": ".to_owned());
    let style = Style {
        indent,
        between_items,
        after_key,
        ensure_ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let json = serde_json::to_value(value)
        .map_err(|error| Error::new(minijinja::ErrorKind::BadSerialization, error.to_string()))?;
    let mut text = String::new();
    style.write(&mut text, &json, 0);
    Ok(text)
}

/// How JSON is laid out.
struct Style {
    indent: Option<usize>,
    between_items: String,
    after_key: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Style {
    fn write(&self, text: &mut String, value: &serde_json::Value, depth: usize) {
        use serde_json::Value as Json;
        match value {
            Json::Array(items) => self.write_all(text, ['[', ']'], items.iter().map(|item| (None, item)), depth),
            Json::Object(map) => {
                let mut entries: Vec<_> = map.iter().map(|(key, value)| (Some(key.as_str()), value)).collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.write_all(text, ['{', '}'], entries.into_iter(), depth);
            }
            Json::String(string) => self.write_string(text, string),
            Json::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(float) => text.push_str(&float_repr(float)),
                None => text.push_str(&number.to_string()),
            },
            Json::Null | Json::Bool(_) => text.push_str(&value.to_string()),
        }
    }

    fn write_all<'a>(
        &self,
        text: &mut String,
        brackets: [char; 2],
        entries: impl ExactSizeIterator<Item = (Option<&'a str>, &'a serde_json::Value)>,
        depth: usize,
    ) {
        let empty = entries.len() == 0;
        text.push(brackets[0]);
        for (number, (key, value)) in entries.enumerate() {
            if number > 0 {
                text.push_str(&self.between_items);
            }
            self.new_line(text, depth + 1);
            if let Some(key) = key {
                self.write_string(text, key);
                text.push_str(&self.after_key);
            }
            self.write(text, value, depth + 1);
        }
        if !empty {
            self.new_line(text, depth);
        }
        text.push(brackets[1]);
    }

    fn new_line(&self, text: &mut String, depth: usize) {
        if let Some(indent) = self.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn write_string(&self, text: &mut String, string: &str) {
        let quoted = serde_json::Value::from(string).to_string();
        if !self.ensure_ascii {
            return text.push_str(&quoted);
        }
        for letter in quoted.chars() {
            if letter.is_ascii() {
                text.push(letter);
            } else {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    // Writing to a text cannot fail.
                    let _ = write!(text, "\\u{unit:04x}");
                }
            }
        }
    }
}

/// A float as Python writes it: the shortest digits that read back as it, with an exponent of two digits below 1e-4 and
/// from 1e16.
fn float_repr(float: f64) -> String {
    let shortest = format!("{float:e}");
    let Some((digits, exponent)) = shortest.split_once('e') else { return shortest };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{float}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// `strftime_now`, with a day that stands still: a prompt that holds the date of its making would differ from run to
/// run. It is the day Llama's own templates fall back to.
fn strftime(pattern: &str) -> String {
    let mut text = String::new();
    let mut letters = pattern.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        match letters.next() {
            Some('d' | 'e') => text.push_str("26"),
            Some('m') => text.push_str("07"),
            Some('b' | 'h') => text.push_str("Jul"),
            Some('B') => text.push_str("July"),
            Some('Y') => text.push_str("2024"),
            Some('y') => text.push_str("24"),
            Some('a') => text.push_str("Fri"),
            Some('A') => text.push_str("Friday"),
            Some('j') => text.push_str("208"),
            Some('F') => text.push_str("2024-07-26"),
            Some('H' | 'M' | 'S' | 'I') => text.push_str("00"),
            Some('T' | 'X') => text.push_str("00:00:00"),
            Some('%') | None => text.push('%'),
            Some(other) => text.extend(['%', other]),
        }
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value = json!({"name": "größe <b>", "list": [1, 2.5, null], "empty": {}});
        let dumped = |indent: Option<usize>| {
            let kwargs: Kwargs = indent.map(|indent| ("indent", Value::from(indent))).into_iter().collect();
            tojson(&Value::from(minijinja::value::Serde(&value)), kwargs).unwrap()
        };
        assert_eq!(dumped(None), r#"{"name": "größe <b>", "list": [1, 2.5, null], "empty": {}}"#);
        assert_eq!(
            dumped(Some(2)),
            "{\n  \"name\": \"größe <b>\",\n  \"list\": [\n    1,\n    2.5,\n    null\n  ],\n  \"empty\": {}\n}"
        );
    }

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let written = [1.0, 2.5, 1e15, 1e16, 0.0001, 1.5e-5, -1e-7, 1e300].map(float_repr);
        let expected = ["1.0", "2.5", "1000000000000000.0", "1e+16", "0.0001", "1.5e-05", "-1e-07", "1e+300"];
        assert_eq!(written, expected);
    }

    #[test]
    fn the_date_stands_still() {
        assert_eq!(strftime("%d %b %Y"), "26 Jul 2024");
        assert_eq!(strftime("%A, %F 100%%"), "Friday, 2024-07-26 100%");
    }
}
