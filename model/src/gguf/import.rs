//! What a file says of its model, as a `config.json`, and which of its tensors is which of a checkpoint's.

use serde_json::{Map, Value as Json, json};

use super::architecture::{Architecture, Change, llama_3_divisors};
use super::{GgufError, GgufFile, TensorEntry, TensorType, Value};
use crate::config::{Config, PHI3_ORIGINAL_POSITIONS};
use crate::rope::LongRope;

/// A tensor of a checkpoint, and where a file has it.
pub(crate) struct SourceTensor<'a> {
    /// Its name on the Hub.
    pub(crate) name: String,
    /// Where it is.
    pub(crate) entry: &'a TensorEntry,
    /// How its values differ there.
    pub(crate) change: Change,
}

/// Makes sure that a file has each tensor of its model in its shape, and no other.
///
/// # Errors
/// Fails with the first of which that is not so.
pub fn check_tensors(file: &GgufFile) -> Result<(), GgufError> {
    sources(file).map(drop)
}

/// The tensors of a file under the names that they have on the Hub.
///
/// # Errors
/// Fails if the file's model is not computed here, lacks a tensor, or has one that the model has no place for.
pub(crate) fn sources(file: &GgufFile) -> Result<Vec<SourceTensor<'_>>, GgufError> {
    let config = Config::from_json(&Json::Object(config(file)?).to_string())?;
    let architecture = Architecture::of(&config)?;
    let mut sources = Vec::new();
    let mut known: std::collections::HashSet<String> = ROPE_TENSORS.map(str::to_owned).into();
    for (name, shape) in config.tensors() {
        let (stored, change) = architecture.tensor(&name, &config);
        let entry = tensor(file, &stored).ok_or_else(|| unusable(format!("it has no tensor `{stored}`")))?;
        if entry.shape != shape {
            return Err(unusable(format!("`{stored}` has shape {:?} where {shape:?} is expected", entry.shape)));
        }
        known.insert(stored);
        sources.push(SourceTensor { name, entry, change });
    }
    match file.tensors().iter().find(|tensor| !known.contains(&tensor.name)) {
        Some(other) => Err(unusable(format!("it has a tensor `{}` that the model has no place for", other.name))),
        None => Ok(sources),
    }
}

/// Tensors that say how the rotary embedding is scaled.
const ROPE_TENSORS: [&str; 3] = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"];

/// The `config.json` of a file's model.
///
/// # Errors
/// Fails if the model is of an architecture that is not computed here, or asks for something that is not.
pub fn config(file: &GgufFile) -> Result<Map<String, Json>, GgufError> {
    let Some(Value::String(name)) = file.get("general.architecture") else {
        return Err(unusable("it has no `general.architecture`".to_owned()));
    };
    let architecture = Architecture::named(name).ok_or_else(|| {
        let known = Architecture::ALL.map(Architecture::name).join(", ");
        unusable(format!("its architecture is `{name}`; those that are computed are {known}"))
    })?;
    Metadata { file, architecture }.config()
}

fn tensor<'a>(file: &'a GgufFile, name: &str) -> Option<&'a TensorEntry> {
    file.tensors().iter().find(|tensor| tensor.name == name)
}

fn unusable(what: String) -> GgufError {
    GgufError::Unusable(what)
}

/// The shortest number that is the same in f32.
fn shortest(x: f32) -> Json {
    x.to_string().parse::<f64>().map_or(Json::Null, Json::from)
}

/// A file's keys, and what they mean.
struct Metadata<'a> {
    file: &'a GgufFile,
    architecture: Architecture,
}

impl Metadata<'_> {
    fn config(&self) -> Result<Map<String, Json>, GgufError> {
        self.refuse_what_is_not_computed()?;
        let embedding = tensor(self.file, "token_embd.weight");
        let embedding = embedding.ok_or_else(|| unusable("it has no tensor `token_embd.weight`".to_owned()))?;
        let heads = self.size("attention.head_count")?;
        let hidden = self.size("embedding_length")?;
        let key_length = self.optional_size("attention.key_length")?;
        let head_dim = key_length.unwrap_or(hidden / heads.max(1));
        if self.optional_size("attention.value_length")?.is_some_and(|length| length != head_dim) {
            return Err(unusable("keys and values are of different widths".to_owned()));
        }
        let (model_type, class) = self.architecture.on_the_hub();
        let mut config = Map::new();
        let mut set = |key: &str, value: Json| drop(config.insert(key.to_owned(), value));
        set("architectures", json!([class]));
        set("model_type", json!(model_type));
        set("vocab_size", json!(embedding.shape[0]));
        set("hidden_size", json!(hidden));
        set("intermediate_size", json!(self.size("feed_forward_length")?));
        set("num_hidden_layers", json!(self.size("block_count")?));
        set("num_attention_heads", json!(heads));
        set("num_key_value_heads", json!(self.optional_size("attention.head_count_kv")?.unwrap_or(heads)));
        set("max_position_embeddings", json!(self.size("context_length")?));
        let epsilon = self.float("attention.layer_norm_rms_epsilon")?;
        let without = || unusable(format!("it has no `{}.attention.layer_norm_rms_epsilon`", self.architecture.name()));
        set("rms_norm_eps", shortest(epsilon.ok_or_else(without)?));
        set("tie_word_embeddings", json!(tensor(self.file, "output.weight").is_none()));
        if key_length.is_some() {
            set("head_dim", json!(head_dim));
        }
        set("rope_theta", shortest(self.float("rope.freq_base")?.unwrap_or(10_000.0)));
        set("torch_dtype", json!(dtype(embedding.tensor_type)));
        for (key, value) in self.of_the_architecture(hidden, heads, head_dim)? {
            set(key, value);
        }
        if let Some(scaling) = self.rope_scaling(head_dim)? {
            set("rope_scaling", scaling);
        }
        for name in ["bos", "eos", "eot", "eom", "padding", "unknown"] {
            let key = format!("tokenizer.ggml.{name}_token_id");
            let id = self.file.get(&key).and_then(integer);
            if let Some(id) = id.filter(|id| *id >= embedding.shape[0]) {
                return Err(unusable(format!("`{key}` is {id}, and the vocabulary has {} tokens", embedding.shape[0])));
            }
        }
        for (key, value) in self.special_ids() {
            set(key, value);
        }
        let matrices = self.file.tensors().iter().filter(|tensor| tensor.shape.len() > 1);
        let bytes: usize = matrices.map(TensorEntry::bytes).sum();
        set("quantization_config", json!({"quant_method": "gguf", "weight_bytes": bytes}));
        Ok(config)
    }

    /// What changes the result, and no model of these architectures that is computed here has.
    fn refuse_what_is_not_computed(&self) -> Result<(), GgufError> {
        if let Some(parts) = self.file.get("split.count").and_then(integer).filter(|parts| *parts > 1) {
            let help = "`llama-gguf-split --merge` makes one file of them";
            return Err(unusable(format!("it is one of {parts} parts: {help}")));
        }
        for key in ["expert_count", "attention.scale", "logit_scale", "embedding_scale", "residual_scale"] {
            let is_set = match self.get(key) {
                None | Some(Value::U32(0)) => false,
                Some(Value::F32(scale)) => *scale != 0.0 && *scale != 1.0,
                Some(_) => true,
            };
            if is_set {
                return Err(unusable(format!("`{}` is set, which is not computed", self.key(key))));
            }
        }
        Ok(())
    }

    fn of_the_architecture(
        &self,
        hidden: usize,
        heads: usize,
        head_dim: usize,
    ) -> Result<Vec<(&'static str, Json)>, GgufError> {
        let has = |name: &str| tensor(self.file, name).is_some();
        let silu = ("hidden_act", json!("silu"));
        let cap = |key: &str| Ok::<_, GgufError>(self.float(key)?.map_or(Json::Null, shortest));
        Ok(match self.architecture {
            Architecture::Llama => vec![
                silu,
                ("attention_bias", json!(has("blk.0.attn_q.bias"))),
                ("mlp_bias", json!(has("blk.0.ffn_gate.bias"))),
            ],
            Architecture::Qwen2 => vec![silu],
            Architecture::Qwen3 => vec![silu, ("attention_bias", json!(has("blk.0.attn_q.bias")))],
            Architecture::Gemma => vec![("hidden_act", json!("gelu_pytorch_tanh"))],
            Architecture::Gemma2 => {
                // The one of 27 B, whose scale follows from the width.
                let scalar = if self.size("block_count")? == 46 { hidden / heads.max(1) } else { head_dim };
                vec![
                    ("hidden_activation", json!("gelu_pytorch_tanh")),
                    ("query_pre_attn_scalar", json!(scalar)),
                    ("attn_logit_softcapping", cap("attn_logit_softcapping")?),
                    ("final_logit_softcapping", cap("final_logit_softcapping")?),
                    ("sliding_window", self.window()?),
                ]
            }
            Architecture::Phi3 => {
                let original = self.optional_size("rope.scaling.original_context_length")?;
                let original = original.unwrap_or(PHI3_ORIGINAL_POSITIONS);
                let turning = self.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
                vec![
                    silu,
                    ("sliding_window", self.window()?),
                    ("original_max_position_embeddings", json!(original)),
                    ("partial_rotary_factor", json!(turning as f64 / head_dim as f64)),
                ]
            }
        })
    }

    fn window(&self) -> Result<Json, GgufError> {
        let window = self.optional_size("attention.sliding_window")?;
        Ok(window.filter(|window| *window != 0).map_or(Json::Null, Json::from))
    }

    fn rope_scaling(&self, head_dim: usize) -> Result<Option<Json>, GgufError> {
        let dims = self.optional_size("rope.dimension_count")?.unwrap_or(head_dim);
        if dims != head_dim && self.architecture != Architecture::Phi3 {
            return Err(unusable(format!("{dims} of the {head_dim} elements of a head turn")));
        }
        let factors = |name: &str| -> Result<Option<Vec<f32>>, GgufError> {
            tensor(self.file, name).map(|tensor| self.file.tensor_f32(tensor)).transpose()
        };
        if let Some(divisors) = factors("rope_freqs.weight")? {
            let theta = self.float("rope.freq_base")?.unwrap_or(10_000.0);
            return llama_3(&divisors, theta, dims).map(Some);
        }
        let (short, long) = (factors("rope_factors_short.weight")?, factors("rope_factors_long.weight")?);
        if let (Some(short), Some(long)) = (short, long) {
            let list = |factors: Vec<f32>| factors.into_iter().map(shortest).collect::<Vec<_>>();
            let factor = self.float("rope.scaling.attn_factor")?.unwrap_or(1.0);
            let original =
                self.optional_size("rope.scaling.original_context_length")?.unwrap_or(PHI3_ORIGINAL_POSITIONS);
            let usual = LongRope::attention_factor(self.size("context_length")? as f64 / original as f64, original);
            return Ok(Some(json!({
                "rope_type": "longrope", "short_factor": list(short), "long_factor": list(long),
                "attention_factor": if usual as f32 == factor { json!(usual) } else { shortest(factor) },
            })));
        }
        let kind = match self.get("rope.scaling.type") {
            None => return Ok(None),
            Some(Value::String(kind)) => kind.as_str(),
            Some(other) => return Err(self.unfit("rope.scaling.type", other)),
        };
        let factor = self.float("rope.scaling.factor")?.unwrap_or(1.0);
        match kind {
            "none" => Ok(None),
            "linear" => Ok(Some(json!({"rope_type": "linear", "factor": shortest(factor)}))),
            "yarn" => {
                let original = self.size("rope.scaling.original_context_length")?;
                let scaling = json!({
                    "rope_type": "yarn", "factor": shortest(factor), "original_max_position_embeddings": original,
                });
                Ok(Some(scaling))
            }
            other => Err(unusable(format!("its rotary embedding is scaled as `{other}`"))),
        }
    }

    fn special_ids(&self) -> Vec<(&'static str, Json)> {
        let id = |name: &str| integer(self.file.get(&format!("tokenizer.ggml.{name}_token_id"))?);
        let mut said = Vec::new();
        said.extend(id("bos").map(|id| ("bos_token_id", json!(id))));
        let mut ends: Vec<usize> = ["eos", "eot", "eom"].into_iter().filter_map(id).collect();
        ends.dedup();
        said.extend(match ends.as_slice() {
            [] => None,
            [end] => Some(("eos_token_id", json!(end))),
            ends => Some(("eos_token_id", json!(ends))),
        });
        said.extend(id("padding").map(|id| ("pad_token_id", json!(id))));
        said
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name())
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.file.get(&self.key(key))
    }

    fn unfit(&self, key: &str, value: &Value) -> GgufError {
        let mut found = format!("{value:?}");
        if let Some((end, _)) = found.char_indices().nth(60) {
            found.truncate(end);
        }
        unusable(format!("`{}` is {found}", self.key(key)))
    }

    fn size(&self, key: &str) -> Result<usize, GgufError> {
        self.optional_size(key)?.ok_or_else(|| unusable(format!("it has no `{}`", self.key(key))))
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>, GgufError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        integer(value).map(Some).ok_or_else(|| self.unfit(key, value))
    }

    fn float(&self, key: &str) -> Result<Option<f32>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::F32(x)) if x.is_finite() => Ok(Some(*x)),
            Some(other) => Err(self.unfit(key, other)),
        }
    }
}

/// A number that is an id or a size.
pub(super) fn integer(value: &Value) -> Option<usize> {
    match *value {
        Value::U8(x) => Some(x.into()),
        Value::U16(x) => Some(x.into()),
        Value::U32(x) => usize::try_from(x).ok(),
        Value::I32(x) => usize::try_from(x).ok(),
        Value::U64(x) => usize::try_from(x).ok(),
        Value::I64(x) => usize::try_from(x).ok(),
        _ => None,
    }
}

/// What values of a type are computed as.
fn dtype(tensor_type: TensorType) -> &'static str {
    match tensor_type {
        TensorType::F16 => "float16",
        TensorType::Bf16 => "bfloat16",
        _ => "float32",
    }
}

/// The settings whose frequencies are divided by these. A file has the divisors alone; what counts of the three
/// lengths is how they stand to each other, and every published model has factors of 1 and 4.
fn llama_3(divisors: &[f32], theta: f32, dims: usize) -> Result<Json, GgufError> {
    let (low, high) = (1.0, 4.0);
    let factor = divisors.iter().copied().fold(1.0, f32::max);
    let is_equal = |original: f32| {
        let found = llama_3_divisors(dims, theta, [factor, low, high, original]);
        found.len() == divisors.len()
            && found.iter().zip(divisors).all(|(one, other)| (one - other).abs() <= 1e-5 * one)
    };
    let lengths = [8192].into_iter().chain((4..24).map(|power| 1 << power));
    let original = { lengths }.find(|length: &u32| is_equal(*length as f32)).ok_or_else(|| {
        unusable("`rope_freqs.weight` is not what `rope_type: llama3` gives with factors of 1 and 4".to_owned())
    })?;
    Ok(json!({
        "rope_type": "llama3", "factor": shortest(factor), "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }))
}
