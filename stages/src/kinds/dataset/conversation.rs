//! Conversations: a list of turns, in OpenAI's spelling or in ShareGPT's.

use serde_json::{Map, Value, json};

use super::TurnOrder;
use super::flaw::{Flaw, Reason, describe};
use crate::data::artifact::Message;
use crate::data::number;

fn flaw(problem: impl Into<String>) -> Flaw {
    Flaw::new(Reason::Turns, problem)
}

/// A list of turns: `role` and `content`, or ShareGPT's `from` and `value`. A text may hold the list as JSON.
pub(super) fn conversation(value: Value, order: TurnOrder) -> Result<Vec<Message>, Flaw> {
    if let Some(digits) = number::find(&value) {
        return Err(flaw(number_that_is_not_read(digits)));
    }
    let turns = match value {
        Value::Array(turns) => turns,
        Value::Null => return Err(Flaw::new(Reason::Null, "is null")),
        Value::String(text) => return of_text(&text, order),
        other => return Err(flaw(format!("has {}, not a list of turns", describe(&other)))),
    };
    if turns.is_empty() {
        return Err(Flaw::new(Reason::Empty, "has a conversation without turns"));
    }
    let of_turn =
        |(index, turn): (usize, Value)| message(turn).map_err(|problem| flaw(format!("turn {}: {problem}", index + 1)));
    let messages = turns.into_iter().enumerate().map(of_turn).collect::<Result<Vec<_>, _>>()?;
    match order {
        TurnOrder::Any => Ok(messages),
        TurnOrder::Alternate => check_order(&messages).map(|()| messages).map_err(flaw),
    }
}

/// Why such a number cannot be part of a conversation.
pub(super) fn number_that_is_not_read(digits: &str) -> String {
    let name = match digits {
        "nan" => "NaN",
        "inf" => "Infinity",
        "-inf" => "-Infinity",
        digits => {
            let digits: String = digits.chars().take(40).collect();
            return format!("has the number {digits}, which does not fit into 64 bits; write it as a string");
        }
    };
    format!("has {name}, which is not JSON; write null, or a string")
}

/// A list of turns that is text.
fn of_text(text: &str, order: TurnOrder) -> Result<Vec<Message>, Flaw> {
    let unreadable = |_| flaw("has a string that is not a list of turns");
    let mut turns: Value = serde_json::from_str(text).map_err(unreadable)?;
    if number::may_be_rounded(&turns) {
        turns = serde_json::from_str(&number::with_digits_kept(text)).map_err(unreadable)?;
    }
    if turns.is_array() { conversation(turns, order) } else { Err(flaw("has a string that is not a list of turns")) }
}

fn message(turn: Value) -> Result<Message, String> {
    let Value::Object(mut turn) = turn else {
        return Err(format!("it is {}, not an object", describe(&turn)));
    };
    // Tables have every field in every row; those that are null say nothing.
    turn.retain(|_, value| !value.is_null());
    let role = match (turn.remove("role"), turn.remove("from")) {
        (Some(Value::String(role)), _) | (None, Some(Value::String(role))) => role,
        _ => return Err("it has no `role`".to_owned()),
    };
    if role.eq_ignore_ascii_case(FUNCTION_CALL) {
        let said = turn.remove("content").or_else(|| turn.remove("value")).unwrap_or_default();
        turn.insert("tool_calls".to_owned(), calls(said)?);
        return Ok(Message { role: "assistant".to_owned(), content: "".into(), other: turn });
    }
    let role = known_role(role);
    if !turn.contains_key("content")
        && let Some(value) = turn.remove("value")
    {
        turn.insert("content".to_owned(), value);
    }
    let content = turn.remove("content").unwrap_or(Value::Null);
    match &content {
        Value::String(_) | Value::Array(_) => {}
        Value::Null if says_otherwise(&turn) => {}
        Value::Null => return Err("it has no `content`".to_owned()),
        other => return Err(format!("its `content` is {}, not a string", describe(other))),
    }
    Ok(Message { role, content, other: turn })
}

/// Whether a turn says something in other fields than `content`.
fn says_otherwise(fields: &Map<String, Value>) -> bool {
    const NAMES: [&str; 5] = ["tool_calls", FUNCTION_CALL, "reasoning_content", "reasoning", "thinking"];
    NAMES.iter().filter_map(|name| fields.get(*name)).any(|value| match value {
        Value::String(text) => !text.trim().is_empty(),
        Value::Array(items) => !items.is_empty(),
        // In a table a turn that does not call has the fields of a call, too.
        Value::Object(map) => map.values().any(|value| !value.is_null()),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    })
}

/// The role of a turn in which LLaMA-Factory's rows call tools.
const FUNCTION_CALL: &str = "function_call";

/// The calls of such a turn, an object with `name` and `arguments` or a list of them as JSON, in OpenAI's format.
fn calls(said: Value) -> Result<Value, String> {
    let said = match said {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|error| format!("it is a `{FUNCTION_CALL}`, and its text is no JSON: {error}"))?,
        said => said,
    };
    let calls = match said {
        Value::Array(calls) => calls,
        call => vec![call],
    };
    let in_form = |call: Value| match &call {
        Value::Object(fields) if fields.get("name").is_some_and(Value::is_string) => {
            Ok(json!({ "type": "function", "function": call }))
        }
        _ => {
            Err(format!("it is a `{FUNCTION_CALL}`, and not an object with `name` and `arguments`, or a list of them"))
        }
    };
    calls.into_iter().map(in_form).collect()
}

/// ShareGPT's names, and Gemini's `model`, as chat templates know them, and `User` as `user`: a turn whose role no
/// template knows is never learned.
fn known_role(role: String) -> String {
    let lower = role.to_ascii_lowercase();
    match lower.as_str() {
        "human" => "user".to_owned(),
        "gpt" | "chatgpt" | "bing" | "bard" | "model" => "assistant".to_owned(),
        "observation" | "function_response" => "tool".to_owned(),
        _ if Speaker::of(&lower) != Speaker::Other => lower,
        _ => role,
    }
}

/// Who speaks, as far as the order of turns goes by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Speaker {
    System,
    User,
    Assistant,
    Tool,
    /// A role that only the chat template knows: it may stand anywhere.
    Other,
}

impl Speaker {
    fn of(role: &str) -> Self {
        match role {
            "system" | "developer" => Self::System,
            "user" => Self::User,
            "assistant" => Self::Assistant,
            "tool" | "ipython" | "function" => Self::Tool,
            _ => Self::Other,
        }
    }
}

/// Whether a role is the assistant's.
pub(super) fn is_assistant(role: &str) -> bool {
    Speaker::of(role) == Speaker::Assistant
}

/// Instructions come first; then the user speaks, and the two take turns. What a tool says answers the assistant.
pub(super) fn check_order(messages: &[Message]) -> Result<(), String> {
    let mut before = None;
    for (index, message) in messages.iter().enumerate() {
        let speaker = Speaker::of(&message.role);
        let problem = match (speaker, before) {
            (Speaker::System, Some(Speaker::System) | None) => None,
            (Speaker::System, _) => Some("instructions stand behind other turns".to_owned()),
            (Speaker::User, Some(Speaker::User)) => Some("the user speaks twice in a row".to_owned()),
            (Speaker::Assistant, Some(Speaker::Assistant)) => Some("the assistant speaks twice in a row".to_owned()),
            (Speaker::Assistant, None | Some(Speaker::System)) => Some("the assistant speaks first".to_owned()),
            (Speaker::Tool, None | Some(Speaker::System | Speaker::User)) => {
                Some("a tool responds, and no assistant has called it".to_owned())
            }
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(format!("turn {} (`{}`): {problem}", index + 1, message.role));
        }
        before = Some(speaker);
    }
    Ok(())
}

/// Whether a turn says nothing at all.
pub(super) fn says_nothing(message: &Message) -> bool {
    let blank = match &message.content {
        Value::String(text) => text.trim().is_empty(),
        Value::Array(parts) => parts.is_empty(),
        _ => true,
    };
    blank && !says_otherwise(&message.other)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn roles(roles: &[&str]) -> Result<Vec<Message>, Flaw> {
        let turns: Vec<Value> = roles.iter().map(|role| json!({"role": role, "content": "x"})).collect();
        conversation(turns.into(), TurnOrder::Alternate)
    }

    #[test]
    fn turns_alternate_behind_the_instructions() {
        for fine in [
            &["user", "assistant"][..],
            &["system", "user", "assistant", "user"],
            &["developer", "system", "user"],
            &["user", "assistant", "tool", "tool", "assistant", "user"],
            &["user", "assistant", "narrator", "assistant"],
            &["system"],
        ] {
            assert!(roles(fine).is_ok(), "{fine:?}");
        }
        for (wrong, turn, problem) in [
            (&["assistant", "user"][..], "turn 1", "speaks first"),
            (&["system", "assistant"], "turn 2", "speaks first"),
            (&["user", "system", "assistant"], "turn 2", "instructions"),
            (&["user", "user"], "turn 2", "the user speaks twice"),
            (&["user", "assistant", "assistant"], "turn 3", "the assistant speaks twice"),
            (&["user", "tool"], "turn 2", "no assistant"),
        ] {
            let flaw = roles(wrong).unwrap_err();
            assert!(flaw.problem.contains(turn) && flaw.problem.contains(problem), "{wrong:?}: {}", flaw.problem);
            let turns: Vec<Value> = wrong.iter().map(|role| json!({"role": role, "content": "x"})).collect();
            assert!(conversation(turns.into(), TurnOrder::Any).is_ok());
        }
    }

    #[test]
    fn both_spellings_and_mixtures_of_them_are_read() {
        let expected = vec![Message::new("user", "Hi"), Message::new("assistant", "Hello"), Message::new("tool", "7")];
        for turns in [
            json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "tool", "content": "7"}]),
            json!([{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}, {"from": "observation", "value": "7"}]),
            json!([{"role": "user", "value": "Hi", "weight": null}, {"from": "assistant", "content": "Hello"}, {"from": "tool", "value": "7"}]),
            json!([{"role": "human", "content": "Hi"}, {"role": "Assistant", "content": "Hello"}, {"from": "TOOL", "value": "7"}]),
            json!([{"role": "user", "content": "Hi"}, {"role": "model", "content": "Hello"}, {"role": "tool", "content": "7"}]),
        ] {
            assert_eq!(conversation(turns.clone(), TurnOrder::Alternate).unwrap(), expected, "{turns}");
            assert_eq!(conversation(turns.to_string().into(), TurnOrder::Alternate).unwrap(), expected);
        }
    }

    #[test]
    fn numbers_without_a_word_in_json_are_named() {
        for (number, problem) in [
            (f64::NAN, "has NaN, which is not JSON"),
            (f64::INFINITY, "has Infinity, which is not JSON"),
            (f64::NEG_INFINITY, "has -Infinity, which is not JSON"),
        ] {
            let turns = json!([{"role": "user", "content": "x", "arguments": {"n": number::float(number)}}]);
            let flaw = conversation(turns, TurnOrder::Any).unwrap_err();
            assert!(flaw.problem.contains(problem), "{}", flaw.problem);
        }
        let turns = json!([{"role": "user", "content": "x", "n": number::special("123456789012345678901")}]);
        assert!(conversation(turns, TurnOrder::Any).unwrap_err().problem.contains("does not fit into 64 bits"));
    }

    #[test]
    fn what_is_no_conversation_is_told_by_its_turn() {
        for (turns, problem) in [
            (json!(7), "a number"),
            (json!("hello"), "not a list of turns"),
            (json!([]), "without turns"),
            (json!(["hello"]), "turn 1: it is text, not an object"),
            (json!([{"content": "x"}]), "no `role`"),
            (json!([{"role": "user"}]), "no `content`"),
            (json!([{"role": "user", "content": null, "id": 1}]), "no `content`"),
            (json!([{"role": "assistant", "tool_calls": []}]), "no `content`"),
            (json!([{"role": "assistant", "function_call": {"name": null, "arguments": null}}]), "no `content`"),
            (json!([{"role": "user", "content": 7}]), "a number"),
        ] {
            let flaw = conversation(turns.clone(), TurnOrder::Any).unwrap_err();
            assert!(flaw.problem.contains(problem), "{turns}: {}", flaw.problem);
        }
    }
}
