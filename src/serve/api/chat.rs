//! `POST /v1/chat/completions`.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use stages::compute::inference::{ChosenToken, Constraint, TokenLogprobs};
use stages::data::artifact::{Message, TOOLS};
use stages::data::prompt::ToolCall;

use super::Head;
use super::answer::{Chunks, Completed, Usage};
use super::error::ApiError;
use super::fields::Fields;
use super::options::{MOST_LOGPROBS, Options};
use super::tools::{CallReader, Tools, calls_json};
use crate::inference::{Named, Vocabulary};
use crate::serve::worker::Finish;

/// Why an answer with calls ended: for them, unless the limit may have cut another.
fn finish_of_calls(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "tool_calls",
        Finish::Length => finish.name(),
    }
}

/// What is asked.
pub(super) struct ChatRequest {
    pub(super) model: String,
    pub(super) messages: Vec<Message>,
    pub(super) options: Options,
    /// How many likely tokens are wanted beside each, where log-probabilities are wanted.
    pub(super) logprobs: Option<usize>,
    /// The schema of the answer, where it is to be JSON.
    schema: Option<Value>,
    tools: Option<Tools>,
}

impl ChatRequest {
    pub(super) fn read(body: &[u8], vocabulary: &Vocabulary) -> Result<Self, ApiError> {
        let mut fields = Fields::of(body)?;
        let model = fields.string("model")?.ok_or_else(|| ApiError::field("model", "`model` is missing"))?;
        let messages = fields.take("messages").ok_or_else(|| ApiError::field("messages", "`messages` is missing"))?;
        let messages = read_messages(messages)?;
        let mut options = Options::read(&mut fields, vocabulary)?;
        options.max_tokens = max_tokens(&mut fields)?;
        let logprobs = fields.boolean("logprobs")?;
        let top = fields.integer("top_logprobs", 0..=MOST_LOGPROBS)?;
        if top.is_some() && !logprobs {
            return Err(ApiError::field("top_logprobs", "`top_logprobs` goes with `logprobs: true`"));
        }
        let mut messages = messages;
        let tools = Tools::read(&mut fields)?;
        if let Some(tools) = &tools {
            messages[0].other.insert(TOOLS.to_owned(), tools.json.clone());
        }
        let schema = fields.take("response_format").map_or(Ok(None), |format| answer_schema(&format))?;
        if schema.is_some() && tools.is_some() {
            let message = "`response_format` is not supported together with `tools`";
            return Err(ApiError::unsupported("response_format", message));
        }
        fields.only("modalities", |value| *value == json!(["text"]))?;
        fields.finish()?;
        let logprobs = logprobs.then(|| top.unwrap_or(0) as usize);
        Ok(Self { model, messages, options, logprobs, schema, tools })
    }

    /// The same, where answers end before a text of the model's own, too.
    pub(super) fn ending_at(self, text: Option<&str>) -> Self {
        Self { options: self.options.ending_at(text), ..self }
    }

    /// The same, where a grammar alone ends answers.
    pub(super) fn ending_by_grammar(self) -> Self {
        Self { options: self.options.ending_by_grammar(), ..self }
    }

    /// How calls of the request's tools are read from what a model writes, where it has any.
    pub(super) fn call_reader(&self, model: &Named) -> Result<Option<CallReader>, ApiError> {
        match (&self.tools, model.tool_form()) {
            (None, _) => Ok(None),
            (Some(tools), Some(form)) => Ok(Some(tools.reader(form))),
            (Some(_), None) => {
                let message = "`tools` is not supported: the model's chat template has no tools, or writes calls in a \
                    format that this server does not support";
                Err(ApiError::unsupported("tools", message))
            }
        }
    }

    /// What the answer has to hold to.
    pub(super) fn constraint(
        &self,
        reader: Option<CallReader>,
        vocabulary: &Vocabulary,
    ) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        let grammars = || {
            let grammars = vocabulary.grammars();
            grammars.map_err(|error| ApiError::unsupported("response_format", error.to_string()))
        };
        let wrong =
            |field: &'static str| move |error| ApiError::field(field, format!("`{field}` cannot be held to: {error}"));
        if let Some(schema) = &self.schema {
            let constraint = grammars()?.json(schema);
            return constraint.map(Some).map_err(wrong("response_format"));
        }
        let Some((tools, reader)) = self.tools.as_ref().zip(reader) else { return Ok(None) };
        match tools.grammar(reader.form, &vocabulary.tokenizer) {
            Some(grammar) => grammars()?.lark(grammar, tools.schemas()).map(Some).map_err(wrong("tools")),
            None => Ok(None),
        }
    }
}

/// The schema of an answer that is to be JSON.
fn answer_schema(format: &Value) -> Result<Option<Value>, ApiError> {
    let wrong = |name: &str, what: &str| ApiError::field(name, format!("`{name}` {what}"));
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(json!({ "type": "object" }))),
        Some("json_schema") => match &format["json_schema"]["schema"] {
            Value::Object(schema) => Ok(Some(Value::Object(schema.clone()))),
            Value::Null => Err(wrong("response_format.json_schema.schema", "is missing")),
            _ => Err(wrong("response_format.json_schema.schema", "is not an object")),
        },
        Some(_) | None => Err(wrong("response_format.type", "is not text, json_object or json_schema")),
    }
}

/// Most new tokens, by the newer or the older name.
fn max_tokens(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let newer = fields.integer("max_completion_tokens", 1..=i64::MAX)?;
    let older = fields.integer("max_tokens", 1..=i64::MAX)?;
    match (newer, older) {
        (Some(newer), Some(older)) if newer != older => {
            let message = "`max_tokens` is an older name of `max_completion_tokens`, and the two differ";
            Err(ApiError::field("max_tokens", message))
        }
        (newer, older) => Ok(newer.or(older).map(|most| most as usize)),
    }
}

fn read_messages(messages: Value) -> Result<Vec<Message>, ApiError> {
    let Value::Array(messages) = messages else {
        return Err(ApiError::field("messages", "`messages` is not a list"));
    };
    if messages.is_empty() {
        return Err(ApiError::field("messages", "`messages` is empty"));
    }
    messages.into_iter().enumerate().map(|(index, message)| read_message(index, message)).collect()
}

fn read_message(index: usize, message: Value) -> Result<Message, ApiError> {
    let at = |field: &str| format!("messages[{index}]{field}");
    let Value::Object(mut message) = message else {
        return Err(ApiError::field(at(""), format!("`{}` is not an object", at(""))));
    };
    let role = match message.remove("role") {
        // The name that `system` has for newer models.
        Some(Value::String(role)) if role == "developer" => "system".to_owned(),
        Some(Value::String(role)) if ["system", "user", "assistant", "tool"].contains(&role.as_str()) => role,
        _ => {
            let message = format!("`{}` is not system, developer, user, assistant or tool", at(".role"));
            return Err(ApiError::field(at(".role"), message));
        }
    };
    let calls = match message.remove("tool_calls").filter(|calls| !calls.is_null()) {
        Some(calls) if role == "assistant" => Some(read_calls(&at(".tool_calls"), calls)?),
        Some(_) => return Err(ApiError::field(at(".tool_calls"), format!("`{}` goes with an assistant", at("")))),
        None => None,
    };
    let content = match message.remove("content") {
        None | Some(Value::Null) if calls.is_some() => String::new(),
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => {
            let parts = parts.into_iter().enumerate();
            parts.map(|(part, value)| read_part(&at(&format!(".content[{part}]")), &value)).collect::<Result<_, _>>()?
        }
        _ => {
            let message = format!("`{}` is neither a string nor a list of parts", at(".content"));
            return Err(ApiError::field(at(".content"), message));
        }
    };
    message.retain(|_, value| !value.is_null());
    let mut read = Message::new(&role, &content);
    read.other.extend(calls.map(|calls| ("tool_calls".to_owned(), calls)));
    // The chat template decides what it writes of them.
    let texts: &[&str] = match role.as_str() {
        "tool" => &["tool_call_id", "name"],
        "assistant" => &["name", "reasoning_content"],
        _ => &["name"],
    };
    for name in texts {
        match message.remove(*name) {
            Some(value) if value.is_string() => drop(read.other.insert((*name).to_owned(), value)),
            Some(_) => {
                let name = at(&format!(".{name}"));
                return Err(ApiError::field(name.clone(), format!("`{name}` is not a string")));
            }
            None => {}
        }
    }
    match message.keys().next() {
        Some(name) => {
            let name = at(&format!(".{name}"));
            let message = format!("`{name}` is not supported by this server");
            Err(ApiError::unsupported(name, message))
        }
        None => Ok(read),
    }
}

/// Calls that an assistant has made, with their arguments as the model wrote them.
fn read_calls(at: &str, calls: Value) -> Result<Value, ApiError> {
    let Value::Array(calls) = calls else {
        return Err(ApiError::field(at, format!("`{at}` is not a list")));
    };
    for (index, call) in calls.iter().enumerate() {
        let at = |name: &str| format!("{at}[{index}].function.{name}");
        if !call["function"]["name"].is_string() {
            return Err(ApiError::field(at("name"), format!("`{}` is missing", at("name"))));
        }
        let arguments = call["function"]["arguments"].as_str().map(serde_json::from_str::<Map<String, Value>>);
        if !matches!(arguments, Some(Ok(_))) {
            let name = at("arguments");
            return Err(ApiError::field(name.clone(), format!("`{name}` is not a JSON object as a string")));
        }
    }
    Ok(Value::Array(calls))
}

/// A part of a message, which must be text. Its other keys are ignored: clients send `cache_control`, for the caches of
/// other servers.
fn read_part(at: &str, part: &Value) -> Result<String, ApiError> {
    match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => Ok(text.to_owned()),
        (Some("text") | None, _) => Err(ApiError::field(at, format!("`{at}` is not a part with a type and a text"))),
        (Some(other), _) => Err(ApiError::unsupported(
            format!("{at}.type"),
            format!("`{at}` is of type `{other}`, and only text is supported"),
        )),
    }
}

/// The whole answer.
pub(super) fn answer(
    head: &Head,
    completed: &[Completed],
    usage: Usage,
    wants_logprobs: bool,
    reader: Option<CallReader>,
    vocabulary: &Vocabulary,
) -> Value {
    let choice = |completed: &Completed| {
        let entries = completed.tokens.iter().filter_map(|(id, found)| found.as_ref().map(|found| (*id, found)));
        let logprobs = wants_logprobs.then(|| {
            json!({ "content": entries.map(|(id, found)| entry(id, found, vocabulary)).collect::<Vec<_>>(), "refusal": null })
        });
        let (message, finish) = message(completed, reader, &head.id);
        json!({ "index": completed.index, "message": message, "logprobs": logprobs, "finish_reason": finish })
    };
    head.whole("chat.completion", completed.iter().map(choice).collect(), usage)
}

/// The message of a choice, and why it ended. Its content is the text outside of calls; one that the limit cut is text.
fn message(completed: &Completed, reader: Option<CallReader>, answer: &str) -> (Value, &'static str) {
    let mut message = json!({ "role": "assistant", "content": completed.text, "refusal": null });
    let said = reader.map(|reader| reader.read(&completed.text)).filter(|said| !said.calls.is_empty());
    let Some(said) = said else { return (message, completed.finish.name()) };
    let content = said.text + &said.rest;
    message["content"] = if content.is_empty() { Value::Null } else { json!(content) };
    message["tool_calls"] = calls_json(&said.calls, answer, completed.index).into();
    (message, finish_of_calls(completed.finish))
}

/// What an event of a chat is called.
const CHUNK: &str = "chat.completion.chunk";

/// The events of a chat.
pub(super) struct ChatChunks {
    pub(super) head: Head,
    pub(super) include_usage: bool,
    pub(super) wants_logprobs: bool,
    pub(super) vocabulary: std::sync::Arc<Vocabulary>,
    /// Where tools may be called, how, and what of each choice's text may be a call.
    pub(super) calls: Option<(CallReader, BTreeMap<usize, Held>)>,
}

/// The text of a choice in which tools may be called.
#[derive(Debug, Default)]
pub(super) struct Held {
    text: String,
    /// Bytes of it that have been sent.
    sent: usize,
}

impl Held {
    /// What can be sent: what stands before the calls, or before what may become one.
    fn settled(&mut self, reader: CallReader) -> String {
        // White space before a call is not sent with it.
        let end = reader.form.begin(&self.text).unwrap_or(self.text.len());
        let end = self.text[..end].trim_end().len().max(self.sent);
        let settled = self.text[self.sent..end].to_owned();
        self.sent = end;
        settled
    }

    /// What is left at the end: text that was not sent and is not a call, and the calls.
    fn rest(self, reader: CallReader) -> (String, Vec<ToolCall>) {
        let said = reader.read(&self.text);
        let text = if said.calls.is_empty() { self.text[self.sent..].to_owned() } else { said.rest };
        (text, said.calls)
    }
}

impl ChatChunks {
    fn chunk(&self, index: usize, delta: Map<String, Value>, logprobs: Value, finish: Option<&str>) -> Value {
        let choice = json!({ "index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish });
        self.head.chunk(CHUNK, choice, self.include_usage)
    }
}

impl Chunks for ChatChunks {
    fn first(&self, index: usize) -> Option<Value> {
        let delta = [("role".to_owned(), json!("assistant")), ("content".to_owned(), json!(""))];
        Some(self.chunk(index, Map::from_iter(delta), Value::Null, None))
    }

    fn more(&mut self, index: usize, text: &str, token: Option<(u32, Option<&TokenLogprobs>)>) -> Option<Value> {
        let text = match &mut self.calls {
            Some((reader, held)) => {
                let held = held.entry(index).or_default();
                held.text.push_str(text);
                Cow::Owned(held.settled(*reader))
            }
            None => Cow::Borrowed(text),
        };
        let found = token.and_then(|(id, found)| Some((id, found?))).filter(|_| self.wants_logprobs);
        if text.is_empty() && found.is_none() {
            return None;
        }
        let logprobs = found.map(|(id, found)| json!({ "content": [entry(id, found, &self.vocabulary)] }));
        let delta = [("content".to_owned(), json!(text))];
        Some(self.chunk(index, Map::from_iter(delta), json!(logprobs), None))
    }

    fn last(&mut self, index: usize, finish: Finish, _: Option<&ChosenToken>) -> Vec<Value> {
        let held = self.calls.as_mut().map(|(reader, held)| (*reader, held.remove(&index).unwrap_or_default()));
        let end = |finish| self.chunk(index, Map::new(), Value::Null, Some(finish));
        let Some((reader, held)) = held else { return vec![end(finish.name())] };
        let (rest, calls) = held.rest(reader);
        let delta =
            |name: &str, value: Value| self.chunk(index, Map::from_iter([(name.to_owned(), value)]), Value::Null, None);
        let rest = (!rest.is_empty()).then(|| delta("content", json!(rest)));
        if calls.is_empty() {
            return rest.into_iter().chain([end(finish.name())]).collect();
        }
        let mut calls = calls_json(&calls, &self.head.id, index);
        calls.iter_mut().enumerate().for_each(|(number, call)| call["index"] = json!(number));
        rest.into_iter().chain([delta("tool_calls", calls.into()), end(finish_of_calls(finish))]).collect()
    }

    fn usage(&self, usage: Usage) -> Value {
        self.head.whole(CHUNK, Vec::new(), usage)
    }
}

fn entry(id: u32, found: &TokenLogprobs, vocabulary: &Vocabulary) -> Value {
    let token = |id: u32, logprob: f32| {
        let bytes = vocabulary.token_bytes(id);
        json!({ "token": String::from_utf8_lossy(bytes), "logprob": finite(logprob), "bytes": bytes })
    };
    let mut value = token(id, found.logprob);
    value["top_logprobs"] = found.top.iter().map(|(id, logprob)| token(*id, *logprob)).collect();
    value
}

/// A log-probability as JSON has it, which knows no infinity: OpenAI's servers write −9999 for it.
pub(super) fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

#[cfg(test)]
mod tests {
    use stages::data::prompt::{Calls, ToolForm};

    use super::*;

    /// Content, names of calls and reason of the end of an answer, whole.
    fn whole(reader: CallReader, text: &str, finish: Finish) -> (Value, Vec<String>, &'static str) {
        let completed = Completed {
            index: 0,
            prompt: 0,
            text: text.to_owned(),
            finish,
            tokens: Vec::new(),
            stop_token: None,
            of_prompt: Vec::new(),
        };
        let (message, finish) = message(&completed, Some(reader), "a");
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        let names = calls.iter().map(|call| call["function"]["name"].as_str().unwrap().to_owned()).collect();
        (message["content"].clone(), names, finish)
    }

    /// Content and names of calls of an answer that is streamed.
    fn streamed(reader: CallReader, text: &str) -> (String, Vec<String>) {
        let mut held = Held::default();
        let mut content = String::new();
        for letter in text.chars() {
            held.text.push(letter);
            content += &held.settled(reader);
        }
        let (rest, calls) = held.rest(reader);
        (content + &rest, calls.into_iter().map(|call| call.name).collect())
    }

    #[test]
    fn content_is_what_is_not_a_call_whole_or_streamed() {
        let call = |name: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{}}}}\n</tool_call>");
        let cut = "<tool_call>\n{\"name\": \"b\", \"argu";
        for (form, text, finish, content, names, reason) in [
            (ToolForm::Tagged, call("a"), Finish::Stop, "", vec!["a"], "tool_calls"),
            (
                ToolForm::Tagged,
                format!("So:\n{}\nDone.", call("a")),
                Finish::Stop,
                "So:\nDone.",
                vec!["a"],
                "tool_calls",
            ),
            (ToolForm::Tagged, cut.to_owned(), Finish::Length, cut, vec![], "length"),
            (ToolForm::Tagged, format!("{}\n{cut}", call("a")), Finish::Length, cut, vec!["a"], "length"),
            (ToolForm::Tagged, "It rains. ".to_owned(), Finish::Stop, "It rains. ", vec![], "stop"),
            (ToolForm::Listed, "[TOOL_".to_owned(), Finish::Length, "[TOOL_", vec![], "length"),
            (ToolForm::Bare, "{\"name".to_owned(), Finish::Length, "{\"name", vec![], "length"),
        ] {
            let reader = CallReader { form, calls: Calls::OneOrMore };
            let (found, called, ended) = whole(reader, &text, finish);
            assert_eq!((found.as_str().unwrap_or_default(), ended), (content, reason), "{text}");
            assert_eq!(found.is_null(), content.is_empty(), "{text}");
            assert_eq!(called, names, "{text}");
            assert_eq!(streamed(reader, &text), (content.to_owned(), called), "{text}");
        }
        let reader = CallReader { form: ToolForm::Tagged, calls: Calls::One };
        let text = format!("{}\n{}", call("a"), call("b"));
        assert_eq!(whole(reader, &text, Finish::Stop), (Value::Null, vec!["a".to_owned()], "tool_calls"));
        assert_eq!(streamed(reader, &text), (String::new(), vec!["a".to_owned()]));
    }

    #[test]
    fn what_a_message_brings_beside_its_content_reaches_the_template() {
        let read = |message: Value| {
            let read = read_message(0, message).map_err(|error| error.json()["error"]["param"].clone())?;
            Ok::<_, Value>(Value::Object(read.other))
        };
        for role in ["system", "developer", "user", "assistant", "tool"] {
            let message = json!({ "role": role, "content": "x", "name": "Ada", "refusal": null });
            assert_eq!(read(message), Ok(json!({ "name": "Ada" })), "{role}");
            let wrong = json!({ "role": role, "content": "x", "name": 1 });
            assert_eq!(read(wrong), Err(json!("messages[0].name")), "{role}");
        }
        let reasons = |role: &str| json!({ "role": role, "content": "4", "reasoning_content": "2 + 2" });
        assert_eq!(read(reasons("assistant")), Ok(json!({ "reasoning_content": "2 + 2" })));
        assert_eq!(read(reasons("user")), Err(json!("messages[0].reasoning_content")));
        let part = json!({ "type": "text", "text": "x", "cache_control": { "type": "ephemeral" } });
        assert_eq!(read(json!({ "role": "user", "content": [part] })), Ok(json!({})));
    }
}
