//! What llama.cpp calls a model's parts, and what it can compute of it.

use std::f32::consts::PI;

use serde_json::{Map, Value as Json};

use super::{GgufError, Value};
use crate::config::{AttentionBias, Config, HeadWeight, LayerNorms, MlpBias, Projections, QkNorm};
use crate::ops::Activation;
use crate::rope::{Ramp, RopeScaling};

/// An architecture of llama.cpp's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Architecture {
    /// Also of the mistral family.
    Llama,
    Qwen2,
    Qwen3,
    Gemma,
    Gemma2,
    Phi3,
}

/// How the values of a tensor differ from the checkpoint's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// They do not.
    None,
    /// One is added.
    PlusOne,
    /// Rows of so many heads, whose elements that turn together become neighbours.
    PairRows { heads: usize },
}

/// A tensor that no checkpoint has.
pub(super) struct Derived {
    pub(super) name: &'static str,
    pub(super) values: Vec<f32>,
}

impl Architecture {
    /// All of them.
    pub(super) const ALL: [Self; 6] = [Self::Llama, Self::Qwen2, Self::Qwen3, Self::Gemma, Self::Gemma2, Self::Phi3];

    /// The one of this name.
    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|architecture| architecture.name() == name)
    }

    /// `model_type` and class of its models on the Hub.
    pub(super) fn on_the_hub(self) -> (&'static str, &'static str) {
        match self {
            Self::Llama => ("llama", "LlamaForCausalLM"),
            Self::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
            Self::Qwen3 => ("qwen3", "Qwen3ForCausalLM"),
            Self::Gemma => ("gemma", "GemmaForCausalLM"),
            Self::Gemma2 => ("gemma2", "Gemma2ForCausalLM"),
            Self::Phi3 => ("phi3", "Phi3ForCausalLM"),
        }
    }

    /// The architecture that computes a model.
    pub(super) fn of(config: &Config) -> Result<Self, GgufError> {
        Ok(match config.model_type.as_str() {
            "llama" | "mistral" => Self::Llama,
            "qwen2" => Self::Qwen2,
            "qwen3" => Self::Qwen3,
            "gemma" => Self::Gemma,
            "gemma2" => Self::Gemma2,
            "phi3" => Self::Phi3,
            other => return Err(refused(format!("models of type `{other}` are not written"))),
        })
    }

    /// Its name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma => "gemma",
            Self::Gemma2 => "gemma2",
            Self::Phi3 => "phi3",
        }
    }

    /// Makes sure that llama.cpp computes what the model does. The warnings say up to where it does.
    pub(super) fn check(self, config: &Config, fields: &Map<String, Json>) -> Result<Vec<String>, GgufError> {
        let scaling = object(fields, &["rope_scaling", "rope_parameters"]);
        let kind = scaling.and_then(|scaling| scaling.get("rope_type").or_else(|| scaling.get("type")));
        if kind.is_some_and(|kind| kind == "dynamic") {
            return Err(refused("its rotary embedding is dynamic (`rope_type: dynamic`)".to_owned()));
        }
        let biases_fit = match config.attention_bias {
            AttentionBias::None => self != Self::Qwen2,
            AttentionBias::Qkv => self == Self::Qwen2,
            AttentionBias::All => self == Self::Llama,
        };
        if !biases_fit || config.mlp_bias == MlpBias::All && self != Self::Llama {
            return Err(refused(format!("llama.cpp's {} has other biases", self.name())));
        }
        let norms_fit = match self {
            Self::Gemma2 => config.layer_norms == LayerNorms::PreAndPost,
            _ => config.layer_norms == LayerNorms::Pre,
        };
        let qk_norms_fit = (config.qk_norm == QkNorm::PerHead) == (self == Self::Qwen3);
        let projections_fit = (config.projections == Projections::Fused) == (self == Self::Phi3);
        if !norms_fit || !qk_norms_fit || !projections_fit {
            return Err(refused(format!("llama.cpp's {} is put together otherwise", self.name())));
        }
        let of_gemma = matches!(self, Self::Gemma | Self::Gemma2);
        let activation = if of_gemma { Activation::GeluTanh } else { Activation::Silu };
        if config.activation != activation {
            return Err(refused(format!("llama.cpp's {} has another activation", self.name())));
        }
        if of_gemma && config.head != HeadWeight::Tied {
            let why = "its head is not its embedding, and llama.cpp's has none of its own (a merge of an adapter that trained \
                       one of them takes the two apart)";
            return Err(refused(why.to_owned()));
        }
        if self == Self::Gemma2 && (config.attention_soft_cap.is_none() || config.logit_soft_cap.is_none()) {
            return Err(refused("it has no soft caps, and llama.cpp's gemma2 always has".to_owned()));
        }
        let mut warnings = self.check_attention(config)?;
        if let RopeScaling::LongRope(long) = &config.rope.scaling {
            warnings.push(format!(
                "llama.cpp chooses the factors of longrope by the size of its context (`-c`, `num_ctx`), the model by the \
                 length of the text: set a context of at most {0} tokens for texts up to {0} tokens",
                long.original_max_position_embeddings
            ));
        }
        Ok(warnings)
    }

    fn check_attention(self, config: &Config) -> Result<Vec<String>, GgufError> {
        // llama.cpp takes the gemma2 of 46 layers for the one of 27 B, whose scale follows from the width.
        let of_27b = self == Self::Gemma2 && config.num_hidden_layers == 46;
        let scalar = if of_27b { config.hidden_size / config.num_attention_heads } else { config.head_dim };
        let expected = (scalar as f32).powf(-0.5);
        if (config.attention_scale - expected).abs() > 1e-6 * expected {
            let own = config.attention_scale.powi(-2);
            let message = format!("`query_pre_attn_scalar` is {own}, where llama.cpp has {scalar}");
            return Err(refused(message));
        }
        let Some(window) = config.windows.iter().flatten().min() else {
            return match self {
                Self::Gemma2 => {
                    Err(refused("it has no windows, and every other layer of llama.cpp's gemma2 has".to_owned()))
                }
                _ => Ok(Vec::new()),
            };
        };
        if self == Self::Gemma2 {
            let alternate = config.windows.iter().enumerate().all(|(layer, own)| match layer % 2 {
                0 => *own == Some(*window),
                _ => own.is_none(),
            });
            return match alternate {
                true => Ok(Vec::new()),
                false => Err(refused("its windows are not on every other layer, the first included".to_owned())),
            };
        }
        Ok(vec![format!(
            "llama.cpp's {} has no sliding window: what it computes is the model's up to {window} tokens, and not beyond",
            self.name()
        )])
    }

    /// The keys below the architecture's name, and what the tensors cannot say of the rotary embedding.
    pub(super) fn metadata(
        self,
        config: &Config,
        fields: &Map<String, Json>,
    ) -> Result<Vec<(String, Value)>, GgufError> {
        let mut said = Vec::new();
        let mut add = |key: &str, value: Value| said.push((format!("{}.{key}", self.name()), value));
        let size = |size: usize| Value::U32(size as u32);
        add("block_count", size(config.num_hidden_layers));
        add("context_length", size(config.max_position_embeddings));
        add("embedding_length", size(config.hidden_size));
        add("feed_forward_length", size(config.intermediate_size));
        add("attention.head_count", size(config.num_attention_heads));
        add("attention.head_count_kv", size(config.num_key_value_heads));
        add("attention.layer_norm_rms_epsilon", Value::F32(config.rms_norm_eps));
        let has_head_dim = match self {
            Self::Llama | Self::Qwen3 | Self::Gemma | Self::Gemma2 => true,
            Self::Qwen2 => fields.get("head_dim").is_some_and(Json::is_u64),
            Self::Phi3 => false,
        };
        if has_head_dim {
            add("attention.key_length", size(config.head_dim));
            add("attention.value_length", size(config.head_dim));
        }
        if !matches!(self, Self::Gemma | Self::Gemma2) {
            add("rope.freq_base", Value::F32(config.rope.theta as f32));
        }
        if matches!(self, Self::Llama | Self::Phi3) {
            add("rope.dimension_count", size(config.rope.rotary_dims));
        }
        match self {
            Self::Llama => add("vocab_size", size(config.vocab_size)),
            Self::Gemma2 => {
                if let Some(cap) = config.attention_soft_cap {
                    add("attn_logit_softcapping", Value::F32(cap));
                }
                if let Some(cap) = config.logit_soft_cap {
                    add("final_logit_softcapping", Value::F32(cap));
                }
            }
            Self::Qwen2 | Self::Qwen3 | Self::Gemma | Self::Phi3 => {}
        }
        if matches!(self, Self::Gemma2 | Self::Phi3) {
            let window = config.windows.iter().flatten().min();
            // Without one, 0 tells llama.cpp that there is none.
            add("attention.sliding_window", size(window.copied().unwrap_or(0)));
        }
        if self == Self::Phi3 {
            let key = "original_max_position_embeddings";
            let original = fields.get(key).and_then(Json::as_u64).unwrap_or(4096);
            add("rope.scaling.original_context_length", size(original as usize));
        }
        for (key, value) in self.scaling(config)? {
            add(key, value);
        }
        Ok(said)
    }

    fn scaling(self, config: &Config) -> Result<Vec<(&'static str, Value)>, GgufError> {
        let of_gemma = matches!(self, Self::Gemma | Self::Gemma2);
        let text = |text: &str| Value::String(text.to_owned());
        Ok(match &config.rope.scaling {
            RopeScaling::Default if of_gemma && config.rope.theta != 10_000.0 => {
                return Err(refused(format!(
                    "`rope_theta` of a gemma is {}, where llama.cpp has 10000",
                    config.rope.theta
                )));
            }
            RopeScaling::Default => Vec::new(),
            _ if of_gemma => return Err(refused("a gemma's rotary embedding is scaled".to_owned())),
            RopeScaling::Llama3 { .. } if self == Self::Llama => Vec::new(),
            RopeScaling::Linear { factor } => {
                vec![("rope.scaling.type", text("linear")), ("rope.scaling.factor", Value::F32(*factor as f32))]
            }
            RopeScaling::Yarn(yarn) => {
                let usual = crate::rope::Yarn::attention_factor(yarn.factor, None);
                let is_usual = (yarn.beta_fast, yarn.beta_slow, &yarn.ramp) == (32.0, 1.0, &Ramp::WholePairs)
                    && (yarn.attention_factor - usual).abs() < 1e-6;
                if !is_usual {
                    return Err(refused("its YaRN embedding has other settings than the usual".to_owned()));
                }
                let original = yarn.original_max_position_embeddings as u32;
                vec![
                    ("rope.scaling.type", text("yarn")),
                    ("rope.scaling.factor", Value::F32(yarn.factor as f32)),
                    ("rope.scaling.original_context_length", Value::U32(original)),
                ]
            }
            RopeScaling::LongRope(long) if self == Self::Phi3 => {
                vec![("rope.scaling.attn_factor", Value::F32(long.attention_factor as f32))]
            }
            RopeScaling::Llama3 { .. } | RopeScaling::LongRope(_) => {
                return Err(refused(format!("llama.cpp's {} has no rotary embedding of this kind", self.name())));
            }
        })
    }

    /// Tensors with the factors of a rotary embedding; they stand first.
    pub(super) fn derived(self, config: &Config, fields: &Map<String, Json>) -> Vec<Derived> {
        let floats = |factors: &[f64]| factors.iter().map(|factor| *factor as f32).collect();
        match &config.rope.scaling {
            RopeScaling::Llama3 { .. } => vec![Derived { name: "rope_freqs.weight", values: llama_3(config, fields) }],
            RopeScaling::LongRope(long) => vec![
                Derived { name: "rope_factors_long.weight", values: floats(&long.long_factor) },
                Derived { name: "rope_factors_short.weight", values: floats(&long.short_factor) },
            ],
            RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Yarn(_) => Vec::new(),
        }
    }

    /// A tensor's name and how its values change.
    ///
    /// # Panics
    /// Panics at a name that no checkpoint of the configuration has.
    pub(super) fn tensor(self, name: &str, config: &Config) -> (String, Change) {
        let plus_one = match self {
            Self::Gemma | Self::Gemma2 => Change::PlusOne,
            _ => Change::None,
        };
        match name {
            "model.embed_tokens.weight" => return ("token_embd.weight".to_owned(), Change::None),
            "lm_head.weight" => return ("output.weight".to_owned(), Change::None),
            "model.norm.weight" => return ("output_norm.weight".to_owned(), plus_one),
            _ => {}
        }
        let parts = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let (layer, part) = parts.unwrap_or_else(|| panic!("`{name}` is a tensor of a layer"));
        let (module, kind) = part.rsplit_once('.').unwrap_or_else(|| panic!("`{name}` is a parameter"));
        let paired = |heads: usize| match self {
            Self::Llama => Change::PairRows { heads },
            _ => Change::None,
        };
        let (module, change) = match (module, self) {
            ("input_layernorm", _) => ("attn_norm", plus_one),
            ("post_attention_layernorm", Self::Gemma2) => ("post_attention_norm", plus_one),
            ("pre_feedforward_layernorm", _) | ("post_attention_layernorm", _) => ("ffn_norm", plus_one),
            ("post_feedforward_layernorm", _) => ("post_ffw_norm", plus_one),
            ("self_attn.q_proj", _) => ("attn_q", paired(config.num_attention_heads)),
            ("self_attn.k_proj", _) => ("attn_k", paired(config.num_key_value_heads)),
            ("self_attn.v_proj", _) => ("attn_v", Change::None),
            ("self_attn.qkv_proj", _) => ("attn_qkv", Change::None),
            ("self_attn.o_proj", _) => ("attn_output", Change::None),
            ("self_attn.q_norm", _) => ("attn_q_norm", Change::None),
            ("self_attn.k_norm", _) => ("attn_k_norm", Change::None),
            ("mlp.gate_proj", _) => ("ffn_gate", Change::None),
            ("mlp.up_proj" | "mlp.gate_up_proj", _) => ("ffn_up", Change::None),
            ("mlp.down_proj", _) => ("ffn_down", Change::None),
            (other, _) => panic!("`{other}` is a module of a layer"),
        };
        (format!("blk.{layer}.{module}.{kind}"), change)
    }
}

fn refused(what: String) -> GgufError {
    GgufError::Inexpressible(what)
}

fn object<'a>(fields: &'a Map<String, Json>, keys: &[&str]) -> Option<&'a Map<String, Json>> {
    keys.iter().find_map(|key| fields.get(*key)?.as_object().filter(|object| !object.is_empty()))
}

/// What divides each frequency, in the numbers and the order of operations of the converter: all in f32.
fn llama_3(config: &Config, fields: &Map<String, Json>) -> Vec<f32> {
    let scaling = object(fields, &["rope_scaling", "rope_parameters"]);
    let number = |key: &str| scaling.and_then(|scaling| scaling.get(key)?.as_f64());
    let original = number("original_max_position_embeddings").unwrap_or(8192.0) as f32;
    let factor = number("factor").unwrap_or(8.0) as f32;
    let low = number("low_freq_factor").unwrap_or(1.0) as f32;
    let high = number("high_freq_factor").unwrap_or(4.0) as f32;
    llama_3_divisors(config.rope.rotary_dims, config.rope.theta as f32, [factor, low, high, original])
}

/// The same for so many elements of a head, of `factor`, `low_freq_factor`, `high_freq_factor` and the length of
/// pretraining.
pub(super) fn llama_3_divisors(dims: usize, theta: f32, [factor, low, high, original]: [f32; 4]) -> Vec<f32> {
    let of_pair = |pair: usize| {
        let frequency = 1.0 / theta.powf((2 * pair) as f32 / dims as f32);
        let wavelength = 2.0 * PI / frequency;
        if wavelength < original / high {
            1.0
        } else if wavelength > original / low {
            factor
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            1.0 / ((1.0 - smooth) / factor + smooth)
        }
    };
    (0..dims / 2).map(of_pair).collect()
}
