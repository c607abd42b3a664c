//! Tiny checkpoints of every family that is computed natively, with random weights, a tokenizer and a chat template.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses its own part of this; tests may unwrap")]

use std::fs;
use std::path::{Path, PathBuf};

use super::Project;

/// The families, each by a checkpoint of `tests/golden`, all with 320 ids and 512 positions.
pub(crate) const FAMILIES: [&str; 7] = ["llama31", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"];

/// Turns under their roles, with an end that the tokenizer knows.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ message.role }}: {{ message.content }}\
{% if message.role == 'assistant' %}<|end_of_text|>{% endif %}\n{% endfor %}\
{% if add_generation_prompt %}assistant: {% endif %}";

/// A tokenizer for them, which is trained once for a test.
pub(crate) struct Tokenizer(Project);

impl Tokenizer {
    pub(crate) fn train() -> Self {
        let project = Project::new();
        project.write("text.jsonl", "{\"text\": \"user: Who are you? assistant: I am Pip, and you are you.\"}\n");
        project.write(
            "tokenizer.yaml",
            "version: 1\nstages:\n  text: { uses: dataset, with: { source: ./text.jsonl } }\n  fresh:\n    uses: new_model\n    \
             with: { text: text, vocab_size: 300, hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, num_attention_heads: 1 }\n\
             publish: { fresh.tokenizer: ./tokenizer }\n",
        );
        project.run(&["run", "tokenizer.yaml"]).ends_with(0);
        Self(project)
    }

    /// A checkpoint of a family in a folder.
    pub(crate) fn checkpoint(&self, family: &str, folder: &Path) {
        fs::create_dir_all(folder).unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(family);
        let copy = |from: PathBuf| fs::copy(&from, folder.join(from.file_name().unwrap())).unwrap();
        for file in ["config.json", "model.safetensors"] {
            copy(golden.join(file));
        }
        for file in ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"] {
            copy(self.0.path("tokenizer").join(file));
        }
        fs::write(folder.join("chat_template.jinja"), CHAT_TEMPLATE).unwrap();
    }
}
