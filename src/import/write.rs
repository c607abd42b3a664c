//! Writes a pipeline file with comments, which a serializer of data has no place for.

use std::fmt::Write as _;

use engine::file::scalar;
use engine::file::tree::Value;
use serde_json::Value as Json;

use super::parameters::{Note, Parameter, Parameters};

/// The widest line of a comment.
const WIDTH: usize = 110;

/// A text that grows line by line.
#[derive(Debug, Default)]
pub(super) struct Writer {
    text: String,
}

impl Writer {
    pub(super) fn finish(self) -> String {
        self.text
    }

    pub(super) fn line(&mut self, indent: usize, text: &str) {
        let _ = writeln!(self.text, "{:indent$}{text}", "");
    }

    /// A comment, in as many lines as it needs.
    pub(super) fn comment(&mut self, indent: usize, text: &str) {
        let mut line = "#".to_owned();
        for word in text.split_whitespace() {
            if indent + line.chars().count() + 1 + word.chars().count() > WIDTH && line != "#" {
                self.line(indent, &line);
                "#".clone_into(&mut line);
            }
            line.push(' ');
            line.push_str(word);
        }
        self.line(indent, &line);
    }

    /// `key: value`, with a comment behind it.
    pub(super) fn entry(&mut self, indent: usize, key: &str, value: &Json, behind: &str) {
        let behind = if behind.is_empty() { String::new() } else { format!("   # {behind}") };
        match value {
            Json::Object(map) if !map.is_empty() => {
                self.line(indent, &format!("{}:{behind}", text(key)));
                for (key, value) in map {
                    self.entry(indent + 2, key, value, "");
                }
            }
            Json::Array(items) if items.iter().any(Json::is_object) => {
                self.line(indent, &format!("{}:{behind}", text(key)));
                items.iter().for_each(|item| self.line(indent + 2, &format!("- {}", flow(item))));
            }
            value => self.line(indent, &format!("{}: {}{behind}", text(key), flow(value))),
        }
    }

    /// Parameters as a mapping, those of one mapping below each other.
    pub(super) fn parameters(&mut self, indent: usize, parameters: &Parameters) {
        let mut done: Vec<&str> = Vec::new();
        for Parameter { path, value, note } in parameters.iter() {
            match path.split_once('.') {
                Some((group, _)) if done.contains(&group) => {}
                Some((group, _)) => {
                    done.push(group);
                    self.line(indent, &format!("{group}:"));
                    self.parameters(indent + 2, &parameters.below(group));
                }
                None => self.parameter(indent, path, value, note),
            }
        }
    }

    fn parameter(&mut self, indent: usize, key: &str, value: &Json, note: &Note) {
        let behind = match note {
            Note::Given => "",
            Note::Default(whose) => whose,
            Note::Differs { name, reason, default } => {
                self.comment(indent, &format!("{name}: {reason}"));
                default.as_deref().unwrap_or("")
            }
            Note::Needed(why) => {
                self.comment(indent, why);
                ""
            }
        };
        self.entry(indent, key, value, behind);
    }
}

/// A value on one line.
pub(crate) fn flow(value: &Json) -> String {
    match value {
        Json::String(value) => text(value),
        Json::Array(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Json::Object(map) if map.is_empty() => "{}".to_owned(),
        Json::Object(map) => {
            let entries = map.iter().map(|(key, value)| format!("{}: {}", text(key), flow(value)));
            format!("{{ {} }}", entries.collect::<Vec<_>>().join(", "))
        }
        Json::Number(number) => match number.as_f64() {
            // Rust writes 0.0003 in full, and nobody writes learning rates so.
            Some(float) if number.is_f64() && float != 0.0 && float.abs() < 1e-2 => format!("{float:e}"),
            _ => number.to_string(),
        },
        Json::Bool(_) | Json::Null => value.to_string(),
    }
}

/// A string, in quotes where it would be something else without them. `${` is a reference in a pipeline file.
pub(crate) fn text(value: &str) -> String {
    let value = value.replace("${", "$${");
    let is_plain = value.starts_with(|letter: char| letter.is_ascii_alphabetic() || matches!(letter, '.' | '/' | '_'))
        && value.chars().all(|letter| letter.is_ascii_alphanumeric() || "_./-+@".contains(letter))
        && matches!(scalar::plain(&value), Value::String(_));
    if is_plain { value } else { Json::from(value).to_string() }
}

#[cfg(test)]
mod tests {
    use engine::file::parse::parse;
    use engine::file::source::SourceId;
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_written_is_read_as_it_was() {
        let mut parameters = Parameters::default();
        let values = [
            json!("plain/name-1.2"),
            json!("true"),
            json!("1e3"),
            json!("a: b # c"),
            json!("two\nlines\t\"quoted\" {{ x }}"),
            json!("你好"),
            json!(""),
            json!("-x"),
            json!("~"),
            json!(3e-4),
            json!(0.1),
            json!(-5),
            json!(1e-8),
            json!(true),
            json!([1, "two", 3.5, "all-linear"]),
            json!({ "a b": "c", "d": [1], "e": {} }),
            json!([{ "rows": "x", "weight": 0.5 }, { "rows": "y" }]),
        ];
        for (at, value) in values.iter().enumerate() {
            let note = match at % 4 {
                0 => Note::Given,
                1 => Note::Default("default of axolotl 0.19.0".to_owned()),
                2 => Note::Needed("a long reason ".repeat(20).leak()),
                _ => Note::Differs {
                    name: "key".to_owned(),
                    reason: "because".to_owned(),
                    default: Some("d".to_owned()),
                },
            };
            parameters.set(&format!("group{}.sub.k{at}", at / 6), value.clone(), note);
        }
        let mut writer = Writer::default();
        writer.parameters(4, &parameters);
        let text = writer.finish();
        let mut problems = Vec::new();
        let root = parse(SourceId(0), &text, &mut problems).unwrap_or_else(|problem| panic!("{problem:?}\n{text}"));
        assert!(problems.is_empty(), "{problems:?}");
        for (at, value) in values.iter().enumerate() {
            let found =
                root.get(&format!("group{}", at / 6)).unwrap().get("sub").unwrap().get(&format!("k{at}")).unwrap();
            assert_eq!(&found.to_json(), value, "{text}");
        }
        assert!(
            text.lines().all(|line| !line.trim_start().starts_with('#') || line.chars().count() <= WIDTH),
            "{text}"
        );
    }

    #[test]
    fn a_reference_of_another_tool_is_none_here() {
        assert_eq!(text("${output_dir}/x"), "\"$${output_dir}/x\"");
    }
}
