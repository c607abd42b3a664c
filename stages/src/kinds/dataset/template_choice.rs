//! The `template:` field: a known name, or a text with placeholders.

use engine::file::problem::Problem;
use engine::file::tree::{Node, Value};
use engine::parameter::{KeyWriter, Parameter, Reader};
use engine::suggest;
use serde_json::json;

use crate::data::prompt::{NAMED, Template};

/// What `template:` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateChoice(pub Template);

impl Parameter for TemplateChoice {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        let Value::String(text) = &node.value else {
            reader.wrong_type(node, "a string");
            return None;
        };
        if let Some(template) = Template::named(text) {
            return Some(Self(template));
        }
        if text.contains(['{', '}', '\n', ' ']) {
            return Template::custom(text)
                .map_err(|error| {
                    reader.bad_value(node, error.to_string(), "a string with placeholders such as {question}")
                })
                .map(Self)
                .ok();
        }
        let names: Vec<&str> = NAMED.iter().map(|(name, _)| *name).collect();
        let problem =
            Problem::error("bad-value", node.span, format!("there is no template `{text}`"), "not a known name")
                .with_help_if(suggest::help(text, "template", names.iter()));
        reader.problems.push(problem);
        None
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        key.value(serde_json::to_string(&self.0).expect("a template is JSON"));
    }

    fn schema() -> serde_json::Value {
        let names: Vec<&str> = NAMED.iter().map(|(name, _)| *name).collect();
        json!({ "type": "string", "anyOf": [{ "enum": names }, { "pattern": "\\{[^{}]+\\}" }] })
    }
}
