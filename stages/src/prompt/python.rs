//! What chat templates expect of Python: how values print, `tojson` and `strftime`.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, Output, State};

/// Prints a value as Python does: `None`, `True`, `False`.
pub(super) fn format(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let word = match value.kind() {
        ValueKind::None => "None",
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(word).map_err(Error::from)
}

/// `json.dumps` as transformers calls it: no HTML escapes, a space after `,` and `:`, keys in their order.
pub(super) fn tojson(value: &Value, kwargs: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    // They decide nothing here: text is never escaped, and separators other than the default are not in use.
    for ignored in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = kwargs.get(ignored)?;
    }
    kwargs.assert_all_used()?;
    let json = serde_json::to_value(value)
        .map_err(|error| Error::new(minijinja::ErrorKind::BadSerialization, error.to_string()))?;
    let mut text = String::new();
    dump(&mut text, &json, indent, 0);
    Ok(text)
}

fn dump(text: &mut String, value: &serde_json::Value, indent: Option<usize>, depth: usize) {
    use serde_json::Value as Json;
    match value {
        Json::Array(items) => {
            let items = items.iter().map(|item| (None, item));
            dump_all(text, ['[', ']'], items, indent, depth);
        }
        Json::Object(map) => {
            let entries = map.iter().map(|(key, value)| (Some(key.as_str()), value));
            dump_all(text, ['{', '}'], entries, indent, depth);
        }
        other => text.push_str(&other.to_string()),
    }
}

fn dump_all<'a>(
    text: &mut String,
    brackets: [char; 2],
    entries: impl ExactSizeIterator<Item = (Option<&'a str>, &'a serde_json::Value)>,
    indent: Option<usize>,
    depth: usize,
) {
    let new_line = |text: &mut String, depth: usize| {
        if let Some(indent) = indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    let empty = entries.len() == 0;
    text.push(brackets[0]);
    for (number, (key, value)) in entries.enumerate() {
        if number > 0 {
            text.push_str(if indent.is_some() { "," } else { ", " });
        }
        new_line(text, depth + 1);
        if let Some(key) = key {
            let _ = write!(text, "{}: ", serde_json::Value::from(key));
        }
        dump(text, value, indent, depth + 1);
    }
    if !empty {
        new_line(text, depth);
    }
    text.push(brackets[1]);
}

/// `strftime_now`, with a day that stands still: a prompt that holds the date of its making would differ from run to
/// run. It is the day Llama's own templates fall back to.
pub(super) fn strftime(pattern: &str) -> String {
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
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_is_written_as_python_writes_it() {
        let value = json!({"name": "größe <b>", "list": [1, 2.5, null], "empty": {}});
        let dumped = |indent| {
            let mut text = String::new();
            dump(&mut text, &value, indent, 0);
            text
        };
        assert_eq!(dumped(None), r#"{"name": "größe <b>", "list": [1, 2.5, null], "empty": {}}"#);
        assert_eq!(
            dumped(Some(2)),
            "{\n  \"name\": \"größe <b>\",\n  \"list\": [\n    1,\n    2.5,\n    null\n  ],\n  \"empty\": {}\n}"
        );
    }

    #[test]
    fn the_date_stands_still() {
        assert_eq!(strftime("%d %b %Y"), "26 Jul 2024");
        assert_eq!(strftime("%A, %F 100%%"), "Friday, 2024-07-26 100%");
    }
}
