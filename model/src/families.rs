//! The families of decoders: what each does its own way, read from its `config.json`. One function per family.
//!
//! A key counts for a family as it does in transformers. One that would change the result there and is not computed
//! here is refused by name; one that transformers does not read for the family is not read here either.

use std::io::Read as _;
use std::path::Path;

use serde_json::Value;

use crate::config::{
    AttentionBias, Config, ConfigError, Fields, HeadWeight, LayerNorms, MlpBias, Projections, QkNorm, RopeDialect,
    StoredQuantized,
};
use crate::ops::{Activation, NormWeight};
use crate::weights::Nf4;

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
        match read_bounded(&path) {
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

/// The largest `config.json`: published ones have some kilobytes.
const LARGEST_FILE: u64 = 16 << 20;

fn read_bounded(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let read = std::fs::File::open(path)?.take(LARGEST_FILE + 1).read_to_string(&mut text)?;
    match read as u64 > LARGEST_FILE {
        true => Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, "it is larger than 16 MiB")),
        false => Ok(text),
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
        _ => {
            refuse_what_none_computes(fields)?;
            let stored_quantized = match fields.object("quantization_config")? {
                None => None,
                Some(quantization) if quantization.text("quant_method")? == Some(GGUF) => {
                    let bytes = quantization.optional_number("weight_bytes")?.unwrap_or(0.0) as u64;
                    Some(StoredQuantized::Gguf { bytes })
                }
                Some(quantization) => {
                    let double_quantization = quantization.flag("bnb_4bit_use_double_quant")?.unwrap_or(false);
                    Some(StoredQuantized::Nf4(Nf4 { double_quantization, ..Nf4::default() }))
                }
            };
            Ok(Config { model_type: (*name).to_owned(), stored_quantized, ..read(fields)? })
        }
    }
}

/// The `quant_method` of a model whose weights are in a GGUF file.
const GGUF: &str = "gguf";

/// Refuses settings that change the result, stand in the file of any family, and are computed for none.
fn refuse_what_none_computes(fields: &Fields<'_>) -> Result<(), ConfigError> {
    for key in ["quantization_config", "compression_config"] {
        let Some(quantization) = fields.object(key)? else { continue };
        let method = quantization.text("quant_method")?.unwrap_or("quantised weights");
        if method == GGUF {
            continue;
        }
        if method == "bitsandbytes" && quantization.flag("load_in_4bit")? == Some(true) {
            // bitsandbytes' own default is fp4.
            let format = quantization.text("bnb_4bit_quant_type")?.unwrap_or("fp4");
            if ["nf4", "fp4"].contains(&format) {
                continue;
            }
            let key = "bnb_4bit_quant_type".to_owned();
            return Err(ConfigError::Unsupported { key, value: format.to_owned(), supported: "nf4, fp4" });
        }
        return Err(ConfigError::Unsupported {
            key: key.to_owned(),
            value: method.to_owned(),
            supported: "f32, bf16 or f16, what bitsandbytes stores in 4 bits, or a GGUF file",
        });
    }
    for key in ["attention_dropout", "resid_pdrop", "embd_pdrop"] {
        if fields.optional_number(key)?.unwrap_or(0.0) != 0.0 {
            return Err(fields.unsupported(key, "0"));
        }
    }
    for key in ["use_bidirectional_attention", "is_encoder_decoder"] {
        refuse_flag(fields, key)?;
    }
    match fields.find("per_layer_config") {
        Some(_) => Err(fields.unsupported("per_layer_config", "one shape for all layers")),
        None => Ok(()),
    }
}

fn refuse_flag(fields: &Fields<'_>, key: &str) -> Result<(), ConfigError> {
    match fields.flag(key)? {
        Some(true) => Err(fields.unsupported(key, "false")),
        Some(false) | None => Ok(()),
    }
}

/// What a family takes for granted where its file is silent.
struct Unsaid {
    /// The width of a head; none: the model's width over the query heads.
    head_dim: Option<usize>,
    /// Whether a file without `num_key_value_heads` means as many as there are query heads.
    key_value_heads: UnsaidKeyValueHeads,
    rms_norm_eps: f64,
    head: HeadWeight,
    rope: RopeDialect,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum UnsaidKeyValueHeads {
    AsQueryHeads,
    /// transformers then has a number of its own, that of one published model: better asked for.
    Refused,
}

const LLAMA: Unsaid = Unsaid {
    head_dim: None,
    key_value_heads: UnsaidKeyValueHeads::AsQueryHeads,
    rms_norm_eps: 1e-6,
    head: HeadWeight::Own,
    rope: RopeDialect::Llama,
};

/// Llama 2 to 3.2, Code Llama, and what is shaped like them.
fn llama(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    let config = Config {
        attention_bias: attention_bias(fields)?,
        mlp_bias: match fields.flag("mlp_bias")? {
            Some(true) => MlpBias::All,
            Some(false) | None => MlpBias::None,
        },
        ..llama_like(fields, &LLAMA, activation(fields, "hidden_act")?)?
    };
    agreeing_layer_types(fields, config)
}

/// What all families have in common, without biases and windows.
fn llama_like(fields: &Fields<'_>, unsaid: &Unsaid, activation: Activation) -> Result<Config, ConfigError> {
    let hidden_size = fields.size("hidden_size")?;
    let num_attention_heads = fields.size("num_attention_heads")?;
    let unsaid_head_dim = unsaid.head_dim.unwrap_or(hidden_size / num_attention_heads.max(1));
    let head_dim = fields.optional_size("head_dim")?.unwrap_or(unsaid_head_dim);
    let num_hidden_layers = fields.size("num_hidden_layers")?;
    let refused = unsaid.key_value_heads == UnsaidKeyValueHeads::Refused;
    let num_key_value_heads = match fields.optional_size("num_key_value_heads")? {
        None if refused && !fields.says("num_key_value_heads") => fields.size("num_key_value_heads")?,
        said => said.unwrap_or(num_attention_heads),
    };
    Ok(Config {
        model_type: String::new(),
        vocab_size: fields.size("vocab_size")?,
        hidden_size,
        intermediate_size: fields.size("intermediate_size")?,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        max_position_embeddings: fields.size("max_position_embeddings")?,
        rms_norm_eps: fields.optional_number("rms_norm_eps")?.unwrap_or(unsaid.rms_norm_eps) as f32,
        head: match fields.flag("tie_word_embeddings")? {
            Some(true) => HeadWeight::Tied,
            Some(false) => HeadWeight::Own,
            None => unsaid.head,
        },
        rope: fields.rope(head_dim, unsaid.rope)?,
        attention_scale: inverse_root(head_dim as f64),
        windows: vec![None; num_hidden_layers],
        attention_soft_cap: None,
        logit_soft_cap: None,
        embedding_scale: 1.0,
        norm_weight: NormWeight::Plain,
        layer_norms: LayerNorms::Pre,
        qk_norm: QkNorm::None,
        projections: Projections::Split,
        attention_bias: AttentionBias::None,
        mlp_bias: MlpBias::None,
        activation,
        stored_quantized: None,
    })
}

/// A llama without biases, and with a window on every layer: 4096 if the file does not say.
fn mistral(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    refuse_flag(fields, "attention_bias")?;
    refuse_flag(fields, "mlp_bias")?;
    let unsaid = Unsaid { key_value_heads: UnsaidKeyValueHeads::Refused, ..LLAMA };
    let config = llama_like(fields, &unsaid, activation(fields, "hidden_act")?)?;
    let windows = vec![window(fields, Some(4096))?; config.num_hidden_layers];
    agreeing_layer_types(fields, Config { windows, ..config })
}

/// A llama with biases on q, k and v, whatever the file says.
fn qwen2(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    Ok(Config { attention_bias: AttentionBias::Qkv, ..qwen(fields, None)? })
}

/// A llama with norms on the heads of q and k.
fn qwen3(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    let attention_bias = attention_bias(fields)?;
    Ok(Config { attention_bias, qk_norm: QkNorm::PerHead, ..qwen(fields, Some(128))? })
}

fn qwen(fields: &Fields<'_>, head_dim: Option<usize>) -> Result<Config, ConfigError> {
    refuse_flag(fields, "mlp_bias")?;
    let unsaid = Unsaid { head_dim, key_value_heads: UnsaidKeyValueHeads::Refused, ..LLAMA };
    let config = llama_like(fields, &unsaid, activation(fields, "hidden_act")?)?;
    Ok(Config { windows: qwen_windows(fields, config.num_hidden_layers)?, ..config })
}

/// `1 + w` norms, scaled embeddings, tied unless the file says otherwise.
fn gemma(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    // The first files said "gelu" and meant its tanh form.
    let activation = match fields.text("hidden_act")? {
        None | Some("gelu") => Activation::GeluTanh,
        Some(_) => activation(fields, "hidden_act")?,
    };
    agreeing_layer_types(fields, gemma_like(fields, activation)?)
}

fn gemma_like(fields: &Fields<'_>, activation: Activation) -> Result<Config, ConfigError> {
    refuse_flag(fields, "mlp_bias")?;
    let unsaid =
        Unsaid { head_dim: Some(256), key_value_heads: UnsaidKeyValueHeads::Refused, head: HeadWeight::Tied, ..LLAMA };
    let config = llama_like(fields, &unsaid, activation)?;
    Ok(Config {
        attention_bias: attention_bias(fields)?,
        embedding_scale: (config.hidden_size as f64).sqrt() as f32,
        norm_weight: NormWeight::PlusOne,
        ..config
    })
}

/// A gemma with caps, norms around each branch, and a window on every other layer.
fn gemma2(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    let activation = match fields.text("hidden_activation")? {
        None => Activation::GeluTanh,
        Some(_) => activation(fields, "hidden_activation")?,
    };
    let config = gemma_like(fields, activation)?;
    let window = window(fields, Some(4096))?;
    let layers = config.num_hidden_layers;
    let windows = match layer_windows(fields, window, layers)? {
        Some(windows) => windows,
        None => (0..layers).map(|layer| window.filter(|_| layer % 2 == 0)).collect(),
    };
    let cap = |key, unsaid: f64| match fields.says(key) {
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

/// A llama without biases, with fused projections and perhaps a window.
fn phi3(fields: &Fields<'_>) -> Result<Config, ConfigError> {
    refuse_flag(fields, "attention_bias")?;
    refuse_flag(fields, "mlp_bias")?;
    let unsaid = Unsaid { rms_norm_eps: 1e-5, rope: RopeDialect::Phi3, ..LLAMA };
    let config = llama_like(fields, &unsaid, activation(fields, "hidden_act")?)?;
    let windows = vec![window(fields, None)?; config.num_hidden_layers];
    agreeing_layer_types(fields, Config { projections: Projections::Fused, windows, ..config })
}

fn inverse_root(x: f64) -> f32 {
    (1.0 / x.sqrt()) as f32
}

fn attention_bias(fields: &Fields<'_>) -> Result<AttentionBias, ConfigError> {
    Ok(match fields.flag("attention_bias")? {
        Some(true) => AttentionBias::All,
        Some(false) | None => AttentionBias::None,
    })
}

fn activation(fields: &Fields<'_>, key: &str) -> Result<Activation, ConfigError> {
    match fields.text(key)?.unwrap_or("silu") {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        _ => Err(fields.unsupported(key, "silu, gelu_pytorch_tanh")),
    }
}

/// `sliding_window`, or what the family takes for it where the file has no such key. Null says that there is none.
fn window(fields: &Fields<'_>, unsaid: Option<usize>) -> Result<Option<usize>, ConfigError> {
    match fields.says("sliding_window") {
        true => fields.optional_size("sliding_window"),
        false => Ok(unsaid),
    }
}

/// The qwens' windows: none unless `use_sliding_window`, then as `layer_types` or `max_window_layers` says.
fn qwen_windows(fields: &Fields<'_>, layers: usize) -> Result<Vec<Option<usize>>, ConfigError> {
    let window = match fields.flag("use_sliding_window")? {
        Some(true) => window(fields, Some(4096))?,
        Some(false) | None => None,
    };
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
    let refused = |value: &str, supported| {
        Err(ConfigError::Unsupported { key: "layer_types".to_owned(), value: value.to_owned(), supported })
    };
    let of_type = |kind: &str| match (kind, window) {
        ("full_attention", _) => Ok(None),
        ("sliding_attention", Some(window)) => Ok(Some(window)),
        ("sliding_attention", None) => refused(kind, "full_attention, as the file switches the window off"),
        _ => refused(kind, "full_attention, sliding_attention"),
    };
    types.into_iter().map(of_type).collect::<Result<_, _>>().map(Some)
}

/// The configuration, if `layer_types` does not contradict it: these families have one kind of layer in transformers,
/// which does not read that key for them. A file that says otherwise means another model.
fn agreeing_layer_types(fields: &Fields<'_>, config: Config) -> Result<Config, ConfigError> {
    let window = config.windows.first().copied().flatten();
    match layer_windows(fields, window, config.num_hidden_layers)? {
        Some(windows) if windows != config.windows => {
            Err(fields.unsupported("layer_types", "the same attention in every layer of this family"))
        }
        _ => Ok(config),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: &str = r#""vocab_size": 320, "hidden_size": 64, "intermediate_size": 144, "num_attention_heads": 4,
        "num_hidden_layers": 2, "max_position_embeddings": 512"#;

    /// A file of a family that says this besides its shape.
    fn read(family: &str, more: &str) -> Result<Config, ConfigError> {
        Config::from_json(&format!(r#"{{"model_type": "{family}", "num_key_value_heads": 2, {SHAPE}{more}}}"#))
    }

    fn refusal(family: &str, more: &str) -> String {
        read(family, more).expect_err(more).to_string()
    }

    #[test]
    fn what_changes_the_result_and_is_not_computed_is_refused_for_every_family() {
        for (family, ..) in FAMILIES {
            assert!(read(family, r#", "attention_dropout": 0.0, "quantization_config": null"#).is_ok(), "{family}");
            for (more, named) in [
                (r#", "quantization_config": {"quant_method": "gptq", "bits": 4}"#, "`quantization_config: gptq`"),
                (r#", "attention_dropout": 0.1"#, "`attention_dropout: 0.1` is not supported; supported: 0"),
                (r#", "resid_pdrop": 0.1"#, "`resid_pdrop: 0.1`"),
                (r#", "use_bidirectional_attention": true"#, "`use_bidirectional_attention: true`"),
                (r#", "per_layer_config": {"0": {}}"#, "`per_layer_config: {"),
                (r#", "rope_scaling": {"rope_type": "proportional"}"#, "`rope_type: proportional`"),
                (r#", "layer_types": ["full_attention", "chunked_attention"]"#, "`layer_types: chunked_attention`"),
            ] {
                let error = refusal(family, more);
                assert!(error.contains(named), "{family}: {error}");
            }
            let key = if family == "gemma2" { "hidden_activation" } else { "hidden_act" };
            let error = refusal(family, &format!(r#", "{key}": "relu""#));
            assert!(error.contains("relu` is not supported; supported: silu, gelu_pytorch_tanh"), "{family}: {error}");
            if family != "llama" {
                assert!(refusal(family, r#", "mlp_bias": true"#).contains("`mlp_bias: true`"), "{family}");
            }
        }
    }

    /// Keys of published files that have no say, or say what is computed anyway.
    #[test]
    fn nothing_else_is_refused() {
        for (family, more) in [
            (
                "llama",
                r#", "pretraining_tp": 2, "rope_interleaved": false, "is_llama_config": true, "use_cache": true"#,
            ),
            ("mistral", r#", "sliding_window": 4096, "attention_bias": false, "layer_types": null"#),
            (
                "qwen2",
                r#", "use_sliding_window": false, "sliding_window": 131072, "max_window_layers": 28, "use_mrope": false"#,
            ),
            (
                "qwen3",
                r#", "use_sliding_window": false, "sliding_window": null, "max_window_layers": 36, "rope_scaling": null"#,
            ),
            ("gemma", r#", "hidden_act": "gelu", "hidden_activation": null, "use_bidirectional_attention": null"#),
            ("gemma2", r#", "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid""#),
            (
                "phi3",
                r#", "embd_pdrop": 0.0, "resid_pdrop": 0, "full_attn_mod": 1, "lm_head_bias": false, "auto_map": {}"#,
            ),
            ("phi3", r#", "sliding_window": 262144, "layer_types": ["sliding_attention", "sliding_attention"]"#),
        ] {
            read(family, more).unwrap_or_else(|error| panic!("{family}: {error}"));
        }
    }

    #[test]
    fn another_class_of_a_family_is_refused() {
        let error = refusal("llama", r#", "architectures": ["LlamaForSequenceClassification"]"#);
        assert!(error.contains("LlamaForSequenceClassification") && error.contains("LlamaForCausalLM"), "{error}");
    }

    #[test]
    fn each_family_has_its_own_biases() {
        let biased = |family: &str| read(family, r#", "attention_bias": true"#);
        for family in ["llama", "qwen3", "gemma", "gemma2"] {
            assert_eq!(biased(family).unwrap().attention_bias, AttentionBias::All, "{family}");
        }
        for family in ["mistral", "phi3"] {
            assert!(biased(family).unwrap_err().to_string().contains("attention_bias"), "{family}");
        }
        assert_eq!(biased("qwen2").unwrap().attention_bias, AttentionBias::Qkv);
        assert_eq!(read("qwen2", r#", "attention_bias": false"#).unwrap().attention_bias, AttentionBias::Qkv);
    }

    #[test]
    fn windows_follow_the_family() {
        let windows = |family: &str, more: &str| read(family, more).unwrap().windows;
        assert_eq!(windows("mistral", ""), [Some(4096); 2]);
        assert_eq!(windows("mistral", r#", "sliding_window": null"#), [None; 2]);
        assert_eq!(windows("phi3", ""), [None; 2]);
        assert_eq!(windows("gemma2", r#", "sliding_window": 8"#), [Some(8), None]);
        let layers = r#", "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]"#;
        assert_eq!(windows("gemma2", layers), [None, Some(8)]);
        assert_eq!(windows("qwen2", r#", "sliding_window": 8"#), [None; 2]);
        let on = r#", "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1"#;
        assert_eq!(windows("qwen2", on), [None, Some(8)]);
        assert!(refusal("qwen2", layers).contains("the file switches the window off"));
        assert!(refusal("mistral", layers).contains("layer_types"));
        assert!(refusal("llama", layers).contains("layer_types"));
    }

    #[test]
    fn the_gemmas_activation_has_two_names() {
        let gemma = |more: &str| read("gemma", more).unwrap().activation;
        for more in ["", r#", "hidden_act": "gelu""#, r#", "hidden_act": "gelu_pytorch_tanh""#] {
            assert_eq!(gemma(more), Activation::GeluTanh, "{more}");
        }
        assert_eq!(gemma(r#", "hidden_act": "silu""#), Activation::Silu);
        // gemma2 reads another key, under which "gelu" is the exact one.
        assert_eq!(read("gemma2", r#", "hidden_act": "relu""#).unwrap().activation, Activation::GeluTanh);
        assert!(refusal("gemma2", r#", "hidden_activation": "gelu""#).contains("hidden_activation: gelu"));
    }

    #[test]
    fn an_absent_number_of_key_heads_is_not_guessed() {
        let read = |family| Config::from_json(&format!(r#"{{"model_type": "{family}", {SHAPE}}}"#));
        assert_eq!(read("llama").unwrap().num_key_value_heads, 4);
        assert_eq!(read("phi3").unwrap().num_key_value_heads, 4);
        assert!(matches!(read("mistral"), Err(ConfigError::Missing(key)) if key == "num_key_value_heads"));
    }
}
