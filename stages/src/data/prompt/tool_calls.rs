//! Calls of tools as a model writes them, and as they are read back.
//!
//! How they are written is for the chat template to say: a template is shown a call, and has the form in which that is
//! read back from what it wrote.

use serde_json::{Map, Value, json};

use super::chat::ChatTemplate;
use crate::data::artifact::{Message, TOOLS};

/// How calls are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolForm {
    /// `<tool_call>` before each and `</tool_call>` behind it: Hermes, Qwen 2.5 and 3.
    Tagged,
    /// `[TOOL_CALLS]`, and a list of them: Mistral.
    Listed,
    /// Nothing but the call, with `parameters`: Llama 3.1 to 3.3.
    Bare,
}

/// A tool that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    pub name: String,
    /// The schema of its arguments.
    pub parameters: Value,
}

/// A call.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    pub name: String,
    pub arguments: Map<String, Value>,
}

/// What a model said where it may call tools.
#[derive(Debug, Clone, PartialEq)]
pub struct SaidWithCalls {
    /// What stands before the calls, or all of it where there are none.
    pub text: String,
    pub calls: Vec<ToolCall>,
}

/// How many calls may be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Calls {
    One,
    OneOrMore,
}

const BEGIN: &str = "<tool_call>";
const END: &str = "</tool_call>";
const LIST: &str = "[TOOL_CALLS]";
const PYTHON: &str = "<|python_tag|>";

/// The name of the tool that templates are shown a call of.
const PROBE: &str = "tool_of_a_probe";

impl ToolForm {
    const ALL: [Self; 3] = [Self::Tagged, Self::Listed, Self::Bare];

    /// The form that a template writes calls in, if it writes any and one of these.
    pub(super) fn of(template: &ChatTemplate) -> Option<Self> {
        let parameters = json!({ "type": "object", "properties": { "n": { "type": "integer" } } });
        let tool = json!({ "type": "function",
            "function": { "name": PROBE, "description": "A tool.", "parameters": parameters } });
        let mut asks = Message::new("user", "Call it.");
        asks.other.insert(TOOLS.to_owned(), json!([tool]));
        let mut calls = Message::new("assistant", "");
        let call = json!({ "type": "function", "id": "abcdefghi",
            "function": { "name": PROBE, "arguments": { "n": 1 } } });
        calls.other.insert("tool_calls".to_owned(), json!([call]));
        let asked = template.render(std::slice::from_ref(&asks), false).ok()?;
        if !asked.contains(PROBE) {
            return None;
        }
        let whole = template.render(&[asks, calls], false).ok()?;
        let said = whole.strip_prefix(&asked)?;
        let begin = said.find(PROBE)?;
        Self::ALL.into_iter().find(|form| {
            // Its header is before the call, and may be anything; so may its end behind it.
            let start = match form {
                Self::Tagged => said[..begin].rfind(BEGIN),
                Self::Listed => said[..begin].rfind(LIST),
                Self::Bare => said[..begin].rfind('{'),
            };
            start.is_some_and(|start| {
                let said = form.read_from(&said[start..]);
                said.calls.len() == 1 && said.calls[0].name == PROBE && said.calls[0].arguments["n"] == 1
            })
        })
    }

    /// What a model said. What begins as a call and is none is text.
    pub fn read(self, text: &str) -> SaidWithCalls {
        match self.begin(text) {
            Some(begin) => {
                let said = self.read_from(&text[begin..]);
                match said.calls.is_empty() {
                    true => SaidWithCalls { text: text.to_owned(), calls: Vec::new() },
                    false => SaidWithCalls { text: text[..begin].trim_end().to_owned(), calls: said.calls },
                }
            }
            None => SaidWithCalls { text: text.to_owned(), calls: Vec::new() },
        }
    }

    /// Where calls begin, or may begin once more text has come; none where there is none yet.
    pub fn begin(self, text: &str) -> Option<usize> {
        match self {
            Self::Tagged => {
                let pending =
                    || (0..text.len()).find(|at| text.is_char_boundary(*at) && BEGIN.starts_with(&text[*at..]));
                text.find(BEGIN).or_else(pending)
            }
            // A special token before them, if there is one, is not written out.
            Self::Listed => begins_with(text, &[LIST, "["]),
            Self::Bare => begins_with(text, &[PYTHON, "{"]),
        }
    }

    /// The calls at the beginning of a text; none where one of them is not as it should be.
    fn read_from(self, text: &str) -> SaidWithCalls {
        let calls = match self {
            Self::Tagged => tagged(text),
            Self::Listed => listed(text),
            Self::Bare => first_value(text.strip_prefix(PYTHON).unwrap_or(text))
                .and_then(|value| Some(vec![call(value, "parameters")?])),
        };
        SaidWithCalls { text: String::new(), calls: calls.unwrap_or_default() }
    }

    /// A grammar of calls of these tools, as llguidance has it; `special` is the id of the special token of a text.
    pub fn grammar(self, tools: &[Tool], calls: Calls, special: impl Fn(&str) -> Option<u32>) -> String {
        let quoted = |text: &str| json!(text).to_string();
        let written = |text: &str| special(text).map_or_else(|| quoted(text), |id| format!("<[{id}]>"));
        let more = |between: &str| match calls {
            Calls::One => String::new(),
            Calls::OneOrMore => format!(" ({} call)*", quoted(between)),
        };
        let mut grammar = match self {
            Self::Tagged => {
                let (begin, end) = (written(BEGIN), written(END));
                format!("start: call{}\ncall: {begin} \"\\n\" object \"\\n\" {end}\n", more("\n"))
            }
            Self::Listed => format!("start: {} \" [\" call{} \"]\"\ncall: object\n", written(LIST), more(", ")),
            Self::Bare => "start: object\n".to_owned(),
        };
        let arguments = if self == Self::Bare { "parameters" } else { "arguments" };
        let objects: Vec<String> = (0..tools.len()).map(|index| format!("object_{index}")).collect();
        grammar += &format!("object: {}\n", objects.join(" | "));
        for (index, tool) in tools.iter().enumerate() {
            let head = format!("{{\"name\": {}, \"{arguments}\": ", quoted(&tool.name));
            // A schema of its own, so that its references hold; written as templates do, which is as Python does.
            let mut schema = tool.parameters.clone();
            schema["x-guidance"] =
                json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
            grammar +=
                &format!("object_{index}: {} schema_{index} \"}}\"\nschema_{index}: %json {schema}\n", quoted(&head));
        }
        grammar
    }
}

/// Where a text begins, but for white space, with one of these, or with a part of one that is all of it.
fn begins_with(text: &str, beginnings: &[&str]) -> Option<usize> {
    let said = text.trim_start();
    let begins = beginnings.iter().any(|beginning| said.starts_with(beginning) || beginning.starts_with(said));
    begins.then_some(text.len() - said.len())
}

fn tagged(text: &str) -> Option<Vec<ToolCall>> {
    let (mut calls, mut rest) = (Vec::new(), text);
    while let Some(behind) = rest.trim_start().strip_prefix(BEGIN) {
        let (inside, behind) = behind.split_once(END)?;
        calls.push(call(serde_json::from_str(inside).ok()?, "arguments")?);
        rest = behind;
    }
    Some(calls)
}

fn listed(text: &str) -> Option<Vec<ToolCall>> {
    let text = text.strip_prefix(LIST).unwrap_or(text);
    match first_value(text)? {
        Value::Array(calls) => calls.into_iter().map(|value| call(value, "arguments")).collect(),
        _ => None,
    }
}

/// The JSON value that a text begins with, whatever follows it.
fn first_value(text: &str) -> Option<Value> {
    serde_json::Deserializer::from_str(text).into_iter().next()?.ok()
}

fn call(value: Value, arguments: &str) -> Option<ToolCall> {
    let Value::Object(mut fields) = value else { return None };
    match (fields.remove("name")?, fields.remove(arguments)?) {
        (Value::String(name), Value::Object(arguments)) => Some(ToolCall { name, arguments }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(form: ToolForm, text: &str) -> Vec<(String, String)> {
        let calls = form.read(text).calls.into_iter();
        calls.map(|call| (call.name, Value::Object(call.arguments).to_string())).collect()
    }

    #[test]
    fn calls_are_read_in_each_form() {
        let one = [("weather".to_owned(), r#"{"city":"Zürich","days":2}"#.to_owned())];
        let json = r#"{"name": "weather", "arguments": {"city": "Zürich", "days": 2}}"#;
        let text = format!("Let me see.\n<tool_call>\n{json}\n</tool_call>");
        assert_eq!(calls(ToolForm::Tagged, &text), one);
        assert_eq!(ToolForm::Tagged.read(&text).text, "Let me see.");
        let two = format!("<tool_call>\n{json}\n</tool_call>\n<tool_call>{json}</tool_call>");
        assert_eq!(calls(ToolForm::Tagged, &two).len(), 2);
        for text in [format!("[TOOL_CALLS] [{json}]"), format!(" [{json}]")] {
            assert_eq!(calls(ToolForm::Listed, &text), one, "{text}");
        }
        let bare = json.replace("arguments", "parameters");
        for text in [bare.clone(), format!("<|python_tag|>{bare}"), format!("\n{bare}")] {
            assert_eq!(calls(ToolForm::Bare, &text), one, "{text}");
        }
    }

    #[test]
    fn what_is_no_call_is_text() {
        for (form, text) in [
            (ToolForm::Tagged, "It rains."),
            (ToolForm::Tagged, "<tool_call>\n{\"name\": \"weather\"}\n</tool_call>"),
            (ToolForm::Tagged, "<tool_call>\n{\"name\": \"weather\", \"arguments\": {}}"),
            (ToolForm::Tagged, "<tool_call>{\"name\": 3, \"arguments\": {}}</tool_call>"),
            (ToolForm::Listed, "[1, 2]"),
            (ToolForm::Listed, "It rains. [{\"name\": \"a\", \"arguments\": {}}]"),
            (ToolForm::Bare, "{\"name\": \"a\"}"),
            (ToolForm::Bare, "{\"rain\": true}"),
        ] {
            assert_eq!(form.read(text), SaidWithCalls { text: text.to_owned(), calls: Vec::new() }, "{form:?}");
        }
    }

    #[test]
    fn text_is_held_where_a_call_may_begin() {
        assert_eq!(ToolForm::Tagged.begin("It rains <b>"), None);
        assert_eq!(ToolForm::Tagged.begin("It rains <tool"), Some(9));
        assert_eq!(ToolForm::Tagged.begin("é<tool_call>{"), Some(2));
        assert_eq!(ToolForm::Listed.begin(" [TOOL"), Some(1));
        assert_eq!(ToolForm::Listed.begin("It rains ["), None);
        assert_eq!(ToolForm::Bare.begin("{\"name"), Some(0));
        assert_eq!(ToolForm::Bare.begin("It is {"), None);
        assert_eq!(ToolForm::Bare.begin(""), Some(0));
    }

    #[test]
    fn a_template_without_tools_has_no_form() {
        let source = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}";
        assert_eq!(ToolForm::of(&ChatTemplate::new(source, std::collections::BTreeMap::new()).unwrap()), None);
    }
}
