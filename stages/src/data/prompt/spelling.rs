//! One conversation has several spellings: the arguments of a call are an object or, as in OpenAI's API, JSON as a
//! string; what is said is a string or a list of parts. A chat template is made for one of each. Over the other it
//! fails, or writes what no model was trained on: `tojson` puts a string in quotes, and `+` a list in Python's
//! brackets. So a template is shown both, and is given what it writes as it should.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::chat::ChatError;
use super::python;
use crate::data::artifact::Message;
use crate::data::number;

const CALLS: &str = "tool_calls";
const ARGUMENTS: &str = "arguments";

/// How a template wants the arguments of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arguments {
    /// Both spellings are fine, or neither is.
    Either,
    Object,
    Text,
}

/// The spellings that a template writes as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spelling {
    arguments: Arguments,
    reads_parts: bool,
}

impl Spelling {
    /// Whether conversations may be spelled otherwise than some template wants.
    pub(super) fn matters(messages: &[Message]) -> bool {
        messages.iter().any(|message| message.content.is_array() || message.other.contains_key(CALLS))
    }

    /// What a template wants, by what it makes of conversations; none where it refuses one.
    pub(super) fn of(render: impl Fn(&[Message]) -> Option<String>) -> Self {
        let said = |content: Value| render(&[Message { content, ..Message::new("user", "") }]);
        let text = said("A text.".into());
        let reads_parts = text.is_some() && text == said(json!([{ "type": "text", "text": "A text." }]));
        let called = |arguments: Value| {
            let call = json!({ "type": "function", "id": "abcdefghi",
                "function": { "name": "name_of_a_tool", ARGUMENTS: arguments } });
            let mut calls = Message::new("assistant", "");
            calls.other.insert(CALLS.to_owned(), json!([call]));
            render(&[Message::new("user", "Call it."), calls])
        };
        let (object, written) = (json!({ "n": 1 }), r#"{"n": 1}"#);
        let quoted = Value::from(written).to_string();
        let arguments = match (called(object), called(written.into())) {
            (Some(_), None) => Arguments::Object,
            (Some(_), Some(text)) if text.contains(&quoted) => Arguments::Object,
            (None, Some(_)) => Arguments::Text,
            _ => Arguments::Either,
        };
        Self { arguments, reads_parts }
    }

    /// The messages as the template wants them.
    ///
    /// # Errors
    /// Fails where arguments are text and no JSON object, and where a part is no text.
    pub(super) fn apply(self, messages: &[Message]) -> Result<Cow<'_, [Message]>, ChatError> {
        let mut messages = Cow::Borrowed(messages);
        for index in 0..messages.len() {
            if let Value::Array(parts) = &messages[index].content
                && !self.reads_parts
                && let Some(text) = joined(parts, index + 1)?
            {
                messages.to_mut()[index].content = text.into();
            }
            if let Some(calls) = messages[index].other.get(CALLS)
                && let Some(calls) = self.calls(calls, index + 1)?
            {
                messages.to_mut()[index].other.insert(CALLS.to_owned(), calls);
            }
        }
        Ok(messages)
    }

    /// The calls of a turn, where they are to be spelled otherwise.
    fn calls(self, calls: &Value, turn: usize) -> Result<Option<Value>, ChatError> {
        let Value::Array(of_turn) = calls else { return Ok(None) };
        let mut changed = None;
        for (index, call) in of_turn.iter().enumerate() {
            let is_wrapped = call["function"].is_object();
            let function = if is_wrapped { &call["function"] } else { call };
            let wanted = match (self.arguments, function.get(ARGUMENTS)) {
                (Arguments::Object, Some(Value::String(text))) => {
                    Value::Object(object(text).ok_or(ChatError::Arguments { turn, call: index + 1 })?)
                }
                (Arguments::Text, Some(object @ Value::Object(_))) => python::json(object).into(),
                _ => continue,
            };
            let call = &mut changed.get_or_insert_with(|| calls.clone())[index];
            let function = if is_wrapped { &mut call["function"] } else { call };
            function[ARGUMENTS] = wanted;
        }
        Ok(changed)
    }
}

/// The object that arguments are, all its digits kept; without a letter there are none.
fn object(text: &str) -> Option<Map<String, Value>> {
    if text.trim().is_empty() {
        return Some(Map::new());
    }
    let arguments: Value = serde_json::from_str(text).ok()?;
    let is_rounded =
        || serde_json::from_str(&number::with_digits_kept(text)).is_ok_and(|kept| number::find(&kept).is_some());
    match arguments {
        Value::Object(_) if number::may_be_rounded(&arguments) && is_rounded() => None,
        Value::Object(arguments) => Some(arguments),
        _ => None,
    }
}

/// The text of parts that are all text; none where they are of no form that is known.
fn joined(parts: &[Value], turn: usize) -> Result<Option<String>, ChatError> {
    let mut text = String::new();
    for part in parts {
        match (part["type"].as_str(), &part["text"]) {
            (Some("text"), Value::String(said)) => text += said,
            (Some(kind), _) if kind != "text" => return Err(ChatError::Part { turn, kind: kind.to_owned() }),
            _ => return Ok(None),
        }
    }
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::chat::ChatTemplate;
    use super::*;

    /// A conversation with a call of these arguments, by a template that writes a call in this way.
    fn rendered(writes: &str, arguments: Value) -> Result<String, String> {
        let source = format!(
            "{{% for m in messages %}}{{{{ m.content }}}}{{% for call in m.tool_calls %}}{{% set f = call.function or call %}}\
             {{{{ f.name + ':' }}}}{{{{ {writes} }}}}{{% endfor %}}{{% endfor %}}"
        );
        let template = ChatTemplate::new(&source, BTreeMap::new()).unwrap();
        let of = |call: Value| {
            let mut calls = Message::new("assistant", "");
            calls.other.insert(CALLS.to_owned(), json!([call]));
            template.render(&[Message::new("user", "x "), calls], false).map_err(|error| error.to_string())
        };
        let wrapped = of(json!({ "function": { "name": "a", ARGUMENTS: arguments } }));
        assert_eq!(of(json!({ "name": "a", ARGUMENTS: arguments })), wrapped);
        wrapped
    }

    #[test]
    fn arguments_are_an_object_or_text_as_the_template_wants_them() {
        let (object, text) = (json!({ "n": 1.0, "é": [] }), r#"{"n": 1.0, "é": []}"#);
        for writes in ["f.arguments|tojson", "f.arguments.items()|list|length", "f.arguments + ''"] {
            let of_object = rendered(writes, object.clone()).unwrap();
            assert_eq!(rendered(writes, text.into()).unwrap(), of_object, "{writes}");
            assert!(!of_object.contains('\\'), "{of_object}");
        }
        assert_eq!(rendered("f.arguments|tojson", " ".into()).unwrap(), "x a:{}");
        // Either spelling is written as it stands.
        let either = "f.arguments if f.arguments is string else f.arguments|tojson";
        assert_eq!(rendered(either, "{ }".into()).unwrap(), "x a:{ }");
        assert_eq!(rendered(either, object).unwrap(), format!("x a:{text}"));
    }

    #[test]
    fn arguments_that_are_no_object_are_told() {
        for text in ["nothing", "[1]", r#"{"n": 12345678901234567890123}"#] {
            let error = rendered("f.arguments|tojson", text.into()).unwrap_err();
            assert!(error.contains("turn 2: `arguments` of call 1"), "{error}");
        }
        assert_eq!(rendered("f.arguments|tojson", r#"{"n": 1e300}"#.into()).unwrap(), r#"x a:{"n": 1e+300}"#);
    }

    #[test]
    fn parts_are_joined_where_the_template_reads_text_alone() {
        let parts = json!([{ "type": "text", "text": "One, " }, { "type": "text", "text": "two" }]);
        let template = |source: &str| ChatTemplate::new(source, BTreeMap::new()).unwrap();
        let said = |template: &ChatTemplate, content: &Value| {
            let message = Message { content: content.clone(), ..Message::new("user", "") };
            template.render(&[message], false)
        };
        let plain = template("{% for m in messages %}<{{ m.content }}>{% endfor %}");
        assert_eq!(said(&plain, &parts).unwrap(), "<One, two>");
        let image = json!([{ "type": "text", "text": "See" }, { "type": "image", "url": "a.png" }]);
        let error = said(&plain, &image).unwrap_err().to_string();
        assert!(error.contains("turn 1: its `content` has a part of type `image`"), "{error}");
        let reads_parts = template(
            "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
             {{ part.text if part.type == 'text' else '(image)' }}{% endfor %}{% endif %}>{% endfor %}",
        );
        assert_eq!(said(&reads_parts, &parts).unwrap(), "<One, two>");
        assert_eq!(said(&reads_parts, &image).unwrap(), "<See(image)>");
    }
}
