//! What training and inference take in memory, estimated from a model's configuration before anything is loaded.
//!
//! It counts what the decoder keeps: weights, what is trained with its gradient and moments, what blocks save for their backward,
//! and the largest of the buffers that come and go. Files in the page cache are not counted: the system takes them back.

use crate::config::{Config, HeadWeight, Projections, QkNorm};
use crate::ops::Compute;

/// A projection of a decoder layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    /// Its path below the layer: `self_attn.q_proj`.
    pub path: &'static str,
    /// Outputs.
    pub out_features: usize,
    /// Inputs.
    pub in_features: usize,
}

impl Module {
    /// Number of weights.
    pub fn weights(&self) -> u64 {
        self.out_features as u64 * self.in_features as u64
    }
}

impl Config {
    /// The projections of each decoder layer.
    pub fn layer_modules(&self) -> Vec<Module> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let (queries, keys) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let module = |path, out_features, in_features| Module { path, out_features, in_features };
        let mut modules = match self.projections {
            Projections::Split => vec![
                module("self_attn.q_proj", queries, hidden),
                module("self_attn.k_proj", keys, hidden),
                module("self_attn.v_proj", keys, hidden),
                module("mlp.gate_proj", inner, hidden),
                module("mlp.up_proj", inner, hidden),
            ],
            Projections::Fused => vec![
                module("self_attn.qkv_proj", queries + 2 * keys, hidden),
                module("mlp.gate_up_proj", 2 * inner, hidden),
            ],
        };
        modules.extend([module("self_attn.o_proj", hidden, queries), module("mlp.down_proj", hidden, inner)]);
        modules
    }

    /// Number of weights in matrices: embeddings, head and projections. Norms and biases are a thousandth of them.
    pub fn matrix_weights(&self) -> u64 {
        let table = self.vocab_size as u64 * self.hidden_size as u64;
        let tables = if self.head == HeadWeight::Tied { table } else { 2 * table };
        let layer: u64 = self.layer_modules().iter().map(Module::weights).sum();
        tables + layer * self.num_hidden_layers as u64
    }
}

/// What a training run is to hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainingLoad {
    /// Number type of the large products, and of the prepared weights.
    pub compute: Compute,
    /// Trained values.
    pub trained: u64,
    /// Tokens of a micro-batch.
    pub tokens: u64,
    /// Whether each layer's forward is run again in the backward.
    pub recompute: bool,
}

/// An estimate of a training run's memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingMemory {
    /// The prepared weights.
    pub weights: u64,
    /// Trained values, gradients and two moments, in f32.
    pub trained: u64,
    /// What blocks save for their backward.
    pub activations: u64,
    /// The largest buffers that come and go.
    pub buffers: u64,
}

impl TrainingMemory {
    /// Estimates a run.
    pub fn estimate(config: &Config, load: &TrainingLoad) -> Self {
        let per_value = 4;
        let layers = config.num_hidden_layers as u64;
        let saved = saved_per_token(config) * load.tokens * per_value;
        let activations = if load.recompute {
            layers * config.hidden_size as u64 * load.tokens * per_value + saved
        } else {
            layers * saved
        };
        Self {
            weights: weight_bytes(config, load.compute),
            trained: load.trained * 4 * per_value,
            activations,
            buffers: buffer_bytes(config, load.tokens),
        }
    }

    /// All together.
    pub fn total(&self) -> u64 {
        self.weights + self.trained + self.activations + self.buffers
    }
}

/// An estimate of the memory of running a model without training it, in bytes: its weights, and what passes through one layer.
pub fn inference_bytes(config: &Config, compute: Compute, tokens: u64) -> u64 {
    weight_bytes(config, compute) + saved_per_token(config) * tokens * 4 + buffer_bytes(config, tokens)
}

/// Keys and values of so many tokens in all layers, in bytes.
pub fn cache_bytes(config: &Config, tokens: u64) -> u64 {
    let keys = (config.num_key_value_heads * config.head_dim) as u64;
    2 * keys * config.num_hidden_layers as u64 * tokens * 4
}

/// Bytes of the prepared weights.
pub fn weight_bytes(config: &Config, compute: Compute) -> u64 {
    let per_weight = match compute {
        Compute::F32 => 4,
        Compute::Bf16 => 2,
    };
    config.matrix_weights() * per_weight
}

/// Values that a layer keeps of each token: the residual stream at both blocks, queries, keys, values and the output of attention,
/// gate and up.
fn saved_per_token(config: &Config) -> u64 {
    let (queries, keys) = (config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim);
    let head_norms = match config.qk_norm {
        QkNorm::None => 0,
        QkNorm::PerHead => queries + keys,
    };
    let attention = config.hidden_size + 2 * queries + 2 * keys + config.num_attention_heads + head_norms;
    (attention + config.hidden_size + 2 * config.intermediate_size) as u64
}

/// Buffers of the backward through an MLP, which are the widest, and a chunk of logits.
fn buffer_bytes(config: &Config, tokens: u64) -> u64 {
    let backward = (4 * config.intermediate_size + 4 * config.hidden_size) as u64 * tokens;
    let logits = config.vocab_size as u64 * tokens.min(logit_rows(config.vocab_size) as u64);
    (backward + logits) * 4
}

/// Rows of logits that exist at a time: 16 MiB of them, but not so few that the product over them is slow.
pub(crate) fn logit_rows(vocab_size: usize) -> usize {
    const LOGIT_BYTES: usize = 16 << 20;
    (LOGIT_BYTES / 4 / vocab_size).max(16)
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const LLAMA_8B: &str = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "hidden_act": "silu", "max_position_embeddings": 131072}"#;

    fn load() -> TrainingLoad {
        TrainingLoad { compute: Compute::Bf16, trained: 3_407_872, tokens: 2048, recompute: false }
    }

    #[test]
    fn the_weights_of_a_published_model_are_counted() {
        let config = Config::from_json(LLAMA_8B).unwrap();
        // The model card says 8.03 billion, norms included: 65 of 4096.
        assert_eq!(config.matrix_weights(), 8_030_261_248 - 65 * 4096);
        assert_eq!(cache_bytes(&config, 1), 2 * 1024 * 32 * 4);
    }

    #[test]
    fn recomputation_keeps_one_layer() {
        let config = Config::from_json(LLAMA_8B).unwrap();
        let whole = TrainingMemory::estimate(&config, &load());
        let recomputed = TrainingMemory::estimate(&config, &TrainingLoad { recompute: true, ..load() });
        assert_eq!(whole.weights, recomputed.weights);
        assert!(recomputed.activations < whole.activations / 8, "{recomputed:?} of {whole:?}");
    }
}
