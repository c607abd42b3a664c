//! Chat templates that have a name: those of well-known families, each with the special tokens that it writes.
//!
//! A template is text: where its markers are no tokens of the tokenizer's own, they are encoded as plain text, and a
//! model has to learn them as such.

use crate::data::tokenizer::Tokenizer;

/// A chat template with a name.
#[derive(Debug)]
pub struct NamedTemplate {
    pub name: &'static str,
    /// The Jinja template.
    pub text: &'static str,
    /// The tokens of its markers, beyond `bos_token` and `eos_token`.
    pub special_tokens: &'static [&'static str],
}

/// torchtune's `ChatMLTemplate`: no system message of its own, content as it stands. Tools and their calls are written
/// as by Qwen 2.5, which has them from Hermes.
pub(super) const CHATML: &str = include_str!("templates/chatml.jinja");

/// Every template of a name. Sources: the `chat_template` of Llama 3, Qwen 2.5, Gemma 2, Mistral v0.3, Phi 3, Zephyr
/// (as in the alignment handbook) and DeepSeek (LLM and V2); Vicuna v1.5 has none, and its turns are those of
/// FastChat's `vicuna_v1.1`; Alpaca has none, and its prompt is Stanford's, in turns as LLaMA-Factory's `alpaca` has
/// them.
pub(super) const ALL: &[NamedTemplate] = &[
    NamedTemplate { name: "chatml", text: CHATML, special_tokens: &["<|im_start|>", "<|im_end|>"] },
    NamedTemplate {
        name: "llama3",
        text: include_str!("templates/llama3.jinja"),
        special_tokens: &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    },
    NamedTemplate {
        name: "qwen",
        text: include_str!("templates/qwen.jinja"),
        special_tokens: &["<|im_start|>", "<|im_end|>"],
    },
    NamedTemplate {
        name: "gemma",
        text: include_str!("templates/gemma.jinja"),
        special_tokens: &["<start_of_turn>", "<end_of_turn>"],
    },
    NamedTemplate {
        name: "mistral",
        text: include_str!("templates/mistral.jinja"),
        special_tokens: &["[INST]", "[/INST]"],
    },
    NamedTemplate {
        name: "phi",
        text: include_str!("templates/phi.jinja"),
        special_tokens: &["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
    },
    NamedTemplate { name: "zephyr", text: include_str!("templates/zephyr.jinja"), special_tokens: &[] },
    NamedTemplate { name: "alpaca", text: include_str!("templates/alpaca.jinja"), special_tokens: &[] },
    NamedTemplate { name: "vicuna", text: include_str!("templates/vicuna.jinja"), special_tokens: &[] },
    NamedTemplate { name: "deepseek", text: include_str!("templates/deepseek.jinja"), special_tokens: &[] },
];

/// The template of a name.
pub(super) fn find(name: &str) -> Option<&'static NamedTemplate> {
    ALL.iter().find(|template| template.name == name)
}

impl NamedTemplate {
    /// The tokens of its markers that a tokenizer does not have.
    pub fn missing_from(&self, tokenizer: &Tokenizer) -> Vec<&'static str> {
        self.special_tokens.iter().copied().filter(|token| tokenizer.token_id(token).is_none()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::chat::ChatTemplate;
    use super::super::tool_calls::ToolForm;
    use super::super::train_on::TrainOn;
    use super::*;
    use crate::data::artifact::{Message, TOOLS};

    fn rendered(name: &str, messages: &[(&str, &str)], asked: bool) -> String {
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let tokens: BTreeMap<String, String> = tokens.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let template = ChatTemplate::new(find(name).unwrap().text, tokens).unwrap();
        let messages: Vec<Message> = messages.iter().map(|(role, content)| Message::new(role, content)).collect();
        template.render(&messages, asked).unwrap()
    }

    #[test]
    fn none_of_them_writes_reasoning() {
        let tokens = ["bos_token", "eos_token"].map(|name| (name.to_owned(), "</s>".to_owned()));
        let mut message = Message::new("assistant", "4");
        message.other.insert("reasoning_content".to_owned(), "2 + 2".into());
        for named in ALL {
            let template = ChatTemplate::new(named.text, BTreeMap::from(tokens.clone())).unwrap();
            assert!(template.leaves_out_reasoning(&message), "{}", named.name);
        }
    }

    #[test]
    fn chatml_writes_tools_and_calls_as_qwen_does() {
        let template = |name: &str| ChatTemplate::new(find(name).unwrap().text, BTreeMap::new()).unwrap();
        let mut messages =
            [Message::new("system", "Be kind."), Message::new("user", "Rain?"), Message::new("assistant", "")];
        let tool = serde_json::json!([{ "type": "function", "function": { "name": "weather", "parameters": {} } }]);
        messages[0].other.insert(TOOLS.to_owned(), tool);
        let call = serde_json::json!([{ "function": { "name": "weather", "arguments": { "city": "Zürich" } } }]);
        messages[2].other.insert("tool_calls".to_owned(), call);
        let rendered = template("chatml").render(&messages, false).unwrap();
        assert_eq!(rendered, template("qwen").render(&messages, false).unwrap());
        assert_eq!(ToolForm::of(&template("chatml")), Some(ToolForm::Tagged));
        let turns = template("chatml").turns(&messages, TrainOn::Assistant).unwrap();
        assert!(turns.iter().any(|turn| turn.learn && turn.text.starts_with("<tool_call>\n{\"name\": \"weather\"")));
    }

    const TALK: &[(&str, &str)] = &[("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")];

    #[test]
    fn each_is_the_familys_own_to_the_letter() {
        // As jinja2 renders them, as transformers sets it up; with the system message `Be kind.`, and without one.
        let vicuna = "A chat between a curious user and an artificial intelligence assistant. The assistant gives \
                      helpful, detailed, and polite answers to the user's questions.";
        let alpaca = "Below is an instruction that describes a task. Write a response that appropriately completes the \
                      request.";
        let qwen =
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n";
        let of_chatml = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n\
                         <|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n";
        let kind_of_chatml = "<|im_start|>system\nBe kind.<|im_end|>\n";
        let of_llama = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant\
                        <|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>\
                        <|start_header_id|>assistant<|end_header_id|>\n\n";
        let of_phi = "<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nBye<|end|>\n<|assistant|>\n";
        let of_zephyr = "<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n<|user|>\nBye</s>\n<|assistant|>\n";
        let of_alpaca =
            "\n\n### Instruction:\nHi\n\n### Response:\nHello</s>\n\n### Instruction:\nBye\n\n### Response:\n";
        let of_vicuna = " USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:";
        let of_deepseek = "User: Hi\n\nAssistant: Hello</s>User: Bye\n\nAssistant:";
        for (name, plain, with_system) in [
            ("chatml", of_chatml.to_owned(), format!("{kind_of_chatml}{of_chatml}")),
            ("qwen", format!("{qwen}{of_chatml}"), format!("{kind_of_chatml}{of_chatml}")),
            (
                "llama3",
                format!("<s>{of_llama}"),
                format!("<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>{of_llama}"),
            ),
            (
                "mistral",
                "<s>[INST] Hi[/INST] Hello</s>[INST] Bye[/INST]".to_owned(),
                "<s>[INST] Hi[/INST] Hello</s>[INST] Be kind.\n\nBye[/INST]".to_owned(),
            ),
            ("phi", of_phi.to_owned(), format!("<|system|>\nBe kind.<|end|>\n{of_phi}")),
            ("zephyr", of_zephyr.to_owned(), format!("<|system|>\nBe kind.</s>\n{of_zephyr}")),
            ("alpaca", format!("<s>{alpaca}{of_alpaca}"), format!("<s>Be kind.{of_alpaca}")),
            ("vicuna", format!("<s>{vicuna}{of_vicuna}"), format!("<s>Be kind.{of_vicuna}")),
            ("deepseek", format!("<s>{of_deepseek}"), format!("<s>Be kind.\n\n{of_deepseek}")),
        ] {
            assert_eq!(rendered(name, TALK, true), plain, "{name}");
            assert_eq!(rendered_with_system(name), with_system, "{name}");
        }
        assert_eq!(
            rendered("gemma", TALK, true),
            "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n\
             <start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
        );
    }

    #[test]
    fn those_of_the_golden_files_are_these() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/data/chat_templates");
        let pairs = [
            ("llama3", "llama3"),
            ("qwen", "qwen25"),
            ("gemma", "gemma2"),
            ("mistral", "mistral_v03"),
            ("phi", "phi3"),
        ];
        for (name, golden) in pairs {
            let golden = std::fs::read_to_string(folder.join(format!("{golden}.jinja"))).unwrap();
            assert_eq!(find(name).unwrap().text, golden, "{name}");
        }
    }

    #[test]
    fn each_says_which_tokens_it_writes() {
        for template in ALL {
            let text = rendered(template.name, TALK, true);
            let system = rendered_with_system(template.name);
            let says = |token: &&&str| text.contains(**token) || system.contains(**token);
            assert!(template.special_tokens.iter().all(|token| says(&token)), "{}", template.name);
        }
    }

    fn rendered_with_system(name: &str) -> String {
        // Gemma refuses a system message.
        let system: &[(&str, &str)] = if name == "gemma" { &[] } else { &[("system", "Be kind.")] };
        rendered(name, &[system, TALK].concat(), true)
    }
}
