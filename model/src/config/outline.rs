//! What a `config.json` says of a model that is not computed natively, as far as its usual keys are there.

use serde_json::{Map, Value};

use super::{Config, ConfigError, Fields};

/// A model as its `config.json` describes it: one that is computed natively, or one that transformers computes.
#[derive(Debug)]
pub enum Architecture {
    /// Computed by this program.
    Native(Box<Config>),
    /// Any other causal model.
    Transformers(Outline),
}

/// The sizes of a model of which nothing is computed natively.
#[derive(Debug)]
pub struct Outline {
    /// The architecture, by its `model_type`.
    pub model_type: String,
    /// Size of the vocabulary.
    pub vocab_size: Option<usize>,
    /// Positions the model is meant for; `None` where it has no such bound, or none of the usual keys.
    pub max_position_embeddings: Option<usize>,
    /// Dropouts of the model itself that are not 0, by their keys. No worker applies them.
    pub dropouts: Vec<String>,
    /// Why it is not computed natively.
    pub because: ConfigError,
}

/// The names that sizes have in the `config.json` of some architectures instead of the usual one.
const OTHER_NAMES: [(&str, &[&str]); 5] = [
    ("max_position_embeddings", &["n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length"]),
    ("hidden_size", &["n_embd", "d_model"]),
    ("num_hidden_layers", &["n_layer", "n_layers", "num_layers"]),
    ("num_attention_heads", &["n_head", "n_heads"]),
    ("vocab_size", &[]),
];

/// Keys that decide what kind of model it is. With another value than is computed natively it is none that transformers
/// would compute as a causal model on unquantised weights.
const NOT_CAUSAL: [&str; 6] = [
    "quantization_config",
    "bnb_4bit_quant_type",
    "compression_config",
    "is_encoder_decoder",
    "use_bidirectional_attention",
    "architectures",
];

/// What the names of causal models end in.
const CAUSAL: [&str; 2] = ["ForCausalLM", "LMHeadModel"];

impl Architecture {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// Fails if it describes no causal model, or is none.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let because = match Config::from_json(text) {
            Ok(config) => return Ok(Self::Native(Box::new(config))),
            Err(error) => error,
        };
        let is_other = match &because {
            ConfigError::Family { .. } => true,
            ConfigError::Unsupported { key, .. } => !NOT_CAUSAL.contains(&key.as_str()),
            _ => false,
        };
        // It was read before.
        let object: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
        if is_other { Outline::read(&Fields(&object), because).map(Self::Transformers) } else { Err(because) }
    }

    /// The size of its vocabulary, where it is known.
    pub fn vocab_size(&self) -> Option<usize> {
        match self {
            Self::Native(config) => Some(config.vocab_size),
            Self::Transformers(outline) => outline.vocab_size,
        }
    }

    /// The positions that it has, where they are bounded.
    pub fn max_position_embeddings(&self) -> Option<usize> {
        match self {
            Self::Native(config) => Some(config.max_position_embeddings),
            Self::Transformers(outline) => outline.max_position_embeddings,
        }
    }
}

impl std::fmt::Display for Outline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` is computed by transformers; not native", self.model_type)
    }
}

impl Outline {
    fn read(fields: &Fields<'_>, because: ConfigError) -> Result<Self, ConfigError> {
        let class = fields.texts("architectures")?.and_then(|names| names.first().copied());
        if let Some(class) = class.filter(|class| !CAUSAL.iter().any(|end| class.ends_with(end))) {
            return Err(ConfigError::NotCausal(class.to_owned()));
        }
        // Without a type transformers does not know its class.
        let Some(model_type) = fields.text("model_type")? else { return Err(because) };
        // What all families are refused for, and what this one was not asked.
        for key in ["quantization_config", "compression_config"] {
            if fields.find(key).is_some() {
                return Err(fields.unsupported(key, "weights that are not quantised: f32, bf16 or f16"));
            }
        }
        for key in ["is_encoder_decoder", "use_bidirectional_attention"] {
            if fields.flag(key)? == Some(true) {
                return Err(fields.unsupported(key, "false"));
            }
        }
        let size = |name: &str| usual(fields, name).map(|found| found.map(|(_, size)| size));
        let is_dropout = |key: &str| key.contains("dropout") || key.contains("pdrop") || key.ends_with("jitter_noise");
        let dropouts = fields.0.iter().filter(|(key, value)| {
            is_dropout(key) && !key.starts_with("classifier") && value.as_f64().is_some_and(|value| value != 0.0)
        });
        Ok(Self {
            model_type: model_type.to_owned(),
            vocab_size: size("vocab_size")?,
            max_position_embeddings: size("max_position_embeddings")?,
            dropouts: dropouts.map(|(key, _)| key.clone()).collect(),
            because,
        })
    }
}

/// A size by its usual name or by another one.
fn usual(fields: &Fields<'_>, name: &str) -> Result<Option<(String, usize)>, ConfigError> {
    let others = OTHER_NAMES.iter().find(|(usual, _)| *usual == name).map_or(&[][..], |(_, others)| others);
    for key in std::iter::once(&name).chain(others) {
        if let Some(size) = fields.optional_size(key)? {
            return Ok(Some(((*key).to_owned(), size)));
        }
    }
    Ok(None)
}

/// The sizes of a `config.json` that it has under other names only, by their usual names.
pub fn sizes_by_other_names(config: &Map<String, Value>) -> Vec<(&'static str, u64)> {
    let fields = Fields(config);
    let found = OTHER_NAMES.iter().filter(|(name, _)| fields.find(name).is_none());
    found.filter_map(|(name, _)| Some((*name, usual(&fields, name).ok()??.1 as u64))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outline(text: &str) -> Outline {
        match Architecture::from_json(text).unwrap() {
            Architecture::Transformers(outline) => outline,
            Architecture::Native(config) => panic!("{} is computed natively", config.model_type),
        }
    }

    #[test]
    fn any_other_causal_model_has_an_outline() {
        let olmo2 = outline(
            r#"{"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "vocab_size": 96,
            "max_position_embeddings": 64, "attention_dropout": 0.0, "residual_dropout": 0.1}"#,
        );
        assert_eq!((olmo2.vocab_size, olmo2.max_position_embeddings), (Some(96), Some(64)));
        assert_eq!(olmo2.dropouts, ["residual_dropout"]);
        let gpt2 = outline(r#"{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 32}"#);
        assert_eq!((gpt2.vocab_size, gpt2.max_position_embeddings), (None, Some(32)));
    }

    #[test]
    fn a_native_family_with_a_setting_that_is_not_computed_is_one_for_transformers() {
        let llama = r#"{"model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 144,
            "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 512"#;
        assert!(matches!(Architecture::from_json(&format!("{llama}}}")), Ok(Architecture::Native(_))));
        let relu = outline(&format!(r#"{llama}, "hidden_act": "relu"}}"#));
        assert!(relu.because.to_string().contains("hidden_act: relu"));
        for more in [
            r#", "quantization_config": {"quant_method": "gptq"}"#,
            r#", "architectures": ["LlamaForSequenceClassification"]"#,
            r#", "use_bidirectional_attention": true"#,
        ] {
            assert!(Architecture::from_json(&format!("{llama}{more}}}")).is_err(), "{more}");
        }
    }

    #[test]
    fn what_is_no_causal_model_is_refused() {
        for text in [
            r#"{"model_type": "bert", "architectures": ["BertForMaskedLM"]}"#,
            r#"{"model_type": "olmo2", "quantization_config": {"quant_method": "awq"}}"#,
            r#"{"model_type": "t5", "is_encoder_decoder": true}"#,
            r#"{"architectures": ["Olmo2ForCausalLM"]}"#,
            "[]",
        ] {
            assert!(Architecture::from_json(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_known_by_their_usual_names() {
        let config: Map<String, Value> =
            serde_json::from_str(r#"{"n_positions": 32, "hidden_size": 8, "d_model": 9}"#).unwrap();
        assert_eq!(sizes_by_other_names(&config), [("max_position_embeddings", 32)]);
    }
}
