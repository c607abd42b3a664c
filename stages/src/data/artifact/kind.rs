//! The kinds of artefacts, as types that a stage's parameters name.

use engine::artifact::Output;
use engine::parameter::ArtifactKind;

/// A kind that an output can have, as opposed to one that only describes what an input accepts.
pub trait OutputKind: ArtifactKind {
    /// The kind's name, as pipelines and records have it.
    const NAME: &'static str;

    /// An output of this kind.
    fn output(name: &str) -> Output {
        Output::new(name, Self::NAME)
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $type:ident = $name:literal;)*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy)]
            pub struct $type;

            impl ArtifactKind for $type {
                const KINDS: &'static [&'static str] = &[$name];
            }

            impl OutputKind for $type {
                const NAME: &'static str = $name;
            }
        )*
    };
}

kinds! {
    /// Rows of text: columns for a template, conversations, or plain text.
    Rows = "rows";
    /// Token ids and labels, one document per row.
    Tokens = "tokens";
    /// Token ids and labels, several documents per row, every row equally long.
    Packs = "packs";
    /// A tokenizer's files.
    Tokenizer = "tokenizer";
    /// A checkpoint in the Hub's form: `config.json` and safetensors files.
    Model = "model";
    /// A PEFT folder: `adapter_config.json` and `adapter_model.safetensors`.
    Adapter = "adapter";
    /// Named figures: `metrics.json`, and per-example values where there are any.
    Metrics = "metrics";
    /// Log-probabilities of the documents of tokens or packs.
    LogProbs = "log_probs";
    /// Generated texts with their prompts.
    Samples = "samples";
    /// Any files.
    Files = "files";
}

/// What training reads: packs where there are any, else single documents.
#[derive(Debug, Clone, Copy)]
pub struct TokensOrPacks;

impl ArtifactKind for TokensOrPacks {
    const KINDS: &'static [&'static str] = &["packs", "tokens"];
}

/// The chat template of a tokenizer, where it is not in `tokenizer_config.json`.
pub const CHAT_TEMPLATE_FILE: &str = "chat_template.jinja";

/// The folder of a tokenizer's other chat templates, `NAME.jinja` each.
pub const CHAT_TEMPLATES_FOLDER: &str = "additional_chat_templates";

/// The files that make up a Tokenizer artefact, as far as a checkpoint has them, but for those of
/// [`CHAT_TEMPLATES_FOLDER`].
pub const TOKENIZER_FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE_FILE,
];

/// Whether a file of a checkpoint is its tokenizer's; `name` is its path there.
pub fn is_tokenizer_file(name: &str) -> bool {
    let is_template = |(folder, file): (&str, &str)| folder == CHAT_TEMPLATES_FOLDER && file.ends_with(".jinja");
    TOKENIZER_FILES.contains(&name) || name.rsplit_once('/').is_some_and(is_template)
}
