//! A model's shape, read from the `config.json` of a Hub checkpoint in either of its spellings.

mod fields;
mod outline;
mod rope;
mod tensors;

use std::path::PathBuf;

pub(crate) use fields::Fields;
pub use outline::{Architecture, Outline, sizes_by_other_names};
pub(crate) use rope::{PHI3_ORIGINAL_POSITIONS, RopeDialect};
use serde_json::Value;

use crate::ops::{Activation, NormWeight};
use crate::rope::Rope;
use crate::weights::Nf4;

/// The shape of a decoder, and what its family does its own way.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The family, by its `model_type`.
    pub model_type: String,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads.
    pub num_key_value_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Maximum number of positions.
    pub max_position_embeddings: usize,
    /// Epsilon of the norms.
    pub rms_norm_eps: f32,
    /// Where the output projection comes from.
    pub head: HeadWeight,
    /// The rotary embedding.
    pub rope: Rope,
    /// Factor on the attention scores.
    pub attention_scale: f32,
    /// For each layer, how many tokens a token sees, itself included; all if none.
    pub windows: Vec<Option<usize>>,
    /// Cap on the attention scores.
    pub attention_soft_cap: Option<f32>,
    /// Cap on the logits.
    pub logit_soft_cap: Option<f32>,
    /// Factor on the embeddings.
    pub embedding_scale: f32,
    /// How the norms' weights enter.
    pub norm_weight: NormWeight,
    /// Where norms stand in a layer.
    pub layer_norms: LayerNorms,
    /// Norms over the heads of queries and keys.
    pub qk_norm: QkNorm,
    /// How the projections are stored.
    pub projections: Projections,
    /// Which attention projections have biases.
    pub attention_bias: AttentionBias,
    /// Which MLP projections have biases.
    pub mlp_bias: MlpBias,
    /// The activation on the gate.
    pub activation: Activation,
    /// How weights are stored that are stored quantised (`quantization_config`), as far as the file says: the
    /// checkpoint's tensors tell the rest.
    pub stored_quantized: Option<StoredQuantized>,
}

/// How weights are stored that are stored quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredQuantized {
    /// The linear layers in bitsandbytes' NF4.
    Nf4(Nf4),
    /// In a GGUF file, whose matrices are of so many bytes.
    Gguf {
        /// Their size.
        bytes: u64,
    },
}

/// Where the output projection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadWeight {
    /// It is the embedding (`tie_word_embeddings`).
    Tied,
    /// `lm_head.weight`.
    Own,
}

/// Where norms stand in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerNorms {
    /// `input_layernorm` before attention, `post_attention_layernorm` before the MLP.
    Pre,
    /// gemma2: also on each branch before it is added.
    PreAndPost,
}

/// Norms over the heads of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// There are none.
    None,
    /// `q_norm` and `k_norm`, over each head, before RoPE.
    PerHead,
}

/// How the projections are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projections {
    /// `q_proj`, `k_proj`, `v_proj`, `gate_proj`, `up_proj`.
    Split,
    /// `qkv_proj`, `gate_up_proj`.
    Fused,
}

/// Which attention projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionBias {
    /// None of them.
    None,
    /// q, k and v.
    Qkv,
    /// q, k, v and o.
    All,
}

/// Which MLP projections have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpBias {
    /// None of them.
    None,
    /// All three.
    All,
}

/// What is wrong with a `config.json`.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read `{}`", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is not JSON, or not an object.
    #[error("the configuration is not a JSON object")]
    NotAnObject(#[source] Option<serde_json::Error>),
    /// It has no such key.
    #[error("the configuration has no `{0}`")]
    Missing(String),
    /// A value is of another type than it should be.
    #[error("`{key}` of the configuration is {found}, not {expected}")]
    Type {
        /// Its key.
        key: String,
        /// What it should be.
        expected: &'static str,
        /// The value.
        found: Value,
    },
    /// A size is beyond any model's.
    #[error("`{key}` of the configuration is {value}, and no model has more than {most}")]
    TooLarge {
        /// Its key.
        key: String,
        /// Its value.
        value: usize,
        /// The most that is taken.
        most: usize,
    },
    /// The model is of a family that we do not know.
    #[error("models of type `{found}` are not supported; those that are: {}", supported.join(", "))]
    Family {
        /// `model_type`, or the architecture.
        found: String,
        /// The types that are.
        supported: Vec<&'static str>,
    },
    /// The model is none that continues a text.
    #[error("`{0}` is no causal language model, whose class would end in `ForCausalLM` or `LMHeadModel`")]
    NotCausal(String),
    /// A value asks for something that we do not compute.
    #[error("`{key}: {value}` is not supported; supported: {supported}")]
    Unsupported {
        /// Its key.
        key: String,
        /// Its value.
        value: String,
        /// Values that are.
        supported: &'static str,
    },
    /// Two sizes do not fit each other.
    #[error("the sizes do not fit: {0}")]
    Sizes(String),
}

impl Config {
    /// Checks that the sizes fit each other.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let fail = |message: String| Err(ConfigError::Sizes(message));
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return fail(format!("`{name}` is 0"));
        }
        let (heads, key_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if !heads.is_multiple_of(key_heads) {
            return fail(format!("{heads} query heads over {key_heads} key heads"));
        }
        let (turning, all) = (self.rope.rotary_dims, self.head_dim);
        if turning % 2 != 0 || turning == 0 || turning > all {
            return fail(format!("{turning} of the {all} elements of a head turn"));
        }
        let caps = [self.attention_soft_cap, self.logit_soft_cap];
        if caps.into_iter().flatten().any(|cap| cap.is_nan() || cap <= 0.0) {
            return fail("a soft cap is not above 0".to_owned());
        }
        if self.windows.contains(&Some(0)) {
            return fail("`sliding_window` is 0".to_owned());
        }
        self.check_rope()
    }

    fn check_rope(&self) -> Result<(), ConfigError> {
        let mut numbers = self.rope.frequencies(1);
        numbers.extend(self.rope.frequencies(self.max_position_embeddings));
        numbers.push(self.rope.attention_factor());
        match numbers.into_iter().find(|number| !number.is_finite() || *number <= 0.0) {
            Some(number) => Err(ConfigError::Sizes(format!(
                "the rotary embedding's settings give {number} where a number above 0 is needed"
            ))),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rope::{Ramp, RopeScaling, Yarn};

    const LLAMA: &str = r#""model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 144,
        "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
        "hidden_act": "silu", "max_position_embeddings": 512"#;

    fn read(more: &str) -> Result<Config, ConfigError> {
        Config::from_json(&format!("{{{LLAMA}{more}}}"))
    }

    #[test]
    fn both_spellings_of_the_rotary_embedding_are_one() {
        let older = r#", "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}"#;
        let newer = r#", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}"#;
        assert_eq!(read(older).unwrap(), read(newer).unwrap());
        assert_eq!(read(older).unwrap().rope.theta, 500_000.0);
        assert_eq!(read("").unwrap().rope.scaling, RopeScaling::Default);
        let legacy = read(r#", "rope_scaling": {"type": "linear", "factor": 4}"#).unwrap();
        assert_eq!(legacy.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    }

    #[test]
    fn an_absent_head_dim_follows_from_the_width() {
        assert_eq!(read("").unwrap().head_dim, 16);
        assert_eq!(read(r#", "head_dim": 24"#).unwrap().head_dim, 24);
        assert_eq!(read(r#", "head_dim": null"#).unwrap().head_dim, 16);
        assert_eq!(read("").unwrap().head, HeadWeight::Own);
        assert_eq!(read(r#", "tie_word_embeddings": true"#).unwrap().head, HeadWeight::Tied);
    }

    #[test]
    fn every_kind_of_rotary_embedding_is_read() {
        let scaling = |more: &str| read(more).unwrap().rope.scaling;
        let yarn = |more: &str| {
            scaling(&format!(
                r#", "rope_scaling": {{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128{more}}}"#
            ))
        };
        let expected = Yarn {
            factor: 4.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position_embeddings: 128.0,
            ramp: Ramp::WholePairs,
            attention_factor: 0.1 * 4.0_f64.ln() + 1.0,
        };
        assert_eq!(yarn(""), RopeScaling::Yarn(expected.clone()));
        let given = Yarn { attention_factor: 2.0, beta_fast: 16.0, ramp: Ramp::Exact, ..expected };
        let spelled_out = r#", "attention_factor": 2.0, "beta_fast": 16, "beta_slow": 0, "truncate": false"#;
        assert_eq!(yarn(spelled_out), RopeScaling::Yarn(given));
        // Within max_position_embeddings, which no document exceeds, it changes nothing.
        let dynamic = r#", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}"#;
        assert_eq!(scaling(dynamic), RopeScaling::Default);
    }

    const PHI3: &str = r#""model_type": "phi3", "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.5, "rope_scaling": {"short_factor": [1.0, 1.5, 2, 3], "long_factor": [2, 4, 6, 8]"#;

    #[test]
    fn longrope_has_its_older_names_and_its_length_beside_it() {
        let phi3 = |more: &str| read(&format!(r#", {PHI3}, {more}}}"#)).unwrap().rope;
        let rope = phi3(r#""type": "longrope""#);
        let RopeScaling::LongRope(long) = &rope.scaling else { panic!("{rope:?}") };
        assert_eq!((rope.rotary_dims, long.original_max_position_embeddings), (8, 64));
        assert_eq!(long.long_factor, [2.0, 4.0, 6.0, 8.0]);
        // √(1 + ln(512 / 64) / ln 64)
        assert!((long.attention_factor - 1.5_f64.sqrt()).abs() < 1e-12);
        assert_eq!(phi3(r#""type": "su""#), rope);
        // transformers takes the length beside the object, never that in it.
        assert_eq!(phi3(r#""rope_type": "yarn", "original_max_position_embeddings": 32"#), rope);
    }

    #[test]
    fn a_rotary_embedding_that_cannot_be_is_refused() {
        let refused = |more: &str| read(more).unwrap_err().to_string();
        let factors = refused(&format!(r#", {}, "type": "longrope"}}"#, PHI3.replace("2, 3]", "2]")));
        assert!(factors.contains("`short_factor` has 3 factors where 4 pairs"), "{factors}");
        let partial = refused(r#", "partial_rotary_factor": 0.5"#);
        assert!(partial.contains("`partial_rotary_factor: 0.5`") && partial.contains("phi3 alone"), "{partial}");
        let nested = refused(r#", "rope_parameters": {"full_attention": {"rope_type": "default"}}"#);
        assert!(nested.contains("one embedding per layer type"), "{nested}");
        let factor = refused(r#", "rope_scaling": {"type": "linear", "factor": 0}"#);
        assert!(factor.contains("rotary embedding's settings give inf"), "{factor}");
        let phi3 = refused(r#", "model_type": "phi3", "rope_scaling": {"type": "linear", "factor": 2}"#);
        assert!(phi3.contains("rope_type: linear") && phi3.contains("default, longrope"), "{phi3}");
    }

    #[test]
    fn what_is_not_supported_is_named_with_what_is() {
        let family = Config::from_json(r#"{"model_type": "mamba"}"#).unwrap_err().to_string();
        assert!(family.contains("`mamba`") && family.contains("llama"), "{family}");
        let rope = read(r#", "rope_scaling": {"rope_type": "axial", "factor": 4}"#).unwrap_err().to_string();
        assert!(rope.contains("rope_type: axial") && rope.contains("llama3"), "{rope}");
        let activation = Config::from_json(&format!("{{{}}}", LLAMA.replace("silu", "relu"))).unwrap_err().to_string();
        assert!(activation.contains("hidden_act: relu"), "{activation}");
    }

    #[test]
    fn sizes_beyond_any_model_are_refused_at_once() {
        let begin = std::time::Instant::now();
        for key in ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"] {
            for value in ["9223372036854775808", "18446744073709551615", "1000000000", "-1", "1e30", "0"] {
                let more = format!(r#", "{key}": {value}"#);
                let error = read(&more).expect_err(&more).to_string();
                assert!(error.contains(key), "{more}: {error}");
            }
        }
        for key in ["num_key_value_heads", "head_dim", "max_position_embeddings"] {
            let error = read(&format!(r#", "{key}": 9223372036854775808"#)).unwrap_err();
            assert!(matches!(&error, ConfigError::TooLarge { key: named, .. } if named == key), "{error}");
        }
        assert!(read(r#", "head_dim": 4096, "num_hidden_layers": 4096, "max_position_embeddings": 10485760"#).is_ok());
        assert!(begin.elapsed() < std::time::Duration::from_secs(1));
    }

    #[test]
    fn mistakes_name_the_key() {
        let missing = Config::from_json(r#"{"model_type": "llama"}"#).unwrap_err();
        assert!(matches!(missing, ConfigError::Missing(key) if key == "hidden_size"));
        let wrong = read(r#", "rope_theta": "high""#).unwrap_err();
        assert!(matches!(wrong, ConfigError::Type { key, .. } if key == "rope_theta"));
        assert!(matches!(read(r#", "head_dim": 0"#).unwrap_err(), ConfigError::Sizes(_)));
        assert!(matches!(Config::from_json("[]").unwrap_err(), ConfigError::NotAnObject(None)));
    }
}
