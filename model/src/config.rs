//! A model's shape, read from the `config.json` of a Hub checkpoint in either of its spellings.

use std::path::PathBuf;

use serde_json::{Map, Value};

use crate::ops::{Activation, NormWeight};
use crate::rope::{Rope, RopeScaling};

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
    /// Positions the model is meant for.
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
    /// The model is of a family that we do not know.
    #[error("models of type `{found}` are not supported; those that are: {}", supported.join(", "))]
    Family {
        /// `model_type`, or the architecture.
        found: String,
        /// The types that are.
        supported: Vec<&'static str>,
    },
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
        Ok(())
    }
}

/// The keys of a `config.json`.
pub(crate) struct Fields<'a>(pub(crate) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    /// A value that is there and not null.
    fn find(&self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    fn read<T>(
        &self,
        key: &str,
        expected: &'static str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let wrong = || ConfigError::Type { key: key.to_owned(), expected, found: value.clone() };
        read(value).map(Some).ok_or_else(wrong)
    }

    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<usize>, ConfigError> {
        self.read(key, "a whole number", |value| usize::try_from(value.as_u64()?).ok())
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize, ConfigError> {
        self.optional_size(key)?.ok_or_else(|| ConfigError::Missing(key.to_owned()))
    }

    pub(crate) fn optional_number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        self.read(key, "a number", Value::as_f64)
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64, ConfigError> {
        self.optional_number(key)?.ok_or_else(|| ConfigError::Missing(key.to_owned()))
    }

    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        self.read(key, "true or false", Value::as_bool)
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        self.read(key, "a text", Value::as_str)
    }

    pub(crate) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        self.read(key, "a list of texts", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    fn object(&self, key: &str) -> Result<Option<Fields<'a>>, ConfigError> {
        Ok(self.read(key, "an object", Value::as_object)?.map(Fields))
    }

    /// The rotary embedding, from `rope_parameters`, or from `rope_theta` and `rope_scaling`.
    pub(crate) fn rope(&self, head_dim: usize) -> Result<Rope, ConfigError> {
        let both = self.object("rope_parameters")?;
        let scaling = match &both {
            Some(fields) => fields.scaling(self)?,
            None => self.object("rope_scaling")?.map_or(Ok(RopeScaling::Default), |fields| fields.scaling(self))?,
        };
        let in_either = |key: &str| match &both {
            Some(fields) if fields.find(key).is_some() => fields.optional_number(key),
            _ => self.optional_number(key),
        };
        let theta = in_either("rope_theta")?.unwrap_or(10_000.0);
        let turning = in_either("partial_rotary_factor")?.unwrap_or(1.0);
        let rotary_dims = (head_dim as f64 * turning) as usize;
        Ok(Rope { theta, scaling, rotary_dims, head_dim })
    }

    /// The scaling, from the object that describes it.
    fn scaling(&self, config: &Fields<'_>) -> Result<RopeScaling, ConfigError> {
        let kind = match self.text("rope_type")? {
            Some(kind) => Some(kind),
            None => self.text("type")?,
        };
        match kind.unwrap_or("default") {
            "default" => Ok(RopeScaling::Default),
            "linear" => Ok(RopeScaling::Linear { factor: self.number("factor")? }),
            "llama3" => Ok(RopeScaling::Llama3 {
                factor: self.number("factor")?,
                low_freq_factor: self.number("low_freq_factor")?,
                high_freq_factor: self.number("high_freq_factor")?,
                original_max_position_embeddings: match self.optional_number("original_max_position_embeddings")? {
                    Some(length) => length,
                    None => config.number("max_position_embeddings")?,
                },
            }),
            other => Err(ConfigError::Unsupported {
                key: "rope_type".to_owned(),
                value: other.to_owned(),
                supported: "default, linear, llama3",
            }),
        }
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

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
    fn what_is_not_supported_is_named_with_what_is() {
        let family = Config::from_json(r#"{"model_type": "mamba"}"#).unwrap_err().to_string();
        assert!(family.contains("`mamba`") && family.contains("llama"), "{family}");
        let rope = read(r#", "rope_scaling": {"rope_type": "yarn", "factor": 4}"#).unwrap_err().to_string();
        assert!(rope.contains("rope_type: yarn") && rope.contains("llama3"), "{rope}");
        let activation = Config::from_json(&format!("{{{}}}", LLAMA.replace("silu", "relu"))).unwrap_err().to_string();
        assert!(activation.contains("hidden_act: relu"), "{activation}");
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
