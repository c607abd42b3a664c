//! Tools that an assistant may call: as a request names them, and as calls are answered.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::{Value, json};
use stages::data::prompt::{Calls, SaidWithCalls, Tool, ToolCall, ToolForm};
use stages::data::tokenizer::Tokenizer;

use super::error::ApiError;
use super::fields::Fields;

/// The tools of a request.
pub(super) struct Tools {
    /// As the chat template is given them.
    pub(super) json: Value,
    tools: Vec<Tool>,
    choice: Choice,
    calls: Calls,
}

/// Whether tools are called.
enum Choice {
    /// As the model likes.
    Auto,
    /// One of them at least.
    Required,
    /// This one.
    Named(String),
}

/// How calls are read from what a model said.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallReader {
    pub(super) form: ToolForm,
    pub(super) calls: Calls,
}

impl CallReader {
    /// What a model said. Of several calls where one is wanted the first counts: a model that may say what it likes is
    /// not kept from the others.
    pub(super) fn read(self, text: &str) -> SaidWithCalls {
        let mut said = self.form.read(text);
        match self.calls {
            Calls::One => said.calls.truncate(1),
            Calls::OneOrMore => {}
        }
        said
    }
}

impl Tools {
    /// Reads them; none where there are none, or they are not to be called.
    pub(super) fn read(fields: &mut Fields) -> Result<Option<Self>, ApiError> {
        let is_empty = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
        fields.only("functions", is_empty)?;
        fields.only("function_call", |value| value == "none" || value == "auto")?;
        let json = fields.take("tools");
        if json.as_ref().is_some_and(is_empty) {
            return Err(ApiError::field("tools", "`tools` is empty: leave it out"));
        }
        let choice = fields.take("tool_choice");
        let in_parallel = fields.take("parallel_tool_calls");
        let calls = match in_parallel {
            None | Some(Value::Bool(true)) => Calls::OneOrMore,
            Some(Value::Bool(false)) => Calls::One,
            Some(_) => return Err(ApiError::field("parallel_tool_calls", "`parallel_tool_calls` is not a boolean")),
        };
        let Some(json) = json else {
            return match choice {
                Some(_) => Err(ApiError::field("tool_choice", "`tool_choice` goes with `tools`")),
                None => Ok(None),
            };
        };
        let tools = read_tools(&json)?;
        let is_again = |(index, tool): &(usize, &Tool)| tools[..*index].iter().any(|other| other.name == tool.name);
        if let Some((index, tool)) = tools.iter().enumerate().find(is_again) {
            let name = format!("tools[{index}].function.name");
            let message = format!("`{name}` is `{}`, as that of another tool", tool.name);
            return Err(ApiError::field(name, message));
        }
        let choice = read_choice(choice, &tools)?;
        Ok(choice.map(|choice| Self { json, tools, choice, calls }))
    }

    /// How calls of them are read.
    pub(super) fn reader(&self, form: ToolForm) -> CallReader {
        CallReader { form, calls: self.calls }
    }

    /// Those of the arguments of each.
    pub(super) fn schemas(&self) -> impl Iterator<Item = &Value> {
        self.tools.iter().map(|tool| &tool.parameters)
    }

    /// The grammar of what has to be called, if anything has. Without one no call is held to its schema, not even of a
    /// tool that is `strict`: OpenAI's client says so of every tool that it makes of a class.
    pub(super) fn grammar(&self, form: ToolForm, tokenizer: &Tokenizer) -> Option<String> {
        let special = |text: &str| tokenizer.token_id(text).filter(|id| tokenizer.is_special(*id));
        match &self.choice {
            Choice::Auto => None,
            Choice::Required => Some(form.grammar(&self.tools, self.calls, special)),
            Choice::Named(name) => {
                let tools: Vec<Tool> = self.tools.iter().filter(|tool| tool.name == *name).cloned().collect();
                Some(form.grammar(&tools, self.calls, special))
            }
        }
    }
}

fn read_tools(json: &Value) -> Result<Vec<Tool>, ApiError> {
    let Value::Array(tools) = json else { return Err(ApiError::field("tools", "`tools` is not a list")) };
    tools.iter().enumerate().map(|(index, tool)| read_tool(&format!("tools[{index}]"), tool)).collect()
}

fn read_tool(at: &str, tool: &Value) -> Result<Tool, ApiError> {
    let wrong = |name: &str, what: &str| ApiError::field(format!("{at}{name}"), format!("`{at}{name}` {what}"));
    match tool["type"].as_str() {
        Some("function") => {}
        Some(other) => {
            let message = format!("`{at}.type` is `{other}`, and only functions are supported");
            return Err(ApiError::unsupported(format!("{at}.type"), message));
        }
        None => return Err(wrong(".type", "is missing")),
    }
    let function = &tool["function"];
    let name = function["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| wrong(".function.name", "is missing"))?;
    let parameters = match &function["parameters"] {
        Value::Null => json!({ "type": "object", "properties": {} }),
        Value::Object(schema) if schema.get("type").is_none_or(|kind| kind == "object") => {
            Value::Object(schema.clone())
        }
        Value::Object(_) => return Err(wrong(".function.parameters", "is not a schema of type `object`")),
        _ => return Err(wrong(".function.parameters", "is not a schema")),
    };
    Ok(Tool { name: name.to_owned(), parameters })
}

/// What `tool_choice` asks for; none where nothing is to be called.
fn read_choice(choice: Option<Value>, tools: &[Tool]) -> Result<Option<Choice>, ApiError> {
    let wrong = |message: String| Err(ApiError::field("tool_choice", message));
    match choice {
        None => Ok(Some(Choice::Auto)),
        Some(choice) => match choice.as_str() {
            Some("auto") => Ok(Some(Choice::Auto)),
            Some("none") => Ok(None),
            Some("required") => Ok(Some(Choice::Required)),
            Some(other) => wrong(format!("`tool_choice` is `{other}`, and none of none, auto and required")),
            None => match choice["function"]["name"].as_str() {
                Some(name) if tools.iter().any(|tool| tool.name == name) => Ok(Some(Choice::Named(name.to_owned()))),
                Some(name) => wrong(format!("`tool_choice` is `{name}`, which is not in `tools`")),
                None => wrong("`tool_choice` is neither a string nor the name of a function".to_owned()),
            },
        },
    }
}

/// Calls as they are answered. Their ids have nine letters and digits, which is what Mistral's template takes.
pub(super) fn calls_json(calls: &[ToolCall], answer: &str, choice: usize) -> Vec<Value> {
    let json = |(index, call): (usize, &ToolCall)| {
        let function = json!({ "name": call.name, "arguments": call.arguments });
        json!({ "id": call_id(answer, choice, index), "type": "function", "function": function })
    };
    calls.iter().enumerate().map(json).collect()
}

fn call_id(answer: &str, choice: usize, index: usize) -> String {
    const LETTERS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut hasher = DefaultHasher::new();
    (answer, choice, index).hash(&mut hasher);
    let mut number = hasher.finish();
    let letter = |_| {
        let letter = LETTERS[(number % 36) as usize];
        number /= 36;
        char::from(letter)
    };
    (0..9).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fields: Value) -> Result<Option<Tools>, ApiError> {
        Tools::read(&mut Fields::of(fields.to_string().as_bytes()).ok().unwrap())
    }

    fn tool(name: &str) -> Value {
        json!({ "type": "function", "function": { "name": name, "parameters": { "type": "object" } } })
    }

    #[test]
    fn what_is_wrong_with_tools_is_named() {
        for (fields, param) in [
            (json!({ "tools": {} }), "tools"),
            (json!({ "tools": [{}] }), "tools[0].type"),
            (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
            (json!({ "tools": [tool("a"), { "type": "function" }] }), "tools[1].function.name"),
            (json!({ "tools": [tool("a")], "tool_choice": "must" }), "tool_choice"),
            (json!({ "tools": [tool("a")], "tool_choice": { "function": { "name": "b" } } }), "tool_choice"),
            (json!({ "tool_choice": "required" }), "tool_choice"),
            (json!({ "tool_choice": "none" }), "tool_choice"),
            (json!({ "tools": [] }), "tools"),
            (json!({ "tools": [tool("a"), tool("b"), tool("a")] }), "tools[2].function.name"),
            (json!({ "tools": [tool("a")], "parallel_tool_calls": 1 }), "parallel_tool_calls"),
            (json!({ "functions": [{}] }), "functions"),
        ] {
            let error = read(fields.clone()).err().unwrap_or_else(|| panic!("{fields} is taken"));
            assert_eq!(error.json()["error"]["param"], param, "{fields}");
        }
        let mut list = tool("a");
        list["function"]["parameters"] = json!({ "type": "array", "items": {} });
        let error = read(json!({ "tools": [list] })).err().unwrap();
        assert_eq!(error.json()["error"]["param"], "tools[0].function.parameters");
    }

    /// As OpenAI's client makes tools of classes.
    #[test]
    fn strict_tools_and_single_calls_need_no_choice() {
        let mut strict = tool("a");
        strict["function"]["strict"] = json!(true);
        let call = |name: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{}}}}\n</tool_call>");
        let text = format!("So:\n{}\n{}", call("a"), call("b"));
        for (in_parallel, expected) in
            [(json!(null), vec!["a", "b"]), (json!(true), vec!["a", "b"]), (json!(false), vec!["a"])]
        {
            for choice in [json!(null), json!("auto")] {
                let fields = json!({ "tools": [strict], "parallel_tool_calls": in_parallel, "tool_choice": choice });
                let tools = read(fields).ok().flatten().unwrap();
                let said = tools.reader(ToolForm::Tagged).read(&text);
                assert_eq!(said.calls.iter().map(|call| call.name.as_str()).collect::<Vec<_>>(), expected);
                assert_eq!((said.text.as_str(), said.rest.as_str()), ("So:", ""));
            }
        }
    }

    #[test]
    fn tools_that_are_not_to_be_called_are_none() {
        for fields in [json!({}), json!({ "tools": [tool("a")], "tool_choice": "none" })] {
            assert!(read(fields).unwrap().is_none());
        }
        assert!(read(json!({ "tools": [tool("a")] })).unwrap().is_some());
    }

    #[test]
    fn ids_of_calls_differ() {
        let ids = [call_id("a", 0, 0), call_id("a", 0, 1), call_id("a", 1, 0), call_id("b", 0, 0)];
        assert!(ids.iter().all(|id| id.len() == 9 && id.bytes().all(|letter| letter.is_ascii_alphanumeric())));
        assert_eq!(std::collections::BTreeSet::from(ids.clone()).len(), ids.len());
    }
}
