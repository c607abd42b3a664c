//! Writes plain data as YAML, in the block style that people read and edit.
//!
//! Texts stand plain only where no reader of YAML 1.1 or 1.2 could take them for anything else (`on`, `1e3`, `~`);
//! texts of several lines stand as blocks where that keeps every letter.

use std::fmt::Write as _;

use serde_json::Value;

/// Words that some reader takes for a truth value, a number or nothing.
const NOT_TEXT: [&str; 12] = ["true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf", "infinity"];

/// Documents one after the other.
pub(super) fn documents(documents: &[Value]) -> String {
    let mut out = String::new();
    for document in documents {
        out.push_str("---\n");
        match document {
            Value::Object(_) | Value::Array(_) if !is_empty(document) => block(document, 0, &mut out),
            scalar => {
                inline(scalar, 0, &mut out);
                out.push('\n');
            }
        }
    }
    out
}

/// A mapping or list, each entry on lines of its own, after an indentation that is written already for the first.
fn block(value: &Value, depth: usize, out: &mut String) {
    match value {
        Value::Object(entries) => {
            for (at, (key, value)) in entries.iter().enumerate() {
                indent(at, depth, out);
                if is_plain(key) {
                    out.push_str(key)
                } else {
                    quoted(key, out)
                }
                out.push(':');
                match value {
                    Value::Object(_) if !is_empty(value) => {
                        out.push('\n');
                        out.push_str(&" ".repeat(depth + 2));
                        block(value, depth + 2, out);
                    }
                    // Lists stand as deep as their key, as in every manifest.
                    Value::Array(_) if !is_empty(value) => {
                        out.push('\n');
                        out.push_str(&" ".repeat(depth));
                        block(value, depth, out);
                    }
                    scalar => {
                        out.push(' ');
                        inline(scalar, depth, out);
                        out.push('\n');
                    }
                }
            }
        }
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate() {
                indent(at, depth, out);
                out.push_str("- ");
                if is_empty(item) || !(item.is_object() || item.is_array()) {
                    inline(item, depth, out);
                    out.push('\n');
                } else {
                    block(item, depth + 2, out);
                }
            }
        }
        scalar => inline(scalar, depth, out),
    }
}

fn indent(entry: usize, depth: usize, out: &mut String) {
    if entry > 0 {
        out.push_str(&" ".repeat(depth));
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(serde_json::Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// What stands behind a key or a hyphen.
fn inline(value: &Value, depth: usize, out: &mut String) {
    match value {
        Value::String(value) => text(value, depth, out),
        other => drop(write!(out, "{other}")),
    }
}

fn text(value: &str, depth: usize, out: &mut String) {
    if is_plain(value) {
        out.push_str(value);
    } else if is_block(value) {
        lines(value, depth, out);
    } else {
        quoted(value, out);
    }
}

fn is_plain(value: &str) -> bool {
    let begins = value.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '/' || letter == '_');
    let goes_on = |letter: char| letter.is_ascii_alphanumeric() || "/_.-".contains(letter);
    begins && value.chars().all(goes_on) && !NOT_TEXT.contains(&value.to_ascii_lowercase().as_str())
}

/// Whether a block keeps a text as it is: no letter that must be escaped, no first line whose blanks would be taken for
/// indentation.
fn is_block(value: &str) -> bool {
    let kept = |letter: char| letter == '\n' || letter == '\t' || is_printable(letter);
    let first = value.lines().next().unwrap_or_default();
    let begins = !first.is_empty() && !first.starts_with([' ', '\t']);
    value.trim_end_matches('\n').contains('\n') && begins && value.chars().all(kept)
}

/// What YAML takes as it stands; line breaks of other scripts are none in YAML 1.2, and are in 1.1.
fn is_printable(letter: char) -> bool {
    !letter.is_control() && !matches!(letter, '\u{85}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

fn lines(value: &str, depth: usize, out: &mut String) {
    let ends = value.len() - value.trim_end_matches('\n').len();
    out.push_str(match ends {
        0 => "|-",
        1 => "|",
        _ => "|+",
    });
    for line in value.strip_suffix('\n').unwrap_or(value).split('\n') {
        out.push('\n');
        if !line.is_empty() {
            let _ = write!(out, "{}{line}", " ".repeat(depth + 2));
        }
    }
}

/// As JSON has it, which every YAML reader takes.
fn quoted(value: &str, out: &mut String) {
    out.push('"');
    for letter in value.chars() {
        match letter {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            letter if is_printable(letter) => out.push(letter),
            letter => {
                let mut units = [0; 2];
                for unit in letter.encode_utf16(&mut units) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// What a reader makes of one document.
    fn read(text: &str) -> Value {
        serde_yaml::from_str(text.strip_prefix("---\n").unwrap()).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    #[test]
    fn every_text_comes_back_as_it_was() {
        let texts = [
            "",
            "plain",
            "a b",
            "on",
            "Yes",
            "~",
            "null",
            "1",
            "1e3",
            "0x1f",
            "2024-01-01",
            "-",
            "- a",
            "a: b",
            "a:",
            "#",
            "a #b",
            "{{x}}",
            "'",
            "\"",
            "\\",
            "a\\nb",
            "[x]",
            "*x",
            "&x",
            "!x",
            "%x",
            "@x",
            "`x`",
            "|",
            ">",
            "?",
            "a\nb",
            "a\nb\n",
            "a\n\n",
            "a\n\n\nb\n\n",
            "\na",
            " a\nb",
            "\ta\nb",
            "a\n  b\n c",
            "a\n\tb",
            "a \nb ",
            "tab\there",
            "\r\n",
            "a\r\nb",
            "\u{7f}",
            "\u{85}",
            "\u{2028}",
            "\u{feff}x",
            "你是谁?",
            "😀",
            "a\n😀\n",
            "/pipeline/home",
            "x.y-z_1",
            "NaN",
            ".inf",
            "y",
            "{a: 1}\n{b: 2}\n",
            "---\n",
            "a\n---\nb\n",
            "# c\nversion: 1\n",
        ];
        for text in texts {
            let document = json!({ "key": text, "list": [text, { "inner": text }], "after": 1 });
            let written = documents(std::slice::from_ref(&document));
            assert_eq!(read(&written), document, "{text:?} became\n{written}");
        }
        for text in texts.iter().filter(|text| !text.is_empty()) {
            let document = json!({ *text: 1 });
            assert_eq!(read(&documents(std::slice::from_ref(&document))), document, "{text:?}");
        }
    }

    #[test]
    fn structure_is_written_as_people_write_it() {
        let document = json!({
            "kind": "Workflow", "empty": {}, "none": [], "number": 1.5, "truth": true, "nothing": null,
            "spec": { "list": ["a", { "name": "b", "args": ["run", "x y"] }, [1, [2]]] },
            "script": "first\n  second\n",
        });
        let written = documents(std::slice::from_ref(&document));
        assert_eq!(read(&written), document);
        let expected = "---\nkind: Workflow\nempty: {}\nnone: []\nnumber: 1.5\ntruth: true\nnothing: null\nspec:\n  list:\n  - a\n  - name: b\n    args:\n    - run\n    - \"x y\"\n  - - 1\n    - - 2\nscript: |\n  first\n    second\n";
        assert_eq!(written, expected);
    }
}
