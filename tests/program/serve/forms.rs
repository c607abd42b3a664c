//! Answers that hold to a schema, and calls of tools.

use serde_json::{Value, json};
use test_harness::test;

use super::{chat, start, start_with_template};
use crate::support::server::head;

#[test]
fn answers_hold_to_a_schema() {
    let server = start(&[]);
    let schema = json!({
        "type": "object",
        "properties": {
            "city": { "enum": ["Bern", "Zürich"] },
            "days": { "type": "integer", "minimum": 1, "maximum": 14 },
            "tags": { "type": "array", "items": { "type": "boolean" }, "maxItems": 3 },
        },
        "required": ["city", "days", "tags"],
        "additionalProperties": false,
    });
    let mut request = chat();
    request["max_tokens"] = json!(1000);
    request["response_format"] = json!({ "type": "json_schema", "json_schema": { "name": "trip", "schema": schema } });
    request["stop"] = json!(["\"", "days"]);
    let validator = jsonschema::validator_for(&schema).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..8 {
        request["seed"] = json!(seed);
        let (status, answer) = server.post("/v1/chat/completions", &request);
        assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("stop")), "{answer}");
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap();
        assert!(validator.is_valid(&value), "{text}");
        seen.insert(value.to_string());
    }
    assert!(seen.len() > 1, "they are all alike: {seen:?}");
    request["response_format"] = json!({ "type": "json_object" });
    request["max_tokens"] = json!(40);
    let (_, answer) = server.post("/v1/chat/completions", &request);
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.starts_with('{'), "{text}");
}

#[test]
fn tools_are_called_in_the_form_of_the_chat_template() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/data/chat_templates/");
    for (family, beginning) in [
        ("qwen25", "<tool_call>\n{\"name\": \"news\", \"arguments\": "),
        ("mistral_v03", "[TOOL_CALLS] [{\"name\": \"news\", \"arguments\": "),
        ("llama31", "{\"name\": \"news\", \"parameters\": "),
    ] {
        let template = std::fs::read_to_string(format!("{golden}{family}.jinja")).unwrap();
        // This copy of it has no tools where they stand by default.
        let template = template.replace("tools_in_user_message = true", "tools_in_user_message = false");
        let server = start_with_template(&template, &[]);
        let parameters = json!({ "type": "object", "properties": { "city": { "$ref": "#/$defs/City" } },
            "required": ["city"], "additionalProperties": false, "$defs": { "City": { "enum": ["Bern", "Zürich"] } } });
        let tool = |name: &str| json!({ "type": "function", "function": { "name": name, "description": "The weather.", "parameters": parameters } });
        let mut request = chat();
        request["max_tokens"] = json!(1000);
        request["tools"] = json!([tool("weather"), tool("news")]);
        request["tool_choice"] = json!({ "type": "function", "function": { "name": "news" } });
        request["parallel_tool_calls"] = json!(false);
        let (status, answer) = server.post("/v1/chat/completions", &request);
        assert_eq!((status, &answer["choices"][0]["finish_reason"]), (200, &json!("tool_calls")), "{family}: {answer}");
        let message = answer["choices"][0]["message"].clone();
        assert_eq!(message["content"], Value::Null, "{family}");
        let call = &message["tool_calls"][0];
        assert_eq!(call["function"]["name"], "news", "{family}");
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(["Bern", "Zürich"].contains(&arguments["city"].as_str().unwrap()), "{family}: {arguments}");
        // No text of it ends it, and what the limit leaves of one is text.
        let mut others = request.clone();
        others["stop"] = json!(["news", "\""]);
        let (_, answer) = server.post("/v1/chat/completions", &others);
        assert_eq!(
            answer["choices"][0]["message"]["tool_calls"][0]["function"], call["function"],
            "{family}: {answer}"
        );
        others["max_tokens"] = json!(6);
        let (_, answer) = server.post("/v1/chat/completions", &others);
        let cut = &answer["choices"][0];
        assert_eq!(
            (&cut["message"]["tool_calls"], &cut["finish_reason"]),
            (&Value::Null, &json!("length")),
            "{family}"
        );
        let text = cut["message"]["content"].as_str().unwrap();
        assert!(!text.is_empty() && beginning.starts_with(text), "{family}: {text}");
        others["stream"] = json!(true);
        let (_, events) = server.ask(&head("/v1/chat/completions"), &others.to_string());
        let data = events.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
        let said: String =
            data.filter_map(|it| Some(it["choices"][0]["delta"]["content"].as_str()?.to_owned())).collect();
        assert_eq!(said, text, "{family}");
        assert!(events.contains("\"finish_reason\":\"length\""), "{family}: {events}");
        // Streamed it is the same call.
        request["stream"] = json!(true);
        let (_, events) = server.ask(&head("/v1/chat/completions"), &request.to_string());
        let data = events.lines().filter_map(|line| line.strip_prefix("data: "));
        let deltas: Vec<Value> = data.filter_map(|data| serde_json::from_str(data).ok()).collect();
        let streamed = deltas.iter().find_map(|delta| delta["choices"][0]["delta"]["tool_calls"].as_array()).unwrap();
        assert_eq!(streamed[0]["function"], call["function"], "{family}");
        let said = deltas.iter().filter_map(|delta| delta["choices"][0]["delta"]["content"].as_str());
        assert_eq!(said.collect::<String>(), "", "{family}");
        assert_eq!(deltas.last().unwrap()["choices"][0]["finish_reason"], "tool_calls", "{family}");
        // The call and what it came to go back into the conversation; without a choice the model says what it likes.
        let answered = json!({ "role": "tool", "tool_call_id": call["id"], "content": "{\"rain\": true}" });
        let conversation = json!([request["messages"][0], message, answered]);
        let request = json!({ "model": "fresh", "messages": conversation, "tools": request["tools"], "max_tokens": 5, "seed": 1 });
        let (status, answer) = server.post("/v1/chat/completions", &request);
        assert_eq!(status, 200, "{family}: {answer}");
    }
}

#[test]
fn tools_are_an_error_where_the_chat_template_has_none() {
    let server = start_with_template("zephyr", &[]);
    let mut request = chat();
    request["tools"] = json!([{ "type": "function", "function": { "name": "f" } }]);
    for choice in ["auto", "required"] {
        request["tool_choice"] = json!(choice);
        let (status, answer) = server.post("/v1/chat/completions", &request);
        let error = &answer["error"];
        let expected = (400, &json!("tools"), &json!("unsupported_parameter"));
        assert_eq!((status, &error["param"], &error["code"]), expected, "{choice}: {answer}");
    }
    // None of them is to be called.
    request["tool_choice"] = json!("none");
    let (status, answer) = server.post("/v1/chat/completions", &request);
    assert_eq!(status, 200, "{answer}");
}
