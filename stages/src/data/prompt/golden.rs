//! Prompts against transformers' chat templates and torchtune's instruction templates.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::*;
use crate::data::artifact::{IGNORE_INDEX, Message, Row, RowsFacts, TOOLS};
use crate::data::tokenizer::Tokenizer;

fn golden(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data")).join(path)
}

fn cases(path: &str) -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(golden(path)).unwrap()).unwrap()
}

fn messages(case: &Value) -> Vec<Message> {
    serde_json::from_value(case["messages"].clone()).unwrap()
}

fn chat_template(case: &Value) -> ChatTemplate {
    let name = case["template"].as_str().unwrap();
    let source = std::fs::read_to_string(golden("chat_templates").join(format!("{name}.jinja"))).unwrap();
    let special = [("bos_token", "<|begin_of_text|>"), ("eos_token", "<|end_of_text|>")];
    ChatTemplate::new(&source, special.map(|(role, text)| (role.to_owned(), text.to_owned())).into()).unwrap()
}

#[test]
fn chat_templates_render_as_in_transformers() {
    for case in cases("chat_templates.json") {
        let (template, messages) = (chat_template(&case), messages(&case));
        for (expected, asked) in [(&case["whole"], false), (&case["asked"], true)] {
            match (template.render(&messages, asked), expected["text"].as_str()) {
                (Ok(text), Some(expected)) => assert_eq!(text, expected, "{}", case["template"]),
                (Err(error), None) => {
                    let reason = expected["refused"].as_str().unwrap();
                    assert!(error.to_string().contains(reason), "{error}, and not {reason}");
                }
                (made, _) => panic!("{}: {made:?} and not {expected}", case["template"]),
            }
        }
    }
}

#[test]
fn tools_and_reasoning_are_rendered_as_in_transformers() {
    let cases = cases("tools.json");
    assert_eq!(cases.len(), 12);
    for case in cases {
        let (template, mut messages) = (chat_template(&case), messages(&case));
        messages[0].other.insert(TOOLS.to_owned(), case["tools"].clone());
        for (expected, asked) in [("whole", false), ("asked", true)] {
            let text = template.render(&messages, asked).unwrap();
            assert_eq!(text, case[expected].as_str().unwrap(), "{} {expected}", case["template"]);
            assert!(text.contains("weather"));
        }
        let form = if case["template"] == "mistral_v03" { ToolForm::Listed } else { ToolForm::Tagged };
        assert_eq!(ToolForm::of(&template), Some(form), "{}", case["template"]);
    }
}

/// Qwen 3 takes the reasoning out of earlier turns, so that no prefix of a conversation is rendered as in the whole.
#[test]
fn earlier_turns_of_qwen_3_are_learned_as_they_are_written() {
    let template = chat_template(&json!({ "template": "qwen3" }));
    let messages = ["One?", "1", "Two?", "2"].iter().enumerate();
    let messages = messages.map(|(index, text)| Message::new(["user", "assistant"][index % 2], text));
    let mut messages: Vec<Message> = messages.collect();
    messages[1].other.insert("reasoning_content".to_owned(), "Hm.".into());
    let learned = |messages: &[Message]| -> Vec<String> {
        let turns = template.turns(messages, TrainOn::Assistant).unwrap();
        assert_eq!(
            turns.iter().map(|turn| turn.text.as_str()).collect::<String>(),
            template.render(messages, false).unwrap()
        );
        turns.into_iter().filter(|turn| turn.learn).map(|turn| turn.text).collect()
    };
    assert_eq!(learned(&messages), ["1<|im_end|>\n", "<think>\n\n</think>\n\n2<|im_end|>\n"]);
    // Calls of tools without reasoning.
    let case = cases("tools.json").into_iter().find(|case| case["template"] == "qwen3").unwrap();
    let mut messages = self::messages(&case);
    messages.iter_mut().for_each(|message| drop(message.other.remove("reasoning_content")));
    let learned = learned(&messages);
    assert!(
        learned[0].starts_with("<tool_call>\n{") && learned[0].ends_with("</tool_call><|im_end|>\n"),
        "{learned:?}"
    );
    assert_eq!(learned.len(), 2);
}

/// As the templates of Qwen 3 Thinking and QwQ do, whose finished turns have no such header.
#[test]
fn turns_are_found_where_the_generation_prompt_opens_reasoning() {
    let source = std::fs::read_to_string(golden("chat_templates/qwen3.jinja")).unwrap();
    let asks = source.rfind("{%- if add_generation_prompt %}").unwrap();
    let opens = r"{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}";
    let template = ChatTemplate::new(&format!("{}{opens}", &source[..asks]), BTreeMap::new()).unwrap();
    let messages = ["One?", "1", "Two?", "2"].iter().enumerate();
    let messages = messages.map(|(index, text)| Message::new(["user", "assistant"][index % 2], text));
    let mut messages: Vec<Message> = messages.collect();
    let learned = |messages: &[Message], train_on| -> Vec<String> {
        let turns = template.turns(messages, train_on).unwrap();
        turns.into_iter().filter(|turn| turn.learn).map(|turn| turn.text).collect()
    };
    let last = "\n</think>\n\n2<|im_end|>\n";
    assert_eq!(learned(&messages, TrainOn::Assistant), ["1<|im_end|>\n", last]);
    assert_eq!(learned(&messages, TrainOn::Last), [last]);
    assert_eq!(learned(&messages[..3], TrainOn::Last), ["1<|im_end|>\n"]);
    messages[1].other.insert("reasoning_content".to_owned(), "Hm.".into());
    messages[3].other.insert("reasoning_content".to_owned(), "Well.".into());
    let expected = ["1<|im_end|>\n", "Well.\n</think>\n\n2<|im_end|>\n"];
    assert_eq!(learned(&messages, TrainOn::Assistant), expected);
}

#[test]
fn an_answer_is_what_a_template_writes_of_it_without_reasoning() {
    let template = chat_template(&json!({ "template": "qwen3" }));
    let mut messages = [Message::new("user", "One?"), Message::new("assistant", "1")];
    let asked = template.render(&messages[..1], true).unwrap();
    let answer = |messages: &[Message]| template.answer_to(&asked, messages).unwrap().unwrap();
    assert_eq!(answer(&messages), "<think>\n\n</think>\n\n1");
    messages[1].other.insert("reasoning_content".to_owned(), "Hm.".into());
    assert_eq!(answer(&messages), "<think>\nHm.\n</think>\n\n1");
    assert_eq!(template.end_of_reasoning(), Some("</think>"));
    assert_eq!(behind_reasoning(&answer(&messages), template.end_of_reasoning()), "1");
    for name in ["llama3", "qwen25", "gemma2", "phi3", "mistral_v03", "chatml"] {
        let template = chat_template(&json!({ "template": name }));
        let asked = template.render(&messages[..1], true).unwrap();
        assert_eq!(template.answer_to(&asked, &messages).unwrap().unwrap().trim(), "1", "{name}");
        assert_eq!(template.end_of_reasoning(), None, "{name}");
    }
}

/// Rows of OpenAI's API hold arguments as text, and what is said in parts.
#[test]
fn other_spellings_of_a_conversation_are_rendered_alike() {
    for case in cases("tools.json") {
        let (template, mut messages) = (chat_template(&case), messages(&case));
        messages[0].other.insert(TOOLS.to_owned(), case["tools"].clone());
        let mut spelled = 0;
        for message in &mut messages {
            if let Some(text) = message.content.as_str().filter(|text| text.len() > 1) {
                let (begin, end) = text.split_at(text.char_indices().nth(1).unwrap().0);
                message.content = json!([{ "type": "text", "text": begin }, { "type": "text", "text": end }]);
            }
            for call in message.other.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
                let arguments = &mut call["function"]["arguments"];
                assert_eq!(*arguments, json!({ "city": "Zürich", "days": 2 }));
                *arguments = r#"{"city": "Zürich", "days": 2}"#.into();
                spelled += 1;
            }
        }
        assert!(spelled > 0);
        for (expected, asked) in [("whole", false), ("asked", true)] {
            let text = template.render(&messages, asked).unwrap();
            assert_eq!(text, case[expected].as_str().unwrap(), "{} {expected}", case["template"]);
        }
    }
}

#[test]
fn calls_are_read_back_from_what_templates_write() {
    let mut read = 0;
    for case in cases("tools.json") {
        let form = ToolForm::of(&chat_template(&case)).unwrap();
        for message in messages(&case) {
            let Some(calls) = message.other.get("tool_calls") else { continue };
            let marker =
                if form == ToolForm::Tagged { "\n<tool_call>\n{\"name\": \"weather\"" } else { "[TOOL_CALLS] [{" };
            let whole = case["whole"].as_str().unwrap();
            let said = &whole[whole.find(marker).unwrap()..];
            let said = said.split("<|").next().unwrap();
            let found = form.read(said);
            assert_eq!(found.text, "");
            let found: Vec<Value> = found
                .calls
                .iter()
                .map(|call| json!([call.name, serde_json::from_str::<Value>(&call.arguments).unwrap()]))
                .collect();
            let expected: Vec<Value> = calls
                .as_array()
                .unwrap()
                .iter()
                .map(|call| json!([call["function"]["name"], call["function"]["arguments"]]))
                .collect();
            assert_eq!(found, expected, "{}", case["template"]);
            read += 1;
        }
    }
    assert!(read > 0);
}

#[test]
fn templates_are_known_by_how_they_write_calls() {
    for (name, form) in [
        ("qwen25", Some(ToolForm::Tagged)),
        ("qwen3", Some(ToolForm::Tagged)),
        ("mistral_v03", Some(ToolForm::Listed)),
        ("llama3", None),
        ("gemma2", None),
        ("phi3", None),
    ] {
        assert_eq!(ToolForm::of(&chat_template(&serde_json::json!({ "template": name }))), form, "{name}");
    }
    let llama31 = std::fs::read_to_string(golden("chat_templates/llama31.jinja")).unwrap();
    // This copy of it has no tools where they stand by default.
    for (source, form) in [
        (llama31.replace("tools_in_user_message = true", "tools_in_user_message = false"), Some(ToolForm::Bare)),
        (llama31, None),
    ] {
        let special = [("bos_token".to_owned(), "<|begin_of_text|>".to_owned())];
        assert_eq!(ToolForm::of(&ChatTemplate::new(&source, special.into()).unwrap()), form);
    }
}

#[test]
fn pieces_of_a_conversation_add_up_to_it_and_an_assistant_is_learned() {
    for case in cases("chat_templates.json") {
        // `python` is no chat template.
        let Some(whole) = case["whole"]["text"].as_str().filter(|_| case["template"] != "python") else { continue };
        let messages = messages(&case);
        let spoken: Vec<&str> = messages
            .iter()
            .filter(|message| message.role == "assistant")
            .filter_map(|message| message.content.as_str())
            .collect();
        for train_on in [TrainOn::Assistant, TrainOn::Last, TrainOn::All] {
            let turns = match chat_template(&case).turns(&messages, train_on) {
                Ok(turns) => turns,
                // Most templates cannot ask for a first turn of the assistant.
                Err(ChatError::NotAPrefix { .. }) => {
                    assert!(messages[0].role == "assistant", "{train_on:?}: {case}");
                    continue;
                }
                Err(ChatError::Refused(_)) => {
                    assert_eq!(messages[0].role, "assistant", "{}", case["template"]);
                    continue;
                }
                Err(error) => panic!("{}: {error}", case["template"]),
            };
            assert_eq!(turns.iter().map(|turn| turn.text.as_str()).collect::<String>(), whole, "{}", case["template"]);
            let learned: String = turns.iter().filter(|turn| turn.learn).map(|turn| turn.text.as_str()).collect();
            match train_on {
                TrainOn::All => assert_eq!(learned, whole),
                TrainOn::Last => {
                    let last = spoken.last().map_or("", |text| text.trim());
                    assert!(learned.contains(last.rsplit('\n').next().unwrap()), "{}: {learned}", case["template"]);
                }
                TrainOn::Assistant | TrainOn::Response => {
                    for said in &spoken {
                        assert!(learned.contains(said.trim().rsplit('\n').next().unwrap()), "{learned}: {said}");
                    }
                    assert!(!learned.contains("Who are you?") && !learned.contains("Be brief."), "{learned}");
                }
            }
        }
    }
}

#[test]
fn generation_marks_are_those_of_transformers() {
    let mut seen = 0;
    for case in cases("chat_templates.json").iter().filter(|case| case["said"].is_array()) {
        let whole: Vec<char> = case["whole"]["text"].as_str().unwrap().chars().collect();
        let expected: Vec<String> = case["said"]
            .as_array()
            .unwrap()
            .iter()
            .map(|range| {
                whole[range[0].as_u64().unwrap() as usize..range[1].as_u64().unwrap() as usize].iter().collect()
            })
            .collect();
        let turns = chat_template(case).turns_by_marks_of_all(&messages(case)).unwrap();
        let learned: Vec<String> = turns.into_iter().filter(|turn| turn.learn).map(|turn| turn.text).collect();
        assert_eq!(learned, expected);
        seen += learned.len();
    }
    assert!(seen > 5, "{seen} stretches");
}

#[test]
fn control_tokens_in_the_data_are_plain_text_as_in_transformers() {
    for case in cases("sanitized.json") {
        let tokenizer =
            Tokenizer::from_folder(&golden("tokenizers").join(case["tokenizer"].as_str().unwrap())).unwrap();
        let params = PromptParams {
            chat_template: Some(ChatTemplateChoice::new(case["chat_template"].as_str().unwrap())),
            sanitize_control_tokens: case["sanitize_control_tokens"].as_bool(),
            ..PromptParams::default()
        };
        let prompt = Prompter::new(&params, &tokenizer).unwrap().conversation(&messages(&case), &tokenizer).unwrap();
        let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(prompt.encode(&tokenizer).unwrap().input_ids, expected, "{case}");
        let text = case["messages"][0]["content"].as_str().unwrap();
        assert!(prompt.to_text(&tokenizer).unwrap().contains(text), "marks are not shown");
    }
}

/// The golden vocabulary of pieces as Llama 2 has it: with Llama 2's chat template, or with one that has special tokens
/// for turns.
fn llama_2(pre_tokenizer: Value, normalizer: Value) -> (tempfile::TempDir, Tokenizer, tokenizers::Tokenizer) {
    let folder = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(golden("tokenizers/metaspace/tokenizer.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&bytes).unwrap();
    json["added_tokens"].as_array_mut().unwrap().truncate(3);
    (json["pre_tokenizer"], json["normalizer"]) = (pre_tokenizer, normalizer);
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    let config = golden("tokenizers/metaspace/tokenizer_config.json");
    std::fs::copy(config, folder.path().join("tokenizer_config.json")).unwrap();
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    let oracle = tokenizers::Tokenizer::from_file(folder.path().join("tokenizer.json")).unwrap();
    (folder, tokenizer, oracle)
}

/// As Zephyr and TinyLlama have it.
const ZEPHYR: &str = "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}";

#[test]
fn conversations_are_encoded_as_the_text_they_are_where_spaces_are_put_before_texts() {
    let prepend = serde_json::json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    let metaspace = |scheme: &str| serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let forms = [(Value::Null, prepend), (metaspace("always"), Value::Null), (metaspace("first"), Value::Null)];
    let llama_2_template = std::fs::read_to_string(golden("chat_templates/llama2.jinja")).unwrap();
    let messages =
        [("user", "Who are you?"), ("assistant", "A pipeline"), ("user", "And?"), ("assistant", "That is all.")]
            .map(|(role, text)| Message::new(role, text));
    for (pre_tokenizer, normalizer) in forms {
        let (_folder, tokenizer, oracle) = llama_2(pre_tokenizer, normalizer);
        for template in [llama_2_template.as_str(), ZEPHYR] {
            let params =
                PromptParams { chat_template: Some(ChatTemplateChoice::new(template)), ..PromptParams::default() };
            let renderer = PromptRenderer::new(&params, &RowsFacts::messages(), &tokenizer).unwrap();
            let row = Row::Messages(messages.to_vec());
            let lesson = renderer.lesson(&row, &tokenizer).unwrap();
            let encoded = lesson.encode(&tokenizer).unwrap();
            let whole = |text: String| oracle.encode(text, false).unwrap().get_ids().to_vec();
            assert_eq!(encoded.input_ids, whole(lesson.to_text(&tokenizer).unwrap()), "{template}");
            // What is learned is what the assistant says; and it is asked in the ids it was trained on.
            let learned: Vec<u32> =
                encoded.labels.iter().filter(|label| **label != IGNORE_INDEX).map(|label| *label as u32).collect();
            let said = tokenizer.decode(&learned).unwrap();
            assert!(said.trim().starts_with("A pipeline") && said.trim().ends_with("That is all."), "{said}");
            let asked = renderer.question(&row, &tokenizer).unwrap().prompt;
            let asked = asked.encode(&tokenizer).unwrap().input_ids;
            assert_eq!(asked, encoded.input_ids[..asked.len()]);
            for train_on in [TrainOn::Last, TrainOn::All] {
                let other = renderer.clone().train_on(train_on).lesson(&row, &tokenizer).unwrap();
                assert_eq!(other.encode(&tokenizer).unwrap().input_ids, encoded.input_ids, "{train_on:?}");
            }
        }
    }
}

#[test]
fn templates_are_torchtunes_byte_for_byte() {
    let tokenizer = Tokenizer::from_folder(&golden("tokenizers/bytelevel")).unwrap();
    let mut names = std::collections::BTreeSet::new();
    for case in cases("templates.json") {
        let name = case["template"].as_str().unwrap();
        let columns: BTreeMap<String, String> = serde_json::from_value(case["columns"].clone()).unwrap();
        let template = Template::named(name).unwrap();
        assert_eq!(template.render(&columns), case["prompt"].as_str().unwrap(), "{name}");
        if let Some(whole) = case["whole"].as_str() {
            let facts = RowsFacts::prompt(template, "output", columns.keys().cloned());
            let renderer = PromptRenderer::new(&PromptParams::default(), &facts, &tokenizer).unwrap();
            let lesson = renderer.lesson(&Row::Columns(columns.clone()), &tokenizer).unwrap();
            assert_eq!(lesson.to_text(&tokenizer).unwrap(), format!("<|begin_of_text|>{whole}"));
            let learned: Vec<_> = lesson.segments.iter().filter(|segment| segment.learn).collect();
            assert_eq!(learned.len(), 1, "the response and its end");
        }
        names.insert(name.to_owned());
    }
    assert_eq!(names.len(), NAMED.len() - 1, "`none` is ours: {names:?}");
}

#[test]
fn what_is_said_to_a_system_is_said_where_nothing_else_is() {
    let tokenizer = Tokenizer::from_folder(&golden("tokenizers/bytelevel")).unwrap();
    let params = PromptParams {
        chat_template: Some(ChatTemplateChoice::new("chatml")),
        system_prompt: Some("Be kind.".to_owned()),
        ..PromptParams::default()
    };
    let prompter = Prompter::new(&params, &tokenizer).unwrap();
    let asked = prompter.user_turn("Hi", &tokenizer).unwrap().to_text(&tokenizer).unwrap();
    assert_eq!(
        asked,
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let own = [Message::new("system", "Be brief."), Message::new("user", "Hi")];
    let text = prompter.conversation(&own, &tokenizer).unwrap().to_text(&tokenizer).unwrap();
    assert!(text.contains("Be brief.") && !text.contains("Be kind."), "{text}");
}

#[test]
fn an_assistants_message_without_weight_is_not_learned() {
    let tokenizer = Tokenizer::from_folder(&golden("tokenizers/bytelevel")).unwrap();
    let mut unweighted = Message::new("assistant", "wrong");
    unweighted.other.insert("weight".to_owned(), 0.into());
    let row = Row::Messages(vec![
        Message::new("user", "a"),
        unweighted,
        Message::new("user", "b"),
        Message::new("assistant", "right"),
    ]);
    let renderer = PromptRenderer::new(&PromptParams::default(), &RowsFacts::messages(), &tokenizer).unwrap();
    let learned = |train_on| {
        let encoded = renderer.clone().train_on(train_on).lesson(&row, &tokenizer).unwrap().encode(&tokenizer).unwrap();
        let learned = encoded.labels.iter().filter(|label| **label != IGNORE_INDEX);
        tokenizer.decode_with_special(&learned.map(|label| *label as u32).collect::<Vec<_>>()).unwrap()
    };
    assert_eq!(learned(TrainOn::Assistant), "right<|eot_id|>");
    assert_eq!(learned(TrainOn::Last), "right<|eot_id|>");
    assert!(learned(TrainOn::All).contains("wrong"));
}

#[test]
fn a_template_that_the_engine_fails_over_is_an_error_and_no_panic() {
    // minijinja 3.0.5 panics over an empty list that is walked backwards, as Qwen 3's template walks the messages.
    let template = ChatTemplate::new("{% for message in messages[::-1] %}x{% endfor %}", BTreeMap::new()).unwrap();
    assert_eq!(template.render(&[Message::new("user", "Hi.")], false).unwrap(), "x");
    assert!(!matches!(template.render(&[], true), Ok(text) if !text.is_empty()));
}
