//! The families of decoders: what each does its own way, read from its `config.json`. One function per family.

use std::path::Path;

use serde_json::Value;

use crate::config::{AttentionBias, Config, ConfigError, Fields, HeadWeight, LayerNorms, MlpBias, Projections, QkNorm};
use crate::ops::{Activation, NormWeight};

type Read = fn(&Fields<'_>) -> Result<Config, ConfigError>;

/// Each family, by its `model_type` and its architecture.
const FAMILIES: [(&str, &str, Read); 7] = [
    ("llama", "LlamaForCausalLM", llama),
    ("mistral", "MistralForCausalLM", mistral),
    ("qwen2", "Qwen2ForCausalLM", qwen2),
    ("qwen3", "Qwen3ForCausalLM", qwen3),
    ("gemma", "GemmaForCausalLM", gemma),
    ("gemma2", "Gemma2ForCausalLM", gemma2),
    ("phi3", "Phi3ForCausalLM", phi3),
];

impl Config {
    /// Reads the `config.json` of a checkpoint folder.
    ///
    /// # Errors
    /// Fails if it cannot be read or describes a model that we do not compute.
    pub fn read(folder: &Path) -> Result<Self, ConfigError> {
        let path = folder.join("config.json");
        match std::fs::read_to_string(&path) {
            Ok(text) => Self::from_json(&text),
            Err(source) => Err(ConfigError::Read { path, source }),
        }
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// Fails if it describes a model that we do not compute.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let value: Value = serde_json::from_str(text).map_err(|source| ConfigError::NotAnObject(Some(source)))?;
        let object = value.as_object().ok_or(ConfigError::NotAnObject(None))?;
        let config = config(&Fields(object))?;
        config.check()?;
        Ok(config)
    }
}

/// Reads the configuration of a model of any supported family.
fn config(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    let architecture = fields.texts("architectures")?.and_then(|names| names.first().copied());
    let model_type = fields.text("model_type")?;
    let found = FAMILIES.iter().find(|(name, class, _)| match model_type {
        Some(model_type) => model_type == *name,
        None => architecture == Some(class),
    });
    let Some((name, class, read)) = found else {
        let found = model_type.or(architecture).ok_or_else(|| ConfigError::Missing("model_type".to_owned()))?;
        return Err(ConfigError::Family {
            found: found.to_owned(),
            supported: FAMILIES.map(|family| family.0).to_vec(),
        });
    };
    match architecture {
        Some(other) if other != *class => {
            Err(ConfigError::Unsupported { key: "architectures".to_owned(), value: other.to_owned(), supported: class })
        }
        _ => Ok(Config { model_type: (*name).to_owned(), ..read(fields)? }),
    }
}

/// Llama 2 to 3.2, and what is shaped like them.
fn llama(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    llama_with(fields, activation(fields)?)
}

fn llama_with(fields: &Fields<'_>, activation: Activation) -> Result<Config, ConfigError> {
    let hidden_size = fields.size("hidden_size")?;
    let num_attention_heads = fields.size("num_attention_heads")?;
    let head_dim = fields.optional_size("head_dim")?.unwrap_or(hidden_size / num_attention_heads.max(1));
    let num_hidden_layers = fields.size("num_hidden_layers")?;
    Ok(Config {
        model_type: String::new(),
        vocab_size: fields.size("vocab_size")?,
        hidden_size,
        intermediate_size: fields.size("intermediate_size")?,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads: fields.optional_size("num_key_value_heads")?.unwrap_or(num_attention_heads),
        head_dim,
        max_position_embeddings: fields.size("max_position_embeddings")?,
        rms_norm_eps: fields.optional_number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        head: head(fields, HeadWeight::Own)?,
        rope: fields.rope(head_dim)?,
        attention_scale: inverse_root(head_dim as f64),
        windows: vec![None; num_hidden_layers],
        attention_soft_cap: None,
        logit_soft_cap: None,
        embedding_scale: 1.0,
        norm_weight: NormWeight::Plain,
        layer_norms: LayerNorms::Pre,
        qk_norm: QkNorm::None,
        projections: Projections::Split,
        attention_bias: match fields.flag("attention_bias")? {
            Some(true) => AttentionBias::All,
            _ => AttentionBias::None,
        },
        mlp_bias: match fields.flag("mlp_bias")? {
            Some(true) => MlpBias::All,
            _ => MlpBias::None,
        },
        activation,
    })
}

/// A llama with a window on every layer, 4096 if the file does not say.
fn mistral(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    let llama = llama(fields)?;
    let unsaid = (!fields.0.contains_key("sliding_window")).then_some(4096);
    let window = fields.optional_size("sliding_window")?.or(unsaid);
    Ok(Config { windows: vec![window; llama.num_hidden_layers], ..llama })
}

/// A llama with biases on q, k and v.
fn qwen2(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    let llama = llama(fields)?;
    Ok(Config { attention_bias: AttentionBias::Qkv, windows: qwen_windows(fields, llama.num_hidden_layers)?, ..llama })
}

/// A llama with norms on the heads of q and k.
fn qwen3(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    let mut config = with_head_dim(llama(fields)?, fields, 128)?;
    config.windows = qwen_windows(fields, config.num_hidden_layers)?;
    Ok(Config { qk_norm: QkNorm::PerHead, ..config })
}

/// `1 + w` norms, scaled embeddings, GELU whatever the file says, tied unless the file says otherwise.
fn gemma(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    let config = with_head_dim(llama_with(fields, Activation::GeluTanh)?, fields, 256)?;
    Ok(Config {
        head: head(fields, HeadWeight::Tied)?,
        embedding_scale: (config.hidden_size as f64).sqrt() as f32,
        norm_weight: NormWeight::PlusOne,
        ..config
    })
}

/// A gemma with caps, norms around each branch, and a window on every other layer.
fn gemma2(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    let config = gemma(fields)?;
    let window = fields.optional_size("sliding_window")?.unwrap_or(4096);
    let layers = config.num_hidden_layers;
    let windows = match layer_windows(fields, Some(window), layers)? {
        Some(windows) => windows,
        None => (0..layers).map(|layer| (layer % 2 == 0).then_some(window)).collect(),
    };
    let cap = |key, unsaid: f64| match fields.0.contains_key(key) {
        true => fields.optional_number(key),
        false => Ok(Some(unsaid)),
    };
    Ok(Config {
        attention_scale: inverse_root(fields.optional_number("query_pre_attn_scalar")?.unwrap_or(256.0)),
        windows,
        attention_soft_cap: cap("attn_logit_softcapping", 50.0)?.map(|cap| cap as f32),
        logit_soft_cap: cap("final_logit_softcapping", 30.0)?.map(|cap| cap as f32),
        layer_norms: LayerNorms::PreAndPost,
        ..config
    })
}

/// A llama with fused projections and perhaps a window.
fn phi3(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    let llama = llama(fields)?;
    let window = fields.optional_size("sliding_window")?;
    let rms_norm_eps = fields.optional_number("rms_norm_eps")?.unwrap_or(1e-5) as f32;
    let windows = vec![window; llama.num_hidden_layers];
    Ok(Config { projections: Projections::Fused, windows, rms_norm_eps, ..llama })
}

fn inverse_root(x: f64) -> f32 {
    (1.0 / x.sqrt()) as f32
}

/// The configuration with the family's width of a head, where the file does not say it.
fn with_head_dim(config: Config, fields: &Fields<'_>, unsaid: usize) -> Result<Config, ConfigError> {
    let head_dim = fields.optional_size("head_dim")?.unwrap_or(unsaid);
    Ok(Config { head_dim, rope: fields.rope(head_dim)?, attention_scale: inverse_root(head_dim as f64), ..config })
}

fn head(fields: &Fields<'_>, unsaid: HeadWeight) -> Result<HeadWeight, ConfigError> {
    Ok(match fields.flag("tie_word_embeddings")? {
        Some(true) => HeadWeight::Tied,
        Some(false) => HeadWeight::Own,
        None => unsaid,
    })
}

fn activation(fields: &Fields<'_>) -> Result<Activation, ConfigError> {
    match fields.text("hidden_act")?.unwrap_or("silu") {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
        other => Err(ConfigError::Unsupported {
            key: "hidden_act".to_owned(),
            value: other.to_owned(),
            supported: "silu, gelu_pytorch_tanh",
        }),
    }
}

/// The qwens' windows: none unless `use_sliding_window`, then as `layer_types` or `max_window_layers` says.
fn qwen_windows(fields: &Fields<'_>, layers: usize) -> Result<Vec<Option<usize>>, ConfigError> {
    if fields.flag("use_sliding_window")? != Some(true) {
        return Ok(vec![None; layers]);
    }
    let window = fields.optional_size("sliding_window")?;
    if let Some(windows) = layer_windows(fields, window, layers)? {
        return Ok(windows);
    }
    let first = fields.optional_size("max_window_layers")?.unwrap_or(28);
    Ok((0..layers).map(|layer| window.filter(|_| layer >= first)).collect())
}

/// The windows that `layer_types` gives, if it is there.
fn layer_windows(
    fields: &Fields<'_>,
    window: Option<usize>,
    layers: usize,
) -> Result<Option<Vec<Option<usize>>>, ConfigError> {
    let Some(types) = fields.texts("layer_types")? else { return Ok(None) };
    if types.len() != layers {
        return Err(ConfigError::Sizes(format!("{} layer types for {layers} layers", types.len())));
    }
    let of_type = |kind: &str| match kind {
        "full_attention" => Ok(None),
        "sliding_attention" => Ok(window),
        other => Err(ConfigError::Unsupported {
            key: "layer_types".to_owned(),
            value: other.to_owned(),
            supported: "full_attention, sliding_attention",
        }),
    };
    types.into_iter().map(of_type).collect::<Result<_, _>>().map(Some)
}
