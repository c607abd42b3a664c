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

/// torchtune's `ChatMLTemplate`: no system message of its own, content as it stands.
pub(super) const CHATML: &str = "{%- for message in messages %}\
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\
    {%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Every template of a name. Sources: the `chat_template` of Llama 3, Qwen 2.5, Gemma 2, Mistral v0.3, Phi 3, Zephyr
/// and DeepSeek LLM; Alpaca and Vicuna v1.5 have none, and their prompts are those of Stanford's and LMSYS's own code.
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
    use super::*;
    use crate::data::artifact::Message;

    fn rendered(name: &str, messages: &[(&str, &str)], asked: bool) -> String {
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let tokens: BTreeMap<String, String> = tokens.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let template = ChatTemplate::new(find(name).unwrap().text, tokens).unwrap();
        let messages: Vec<Message> = messages.iter().map(|(role, content)| Message::new(role, content)).collect();
        template.render(&messages, asked).unwrap()
    }

    const TALK: &[(&str, &str)] = &[("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")];

    #[test]
    fn each_is_the_familys_own_to_the_letter() {
        let whole = |name: &str| rendered(name, TALK, true);
        assert_eq!(whole("zephyr"), "<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n<|user|>\nBye</s>\n<|assistant|>\n");
        assert_eq!(whole("deepseek"), "<s>User: Hi\n\nAssistant: Hello</s>User: Bye\n\nAssistant:");
        let system = "A chat between a curious user and an artificial intelligence assistant. The assistant gives \
                      helpful, detailed, and polite answers to the user's questions.";
        assert_eq!(whole("vicuna"), format!("<s>{system} USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:"));
        assert_eq!(
            whole("alpaca"),
            "<s>Below is an instruction that describes a task. Write a response that appropriately completes the \
             request.\n\n### Instruction:\nHi\n\n### Response:\nHello</s>\n\n### Instruction:\nBye\n\n### Response:\n"
        );
        assert!(whole("llama3").ends_with("Bye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"));
        assert!(whole("qwen").contains("<|im_start|>assistant\nHello<|im_end|>\n"));
        assert!(whole("gemma").ends_with("<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"));
        assert!(whole("mistral").contains("[INST] Hi[/INST]"));
        assert!(whole("phi").ends_with("<|user|>\nBye<|end|>\n<|assistant|>\n"));
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
