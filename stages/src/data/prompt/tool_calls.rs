//! Calls of tools as a model writes them, and as they are read back.
//!
//! How they are written is for the chat template to say: a template is shown a call, and has the form in which that is
//! read back from what it wrote.

use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};

use super::chat::ChatTemplate;
use super::spelling::{conversation_with_a_call, tool};
use crate::data::artifact::TOOLS;

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
    /// A JSON object, as the model wrote it.
    pub arguments: String,
}

/// What a model said where it may call tools.
#[derive(Debug, Clone, PartialEq)]
pub struct SaidWithCalls {
    /// What stands before the calls, or all of it where there are none.
    pub text: String,
    pub calls: Vec<ToolCall>,
    /// What stands behind them.
    pub rest: String,
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
        let [mut asks, calls] = conversation_with_a_call(PROBE, json!({ "n": 1 }));
        asks.other.insert(TOOLS.to_owned(), json!([tool(PROBE)]));
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
                let (calls, _) = form.read_from(&said[start..]);
                let arguments = calls.first().and_then(|call| serde_json::from_str::<Value>(&call.arguments).ok());
                calls.len() == 1 && calls[0].name == PROBE && arguments == Some(json!({ "n": 1 }))
            })
        })
    }

    /// What a model said. What begins as a call and is none is text.
    pub fn read(self, text: &str) -> SaidWithCalls {
        let begin = self.begin(text).unwrap_or(text.len());
        let (calls, length) = self.read_from(&text[begin..]);
        if calls.is_empty() {
            return SaidWithCalls { text: text.to_owned(), calls, rest: String::new() };
        }
        let rest = text[begin + length..].trim_end();
        let before = text[..begin].trim_end();
        // What parts it from the calls is of no use where nothing stands before them.
        let rest = if before.is_empty() { rest.trim_start() } else { rest };
        SaidWithCalls { text: before.to_owned(), calls, rest: rest.to_owned() }
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

    /// The calls at the beginning of a text, up to one that is not as it should be, and the length of what they are
    /// written in.
    fn read_from(self, text: &str) -> (Vec<ToolCall>, usize) {
        let mut found = (Vec::new(), 0);
        let mut rest = text;
        let mut take = |call: ToolCall, rest: &str| {
            found.0.push(call);
            found.1 = text.len() - rest.len();
        };
        match self {
            Self::Tagged => {
                while let Some((call, behind)) = tagged(rest) {
                    take(call, behind);
                    rest = behind;
                }
            }
            Self::Listed => {
                rest = rest.strip_prefix(LIST).unwrap_or(rest).trim_start();
                let mut separator = '[';
                while let Some((call, behind)) =
                    rest.strip_prefix(separator).and_then(|rest| read_call(rest, "arguments"))
                {
                    rest = behind.trim_start();
                    take(call, rest.strip_prefix(']').unwrap_or(rest));
                    separator = ',';
                }
            }
            Self::Bare => {
                rest = rest.strip_prefix(PYTHON).unwrap_or(rest);
                while let Some((call, behind)) = read_call(rest, "parameters") {
                    take(call, behind);
                    rest = behind.trim_start().strip_prefix(';').unwrap_or(behind);
                }
            }
        }
        found
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

/// A call between its tags, and what follows it. A tag in a text of the call ends nothing.
fn tagged(text: &str) -> Option<(ToolCall, &str)> {
    let (call, rest) = read_call(text.trim_start().strip_prefix(BEGIN)?, "arguments")?;
    Some((call, rest.trim_start().strip_prefix(END)?))
}

/// The call that a text begins with, and what follows it.
fn read_call<'a>(text: &'a str, arguments: &str) -> Option<(ToolCall, &'a str)> {
    let (members, rest) = read_object(text)?;
    let member = |name: &str| members.iter().find(|(key, _)| key == name).map(|(_, value)| *value);
    let arguments = member(arguments).filter(|value| value.starts_with('{'))?;
    let call = ToolCall { name: serde_json::from_str(member("name")?).ok()?, arguments: arguments.to_owned() };
    Some((call, rest))
}

/// Keys and values of the JSON object that a text begins with, each value as it is written, and what follows it.
fn read_object(text: &str) -> Option<(Vec<(String, &str)>, &str)> {
    let mut members = Vec::new();
    let mut rest = text.trim_start().strip_prefix('{')?.trim_start();
    while !rest.starts_with('}') {
        let (key, behind) = read_json::<String>(rest)?;
        let value = behind.trim_start().strip_prefix(':')?.trim_start();
        let (_, behind) = read_json::<IgnoredAny>(value)?;
        members.push((key, &value[..value.len() - behind.len()]));
        rest = behind.trim_start();
        match rest.strip_prefix(',') {
            Some(behind) => rest = behind.trim_start(),
            None if rest.starts_with('}') => {}
            None => return None,
        }
    }
    Some((members, &rest[1..]))
}

/// The JSON value that a text begins with, and what follows it.
fn read_json<T: DeserializeOwned>(text: &str) -> Option<(T, &str)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter();
    let value = values.next()?.ok()?;
    Some((value, &text[values.byte_offset()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(form: ToolForm, text: &str) -> Vec<(String, String)> {
        let calls = form.read(text).calls.into_iter();
        calls.map(|call| (call.name, call.arguments)).collect()
    }

    #[test]
    fn calls_are_read_in_each_form() {
        let one = [("weather".to_owned(), r#"{"city": "Zürich", "days": 2}"#.to_owned())];
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
    fn arguments_are_as_they_were_written() {
        let written =
            r#"{"z": 1.0, "a": 1e5, "big": 12345678901234567890123, "text": "</tool_call> \u00e9", "of": {"b": 0.10}}"#;
        for (form, arguments, before, behind) in [
            (ToolForm::Tagged, "arguments", "<tool_call>", "</tool_call>"),
            (ToolForm::Listed, "arguments", "[TOOL_CALLS] [", "]"),
            (ToolForm::Bare, "parameters", "", ""),
        ] {
            let text = format!("{before}{{\"name\": \"a\", \"{arguments}\": {written}}}{behind}");
            assert_eq!(calls(form, &text), [("a".to_owned(), written.to_owned())], "{form:?}");
        }
    }

    #[test]
    fn what_stands_behind_calls_is_kept() {
        let call = |name: &str| format!("{{\"name\": \"{name}\", \"arguments\": {{}}}}");
        let tagged = |name: &str| format!("<tool_call>\n{}\n</tool_call>", call(name));
        let said = |form: ToolForm, text: &str| {
            let said = form.read(text);
            (said.text, said.calls.into_iter().map(|call| call.name).collect::<Vec<_>>().join(" "), said.rest)
        };
        let expected = |text: &str, calls: &str, rest: &str| (text.to_owned(), calls.to_owned(), rest.to_owned());
        let form = ToolForm::Tagged;
        assert_eq!(said(form, &format!("{}\nDone.\n", tagged("a"))), expected("", "a", "Done."));
        assert_eq!(said(form, &format!("So: {}\nDone.\n", tagged("a"))), expected("So:", "a", "\nDone."));
        // The second is cut.
        let cut = format!("{}\n<tool_call>\n{{\"name\": \"b\", \"argu", tagged("a"));
        assert_eq!(said(form, &cut), expected("", "a", "<tool_call>\n{\"name\": \"b\", \"argu"));
        let two = format!("[{}, {}] and", call("a"), call("b"));
        assert_eq!(said(ToolForm::Listed, &two), expected("", "a b", "and"));
        let two = format!("{}; {}", call("a"), call("b")).replace("arguments", "parameters");
        assert_eq!(said(ToolForm::Bare, &two), expected("", "a b", ""));
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
            assert_eq!(
                form.read(text),
                SaidWithCalls { text: text.to_owned(), calls: Vec::new(), rest: String::new() },
                "{form:?}"
            );
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
