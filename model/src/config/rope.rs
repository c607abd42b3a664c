//! The rotary embedding in a `config.json`, in either spelling: `rope_parameters`, or `rope_theta` and `rope_scaling`.
//!
//! Every value is taken from where transformers takes it, which differs from key to key and from family to family.

use super::{ConfigError, Fields};
use crate::rope::{LongRope, Ramp, Rope, RopeScaling, Yarn};

/// How a family says its rotary embedding.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RopeDialect {
    /// The whole head turns; any kind that transformers has for it.
    Llama,
    /// A part of the head may turn; plain or longrope, whose older names are `su` and `yarn`.
    Phi3,
}

/// `original_max_position_embeddings` of a phi3 that does not say it.
pub(crate) const PHI3_ORIGINAL_POSITIONS: usize = 4096;

impl Fields<'_> {
    /// The rotary embedding of heads of so many elements.
    pub(crate) fn rope(&self, head_dim: usize, dialect: RopeDialect) -> Result<Rope, ConfigError> {
        let filled = |key: &str| Ok(self.object(key)?.filter(|object| !object.0.is_empty()));
        let own = match filled("rope_scaling")? {
            Some(object) => Some(object),
            None => filled("rope_parameters")?,
        };
        let in_either = |key: &str| match &own {
            Some(object) if object.find(key).is_some() => object.optional_number(key),
            _ => self.optional_number(key),
        };
        let theta = in_either("rope_theta")?.unwrap_or(10_000.0);
        let turning = in_either("partial_rotary_factor")?.unwrap_or(1.0);
        if turning != 1.0 && dialect == RopeDialect::Llama {
            return Err(ConfigError::Unsupported {
                key: "partial_rotary_factor".to_owned(),
                value: turning.to_string(),
                supported: "1 (phi3 alone turns a part of a head)",
            });
        }
        let rotary_dims = (head_dim as f64 * turning) as usize;
        let scaling = match &own {
            Some(own) => Settings { own, config: self, dialect }.scaling(rotary_dims)?,
            None => RopeScaling::Default,
        };
        Ok(Rope { theta, scaling, rotary_dims, head_dim })
    }
}

/// The object that describes the embedding, and the configuration around it.
struct Settings<'a> {
    own: &'a Fields<'a>,
    config: &'a Fields<'a>,
    dialect: RopeDialect,
}

impl Settings<'_> {
    fn scaling(&self, rotary_dims: usize) -> Result<RopeScaling, ConfigError> {
        let kind = match self.own.text("rope_type")? {
            Some(kind) => Some(kind),
            None => self.own.text("type")?,
        };
        if kind.is_none() && self.own.0.values().any(serde_json::Value::is_object) {
            return Err(ConfigError::Unsupported {
                key: "rope_parameters".to_owned(),
                value: "one embedding per layer type".to_owned(),
                supported: "one for all layers",
            });
        }
        match (self.dialect, kind.unwrap_or("default")) {
            (_, "default") => Ok(RopeScaling::Default),
            (_, "longrope") | (RopeDialect::Phi3, "su" | "yarn") => self.longrope(rotary_dims),
            (RopeDialect::Llama, "linear") => Ok(RopeScaling::Linear { factor: self.own.number("factor")? }),
            // It stretches only documents beyond max_position_embeddings, and those are refused in any case.
            (RopeDialect::Llama, "dynamic") => Ok(RopeScaling::Default),
            (RopeDialect::Llama, "llama3") => Ok(RopeScaling::Llama3 {
                factor: self.own.number("factor")?,
                low_freq_factor: self.own.number("low_freq_factor")?,
                high_freq_factor: self.own.number("high_freq_factor")?,
                original_max_position_embeddings: self.original_positions()? as f64,
            }),
            (RopeDialect::Llama, "yarn") => self.yarn(),
            (dialect, other) => Err(ConfigError::Unsupported {
                key: "rope_type".to_owned(),
                value: other.to_owned(),
                supported: match dialect {
                    RopeDialect::Llama => "default, linear, dynamic, llama3, yarn, longrope",
                    RopeDialect::Phi3 => "default, longrope",
                },
            }),
        }
    }

    fn yarn(&self) -> Result<RopeScaling, ConfigError> {
        let original = self.original_positions()?;
        let factor = self.factor(original)?;
        let beta = |key, unsaid| Ok(self.own.optional_number(key)?.filter(|&beta| beta != 0.0).unwrap_or(unsaid));
        let scale = |key| Ok(self.own.optional_number(key)?.filter(|&scale| scale != 0.0));
        let mscale = scale("mscale")?.zip(scale("mscale_all_dim")?);
        Ok(RopeScaling::Yarn(Yarn {
            factor,
            beta_fast: beta("beta_fast", 32.0)?,
            beta_slow: beta("beta_slow", 1.0)?,
            original_max_position_embeddings: original as f64,
            ramp: match self.own.flag("truncate")? {
                Some(false) => Ramp::Exact,
                Some(true) | None => Ramp::WholePairs,
            },
            attention_factor: match self.own.optional_number("attention_factor")? {
                Some(given) => given,
                None => Yarn::attention_factor(factor, mscale),
            },
        }))
    }

    fn longrope(&self, rotary_dims: usize) -> Result<RopeScaling, ConfigError> {
        let original_max_position_embeddings = self.original_positions()?;
        let factors = |key: &str| {
            let factors = self.own.numbers(key)?;
            if factors.len() == rotary_dims / 2 {
                return Ok(factors);
            }
            let pairs = rotary_dims / 2;
            Err(ConfigError::Sizes(format!("`{key}` has {} factors where {pairs} pairs of a head turn", factors.len())))
        };
        Ok(RopeScaling::LongRope(LongRope {
            short_factor: factors("short_factor")?,
            long_factor: factors("long_factor")?,
            original_max_position_embeddings,
            attention_factor: match self.own.optional_number("attention_factor")? {
                Some(given) => given,
                None => LongRope::attention_factor(
                    self.factor(original_max_position_embeddings)?,
                    original_max_position_embeddings,
                ),
            },
        }))
    }

    /// By how much the length of pretraining was stretched.
    fn factor(&self, original: usize) -> Result<f64, ConfigError> {
        match self.own.optional_number("factor")? {
            Some(factor) => Ok(factor),
            None => Ok(self.config.size("max_position_embeddings")? as f64 / original as f64),
        }
    }

    /// The length of pretraining. A value beside the object overrides the one in it.
    fn original_positions(&self) -> Result<usize, ConfigError> {
        const KEY: &str = "original_max_position_embeddings";
        match (self.config.optional_size(KEY)?, self.dialect) {
            (Some(beside), _) => Ok(beside),
            (None, RopeDialect::Phi3) => Ok(PHI3_ORIGINAL_POSITIONS),
            (None, RopeDialect::Llama) => match self.own.optional_size(KEY)? {
                Some(own) => Ok(own),
                None => self.config.size("max_position_embeddings"),
            },
        }
    }
}
