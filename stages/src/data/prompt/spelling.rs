//! One conversation has several spellings: the arguments of a call are an object or, as in OpenAI's API, JSON as a
//! string; what is said is a string or a list of parts; reasoning has three names. A chat template is made for one of
//! each. Over the other it fails, or writes what no model was trained on: `tojson` puts a string in quotes, and `+` a
//! list in Python's brackets. So a template is shown both, and is given what it writes as it should. What it does not
//! write at all, calls and tools, is refused.

use std::borrow::Cow;

use serde_json::{Map, Value, json};

use super::chat::ChatError;
use super::python;
use crate::data::artifact::{Message, TOOLS};
use crate::data::number;

const CALLS: &str = "tool_calls";
const ARGUMENTS: &str = "arguments";

/// OpenAI's older format of a call, an object of its own.
const FUNCTION_CALL: &str = "function_call";

/// The names that reasoning has, as in transformers: the first is what templates read, gpt-oss reads the second.
pub(super) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Whether an assistant's message has reasoning, under whichever name.
pub(super) fn has_reasoning(message: &Message) -> bool {
    let is_there =
        |name: &&str| message.other.get(*name).and_then(Value::as_str).is_some_and(|text| !text.trim().is_empty());
    message.role == "assistant" && REASONING.iter().any(is_there)
}

/// Whether a message calls tools.
pub(super) fn calls_tools(message: &Message) -> bool {
    has(message, CALLS)
}

/// Whether a field of a message is a list with something in it.
fn has(message: &Message, name: &str) -> bool {
    message.other.get(name).and_then(Value::as_array).is_some_and(|all| !all.is_empty())
}

/// What probes call things.
const TOOL: &str = "name_of_a_tool";
const CALLED: &str = "name_of_a_call";

/// A tool that templates are shown.
pub(super) fn tool(name: &str) -> Value {
    let parameters = json!({ "type": "object", "properties": { "n": { "type": "integer" } } });
    json!({ "type": "function", "function": { "name": name, "description": "A tool.", "parameters": parameters } })
}

/// A question and the call that answers it, which templates are shown.
pub(super) fn conversation_with_a_call(name: &str, arguments: Value) -> [Message; 2] {
    let call = json!({ "type": "function", "id": "abcdefghi", "function": { "name": name, ARGUMENTS: arguments } });
    let mut calls = Message::new("assistant", "");
    calls.other.insert(CALLS.to_owned(), json!([call]));
    [Message::new("user", "Call it."), calls]
}

/// How a template wants the arguments of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arguments {
    /// Both spellings are fine, or neither is.
    Either,
    Object,
    Text,
}

/// How a template wants what is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Text,
    Parts,
    Either,
}

/// What probes say.
const SAID: &str = "A text.";

impl Content {
    /// How a template wants it, by what it makes of either spelling; none where it refuses one.
    fn told(said: impl Fn(Value) -> Option<String>) -> Self {
        let has_said = |written: &Option<String>| written.as_ref().is_some_and(|written| written.contains(SAID));
        let parts = said(json!([{ "type": "text", "text": SAID }]));
        // A part that is written as an object is not read.
        let is_object = |written: &String| {
            [format!("'text': '{SAID}'"), format!("\"text\": \"{SAID}\""), format!("\"text\":\"{SAID}\"")]
                .iter()
                .any(|object| written.contains(object))
        };
        if !has_said(&parts) || parts.as_ref().is_some_and(is_object) {
            Self::Text
        } else if has_said(&said(SAID.into())) {
            Self::Either
        } else {
            Self::Parts
        }
    }
}

/// What is said, by a user and an assistant, and in instructions.
const SPEAKERS: [&str; 3] = ["user", "assistant", "system"];

/// The spellings that a template writes as it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spelling {
    arguments: Arguments,
    /// By [`SPEAKERS`]; others are taken for users.
    content: [Content; 3],
    writes_calls: bool,
    writes_function_calls: bool,
    writes_tools: bool,
}

impl Spelling {
    /// Whether conversations may be spelled otherwise than some template wants.
    pub(super) fn matters(messages: &[Message]) -> bool {
        const OTHERS: [&str; 3] = [CALLS, FUNCTION_CALL, TOOLS];
        let named = |message: &Message| REASONING.iter().chain(&OTHERS).any(|name| message.other.contains_key(*name));
        messages.iter().any(|message| message.content.is_array() || named(message))
    }

    /// Whether the template writes parts alone of some speaker, so that texts are spelled otherwise, too.
    pub(super) fn wants_parts(self) -> bool {
        self.content.contains(&Content::Parts)
    }

    /// What a template wants, by what it makes of conversations; none where it refuses one.
    pub(super) fn of(render: impl Fn(&[Message]) -> Option<String>) -> Self {
        let content = SPEAKERS.map(|speaker| {
            Content::told(|content| {
                let said = Message { content, ..Message::new(speaker, "") };
                match speaker {
                    "user" => render(&[said]),
                    "assistant" => render(&[Message::new("user", "x"), said]),
                    _ => render(&[said, Message::new("user", "x")]),
                }
            })
        });
        let called = |arguments: Value| {
            let [mut asks, calls] = conversation_with_a_call(CALLED, arguments);
            asks.other.insert(TOOLS.to_owned(), json!([tool(TOOL)]));
            render(&[asks, calls])
        };
        let (object, written) = (json!({ "n": 1 }), r#"{"n": 1}"#);
        let quoted = Value::from(written).to_string();
        let (of_object, of_text) = (called(object), called(written.into()));
        let arguments = match (&of_object, &of_text) {
            (Some(_), None) => Arguments::Object,
            (Some(_), Some(text)) if text.contains(&quoted) => Arguments::Object,
            (None, Some(_)) => Arguments::Text,
            _ => Arguments::Either,
        };
        // One that refuses both says so itself.
        let writes = |name| of_object.as_ref().or(of_text.as_ref()).is_none_or(|text| text.contains(name));
        let mut calls = Message::new("assistant", "");
        calls.other.insert(FUNCTION_CALL.to_owned(), json!({ "name": CALLED, ARGUMENTS: written }));
        let of_function = render(&[Message::new("user", "Call it."), calls]);
        Self {
            arguments,
            content,
            writes_calls: writes(CALLED),
            writes_function_calls: of_function.is_none_or(|text| text.contains(CALLED)),
            writes_tools: writes(TOOL),
        }
    }

    /// Checks that the template writes the calls and the tools that are there.
    ///
    /// # Errors
    /// Fails where it would leave them out.
    pub(super) fn check(self, messages: &[Message]) -> Result<(), ChatError> {
        if !self.writes_tools && messages.first().is_some_and(|first| has(first, TOOLS)) {
            return Err(ChatError::Tools);
        }
        if let Some(index) = messages.iter().position(calls_tools).filter(|_| !self.writes_calls) {
            return Err(ChatError::Calls { turn: index + 1 });
        }
        // What has both is written as the newer of them. In a table a turn that does not call has the fields of a call,
        // too.
        let in_older_format = |message: &Message| {
            let call = message.other.get(FUNCTION_CALL).and_then(Value::as_object);
            call.is_some_and(|call| call.values().any(|value| !value.is_null())) && !calls_tools(message)
        };
        let older = messages.iter().position(in_older_format).filter(|_| !self.writes_function_calls);
        older.map_or(Ok(()), |index| Err(ChatError::FunctionCall { turn: index + 1 }))
    }

    /// The messages as the template wants them.
    ///
    /// # Errors
    /// Fails where arguments are text and no JSON object, and where a part is no text.
    pub(super) fn apply(self, messages: &[Message]) -> Result<Cow<'_, [Message]>, ChatError> {
        let mut messages = Cow::Borrowed(messages);
        for index in 0..messages.len() {
            let speaker = SPEAKERS.iter().position(|speaker| *speaker == messages[index].role).unwrap_or(0);
            let content = match (&messages[index].content, self.content[speaker]) {
                (Value::Array(parts), Content::Text) => {
                    Some(joined(parts).map_err(|found| ChatError::Part { turn: index + 1, found })?.into())
                }
                (Value::Array(parts), Content::Parts | Content::Either) => with_types(parts),
                (Value::String(text), Content::Parts) => Some(json!([{ "type": "text", "text": text }])),
                _ => None,
            };
            if let Some(content) = content {
                messages.to_mut()[index].content = content;
            }
            if let Some(reasoning) = REASONING.iter().find_map(|name| messages[index].other.get(*name))
                && REASONING[..2].iter().any(|name| !messages[index].other.contains_key(*name))
            {
                let reasoning = reasoning.clone();
                let other = &mut messages.to_mut()[index].other;
                other.insert(REASONING[0].to_owned(), reasoning.clone());
                other.entry(REASONING[1]).or_insert(reasoning);
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

/// Parts of which one is text without saying so, each with its type.
fn with_types(parts: &[Value]) -> Option<Value> {
    let is_untyped = |part: &Value| part.get("type").is_none() && part["text"].is_string();
    parts.iter().any(is_untyped).then(|| {
        let mut parts = parts.to_vec();
        parts.iter_mut().filter(|part| is_untyped(part)).for_each(|part| part["type"] = "text".into());
        parts.into()
    })
}

/// The text of parts that are all text; else what one of them is.
fn joined(parts: &[Value]) -> Result<String, String> {
    let mut text = String::new();
    for part in parts {
        match (part.get("type").map_or(Some("text"), Value::as_str), &part["text"]) {
            (Some("text"), Value::String(said)) => text += said,
            (Some(kind), _) if kind != "text" => return Err(format!("of type `{kind}`")),
            _ => return Err("that is not `{type: text, text: …}`".to_owned()),
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::chat::ChatTemplate;
    use super::super::named::CHATML;
    use super::super::train_on::TrainOn;
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
        for other in [json!(["One"]), json!([{ "type": "text", "text": null }])] {
            let error = said(&plain, &other).unwrap_err().to_string();
            assert!(error.contains("a part that is not `{type: text"), "{error}");
        }
        assert_eq!(said(&plain, &json!([{ "text": "One" }])).unwrap(), "<One>");
        let reads_parts = template(
            "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
             {{ part.text if part.type == 'text' else '(image)' }}{% endfor %}{% endif %}>{% endfor %}",
        );
        assert_eq!(said(&reads_parts, &parts).unwrap(), "<One, two>");
        assert_eq!(said(&reads_parts, &image).unwrap(), "<See(image)>");
    }

    #[test]
    fn parts_are_given_to_templates_that_read_them() {
        let parts = json!([{ "type": "text", "text": "Hello " }, { "text": " world" }]);
        let template = |source: &str| ChatTemplate::new(source, BTreeMap::new()).unwrap();
        let said = |template: &ChatTemplate, role: &str, content: &Value| {
            let said = Message { content: content.clone(), ..Message::new(role, "") };
            template.render(&[said, Message::new("user", "x")][..if role == "user" { 1 } else { 2 }], false).unwrap()
        };
        let parts_alone = template(
            "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}",
        );
        assert_eq!(said(&parts_alone, "user", &parts), "<user>[text:Hello ][text: world]");
        assert_eq!(said(&parts_alone, "user", &"Hello".into()), "<user>[text:Hello]");
        let trims = template(
            "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}\
             {% if p.type == 'text' %}{{ p.text|trim }}{% endif %}{% endfor %}{% endif %}>{% endfor %}",
        );
        assert_eq!(said(&trims, "user", &parts), "<Helloworld>");
        assert_eq!(said(&trims, "user", &" Hello".into()), "< Hello>");
        // What instructions are may differ from what users say.
        let of_users = template(
            "{% for m in messages %}<{% if m.role == 'system' %}{{ m.content }}{% else %}{% for p in m.content %}\
             {{ p.text|trim }}{% endfor %}{% endif %}>{% endfor %}",
        );
        assert_eq!(said(&of_users, "system", &parts), "<Hello  world><x>");
        assert_eq!(said(&of_users, "user", &parts), "<Helloworld>");
    }

    #[test]
    fn turns_said_in_parts_are_found() {
        let source = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}[{{ p.text }}]{% endfor %}{{ '|' if m.role \
                      == 'user' or loop.last else '!' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        let template = ChatTemplate::new(source, BTreeMap::new()).unwrap();
        let mut turns = ["a", "b", "c", "d"].map(|text| Message::new("user", text));
        (turns[1].role, turns[3].role) = ("assistant".to_owned(), "assistant".to_owned());
        turns[1].content = json!([{ "type": "text", "text": "A " }, { "type": "text", "text": "B" }]);
        let turns = template.turns(&turns, TrainOn::Assistant).unwrap();
        let learned: Vec<_> = turns.iter().filter(|turn| turn.learn).map(|turn| turn.text.as_str()).collect();
        assert_eq!(learned, ["[A ][B]!", "[d]|"]);
    }

    #[test]
    fn reasoning_has_three_names() {
        let template = |name: &str| {
            let source = format!("{{% for m in messages %}}({{{{ m.{name} }}}}){{{{ m.content }}}}{{% endfor %}}");
            ChatTemplate::new(&source, BTreeMap::new()).unwrap()
        };
        for (name, reads) in
            [("reasoning", "reasoning_content"), ("thinking", "reasoning_content"), ("reasoning_content", "thinking")]
        {
            let mut message = Message::new("assistant", "4");
            message.other.insert(name.to_owned(), "2 + 2".into());
            assert_eq!(template(reads).render(&[message], false).unwrap(), "(2 + 2)4", "{name}");
        }
    }

    #[test]
    fn calls_in_the_older_format_are_refused_by_their_turn_where_a_template_does_not_write_them() {
        let template = |source: &str| ChatTemplate::new(source, BTreeMap::new()).unwrap();
        let mut calls = Message { content: Value::Null, ..Message::new("assistant", "") };
        calls.other.insert(FUNCTION_CALL.to_owned(), json!({ "name": "f", ARGUMENTS: r#"{"x": 1}"# }));
        let mut messages = [Message::new("user", "x"), calls];
        for plain in [CHATML, "{% for m in messages %}{{ m.content }}{% endfor %}"] {
            let error = template(plain).check(&messages).unwrap_err().to_string();
            assert!(error.contains("turn 2 has a `function_call`"), "{error}");
        }
        let writes = "{% for m in messages %}{{ m.content or m.function_call.name }}{% endfor %}";
        assert!(template(writes).check(&messages).is_ok());
        messages[1].content = "y".into();
        for none in [Value::Null, json!({}), json!({ "name": null, ARGUMENTS: null })] {
            messages[1].other.insert(FUNCTION_CALL.to_owned(), none);
            assert!(template("{{ messages[1].content }}").check(&messages).is_ok());
        }
    }

    #[test]
    fn calls_and_tools_that_a_template_does_not_write_are_refused() {
        let plain = ChatTemplate::new("{% for m in messages %}{{ m.content }}{% endfor %}", BTreeMap::new()).unwrap();
        let with = |name: &str, value: Value| {
            let mut message = Message::new("assistant", "x");
            message.other.insert(name.to_owned(), value);
            plain.check(&[message]).map_err(|error| error.to_string())
        };
        let call = json!([{ "type": "function", "function": { "name": "a", "arguments": {} } }]);
        assert!(with(CALLS, call.clone()).unwrap_err().contains("turn 1 calls a tool"));
        assert!(with(TOOLS, call).unwrap_err().contains("does not write tools"));
        assert_eq!([with(CALLS, json!([])), with(TOOLS, json!([]))], [Ok(()), Ok(())]);
    }
}
