//! Fresh weights: a new decoder as transformers would initialise it, and a new adapter as PEFT would.
//!
//! Each value is a function of the seed, the tensor's name and the index in it, so the weights do not depend on the
//! order in which tensors are made, on threads, or on what else the model has.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use crate::checkpoint::{
    CheckpointWriteError, CheckpointWriter, DEFAULT_MAX_SHARD_BYTES, Dtype, TensorSpec, torch_name, write_atomically,
};
use crate::random::{Address, Purpose, Stream};

/// The shape of a new model, a llama: the names and the defaults are those of transformers' `LlamaConfig`.
#[derive(Debug, Clone, PartialEq)]
pub struct NewModel {
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
    /// Width of a head; `hidden_size / num_attention_heads` if absent.
    pub head_dim: Option<usize>,
    /// Maximum number of positions.
    pub max_position_embeddings: usize,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// The epsilon of the norms.
    pub rms_norm_eps: f64,
    /// Whether the LM head shares the weights of the token embedding.
    pub tie_word_embeddings: bool,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// First token of a text.
    pub bos_token_id: Option<u32>,
    /// Last token of a text.
    pub eos_token_id: Option<u32>,
    /// Padding.
    pub pad_token_id: Option<u32>,
}

impl Default for NewModel {
    fn default() -> Self {
        Self {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: None,
            max_position_embeddings: 2048,
            rope_theta: 10_000.0,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: false,
            initializer_range: 0.02,
            bos_token_id: Some(1),
            eos_token_id: Some(2),
            pad_token_id: None,
        }
    }
}

/// Why a model of that shape cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum NewModelError {
    /// A size is 0.
    #[error("`{0}` is 0")]
    Zero(&'static str),
    /// One size has to divide another.
    #[error("`{divisor}` ({divisor_value}) does not divide `{name}` ({value})")]
    DoesNotDivide {
        /// The size to be divided.
        name: &'static str,
        /// Its value.
        value: usize,
        /// The size that has to divide it.
        divisor: &'static str,
        /// Its value.
        divisor_value: usize,
    },
    /// The rotary embedding turns pairs.
    #[error("`head_dim` is {0}, which is odd")]
    OddHead(usize),
    /// The weights are wanted in a type that no configuration names.
    #[error("a model has no weights of dtype {0}")]
    Dtype(Dtype),
    /// The files cannot be written.
    #[error(transparent)]
    Write(#[from] CheckpointWriteError),
}

/// How the values of a fresh tensor are drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fill {
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    /// Always 1: the norms.
    One,
}

impl NewModel {
    /// Checks that the sizes fit each other.
    ///
    /// # Errors
    /// Fails if one is 0 or does not divide where it has to.
    pub fn check(&self) -> Result<(), NewModelError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim.unwrap_or(1)),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            return Err(NewModelError::Zero(name));
        }
        let divides = |name, value: usize, divisor, divisor_value: usize| match value % divisor_value {
            0 => Ok(()),
            _ => Err(NewModelError::DoesNotDivide { name, value, divisor, divisor_value }),
        };
        let heads = ("num_attention_heads", self.num_attention_heads);
        if self.head_dim.is_none() {
            divides("hidden_size", self.hidden_size, heads.0, heads.1)?;
        }
        divides(heads.0, heads.1, "num_key_value_heads", self.num_key_value_heads)?;
        match self.head_dim() % 2 {
            0 => Ok(()),
            _ => Err(NewModelError::OddHead(self.head_dim())),
        }
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads)
    }

    /// Names, shapes and contents of all weights.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>, Fill)> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let (heads, kv_heads) =
            (self.num_attention_heads * self.head_dim(), self.num_key_value_heads * self.head_dim());
        let normal = Fill::Normal(self.initializer_range);
        let mut tensors = vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, hidden], normal)];
        for layer in 0..self.num_hidden_layers {
            let layer = [
                ("input_layernorm", vec![hidden], Fill::One),
                ("mlp.down_proj", vec![hidden, inner], normal),
                ("mlp.gate_proj", vec![inner, hidden], normal),
                ("mlp.up_proj", vec![inner, hidden], normal),
                ("post_attention_layernorm", vec![hidden], Fill::One),
                ("self_attn.k_proj", vec![kv_heads, hidden], normal),
                ("self_attn.o_proj", vec![hidden, heads], normal),
                ("self_attn.q_proj", vec![heads, hidden], normal),
                ("self_attn.v_proj", vec![kv_heads, hidden], normal),
            ]
            .map(|(name, shape, fill)| (format!("model.layers.{layer}.{name}.weight"), shape, fill));
            tensors.extend(layer);
        }
        tensors.push(("model.norm.weight".to_owned(), vec![hidden], Fill::One));
        if !self.tie_word_embeddings {
            tensors.push(("lm_head.weight".to_owned(), vec![self.vocab_size, hidden], normal));
        }
        tensors
    }

    /// The content of `config.json` for weights of a dtype, in the older spelling of the Hub, which every reader knows.
    ///
    /// # Errors
    /// Fails if `dtype` is not F32, BF16 or F16.
    pub fn config(&self, dtype: Dtype) -> Result<Map<String, Value>, NewModelError> {
        let torch_dtype = torch_name(dtype).ok_or(NewModelError::Dtype(dtype))?;
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "head_dim": self.head_dim(),
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": self.initializer_range,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": false,
            "model_type": "llama",
            "num_attention_heads": self.num_attention_heads,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "pad_token_id": self.pad_token_id,
            "pretraining_tp": 1,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": null,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": torch_dtype,
            "use_cache": true,
            "vocab_size": self.vocab_size,
        });
        let Value::Object(config) = config else { unreachable!("written as an object above") };
        Ok(config)
    }

    /// Writes a new model into `folder`: its weights, rounded once to `dtype`, and `config.json`. Returns the paths
    /// written.
    ///
    /// Memory holds one tensor at a time.
    ///
    /// # Errors
    /// Fails if the sizes do not fit, or the disk refuses.
    pub fn write(&self, folder: &Path, seed: u64, dtype: Dtype) -> Result<Vec<PathBuf>, NewModelError> {
        self.check()?;
        let config = self.config(dtype)?;
        let tensors = self.tensors();
        let specs = tensors.iter().map(|(name, shape, _)| TensorSpec::new(name.as_str(), dtype, shape)).collect();
        let mut writer = CheckpointWriter::create(folder, specs, DEFAULT_MAX_SHARD_BYTES)?;
        for (name, shape, fill) in tensors {
            writer.write_f32(&name, &fresh_tensor(seed, &name, shape.iter().product(), fill))?;
        }
        let mut written = writer.finish()?;
        let path = folder.join("config.json");
        write_atomically(&path, format!("{:#}\n", Value::Object(config)).as_bytes())?;
        written.push(path);
        Ok(written)
    }
}

/// The values of a fresh model tensor: a function of seed, name and index.
pub fn fresh_tensor(seed: u64, name: &str, elements: usize, fill: Fill) -> Vec<f32> {
    let Fill::Normal(deviation) = fill else { return vec![1.0; elements] };
    let stream = Stream::new(seed, Address::named(Purpose::ModelInit, name));
    let mut values = vec![0.0; elements];
    values.par_chunks_mut(4 * 1024).enumerate().for_each(|(piece, values)| {
        for (block, values) in values.chunks_mut(4).enumerate() {
            let normals = stream.normals_at((piece * 1024 + block) as u64);
            for (value, normal) in values.iter_mut().zip(normals) {
                *value = (normal * deviation) as f32;
            }
        }
    });
    values
}

/// A fresh `A` of a LoRA adapter, `[rank, in_features]`: uniform in `±1/√in_features`. A fresh `B` is zero.
///
/// That is `kaiming_uniform_(a=√5)`, which PEFT and torchtune use: its bound is `√(6 / ((1 + a²)·in))`.
/// `module` is the full name, such as `model.layers.0.self_attn.q_proj`.
pub fn fresh_lora_a(seed: u64, module: &str, rank: usize, in_features: usize) -> Vec<f32> {
    let stream = Stream::new(seed, Address::named(Purpose::AdapterInit, module));
    let limit = 1.0 / (in_features as f64).sqrt();
    (0..(rank * in_features) as u64).map(|index| stream.uniform_at(index, limit)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;

    fn small() -> NewModel {
        NewModel {
            vocab_size: 100,
            hidden_size: 48,
            intermediate_size: 80,
            num_hidden_layers: 2,
            num_attention_heads: 6,
            num_key_value_heads: 2,
            ..NewModel::default()
        }
    }

    #[test]
    fn a_new_model_has_the_weights_of_its_config() {
        let folder = tempfile::tempdir().unwrap();
        small().write(folder.path(), 7, Dtype::F32).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(checkpoint.names().count(), 3 + 2 * 9);
        checkpoint.expect_shape("model.layers.1.self_attn.k_proj.weight", &[16, 48]).unwrap();
        assert!(checkpoint.tensor_f32("model.norm.weight").unwrap().iter().all(|value| *value == 1.0));
        let head = checkpoint.tensor_f32("lm_head.weight").unwrap();
        let deviation = (head.iter().map(|x| f64::from(x * x)).sum::<f64>() / head.len() as f64).sqrt();
        assert!((deviation - 0.02).abs() < 0.001, "{deviation}");
        let config: Value = serde_json::from_slice(&std::fs::read(folder.path().join("config.json")).unwrap()).unwrap();
        assert_eq!(config["torch_dtype"], "float32");
        assert_eq!(config["head_dim"], 8);
    }

    #[test]
    fn tied_embeddings_have_no_head_and_rounding_is_of_the_same_values() {
        let folder = tempfile::tempdir().unwrap();
        let model = NewModel { tie_word_embeddings: true, ..small() };
        model.write(folder.path(), 7, Dtype::BF16).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert!(!checkpoint.contains("lm_head.weight"));
        let name = "model.embed_tokens.weight";
        let exact = fresh_tensor(7, name, 4800, Fill::Normal(0.02));
        let rounded: Vec<f32> = exact.iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect();
        assert_eq!(checkpoint.tensor_f32(name).unwrap(), rounded);
    }

    #[test]
    fn values_depend_on_seed_and_name() {
        let values = |seed, name| fresh_tensor(seed, name, 10_000, Fill::Normal(1.0));
        assert_eq!(values(1, "a"), values(1, "a"));
        assert_ne!(values(1, "a"), values(2, "a"));
        assert_ne!(values(1, "a"), values(1, "b"));
        assert_eq!(values(1, "a")[..5], fresh_tensor(1, "a", 5, Fill::Normal(1.0)));
    }

    #[test]
    fn lora_a_fills_its_bound() {
        let values = fresh_lora_a(3, "model.layers.0.self_attn.q_proj", 8, 64);
        assert_eq!(values.len(), 512);
        assert!(values.iter().all(|value| value.abs() <= 0.125));
        assert!(values.iter().any(|value| *value > 0.12) && values.iter().any(|value| *value < -0.12));
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        let wrong = NewModel { num_attention_heads: 5, ..small() }.check().unwrap_err();
        assert_eq!(wrong.to_string(), "`num_attention_heads` (5) does not divide `hidden_size` (48)");
        let wrong = NewModel { num_key_value_heads: 4, ..small() }.check().unwrap_err();
        assert_eq!(wrong.to_string(), "`num_key_value_heads` (4) does not divide `num_attention_heads` (6)");
        assert!(matches!(NewModel { vocab_size: 0, ..small() }.check(), Err(NewModelError::Zero("vocab_size"))));
        assert!(matches!(NewModel { head_dim: Some(7), ..small() }.check(), Err(NewModelError::OddHead(7))));
        assert!(matches!(small().config(Dtype::I8), Err(NewModelError::Dtype(Dtype::I8))));
    }
}
