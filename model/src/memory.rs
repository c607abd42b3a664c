//! What training and inference take in memory, estimated from a model's configuration before anything is loaded.
//!
//! It counts what the decoder keeps: weights, what is trained with its gradient and moments, what blocks save for their
//! backward, and the largest of the buffers that come and go. Files in the page cache are not counted: the system takes
//! them back.

use crate::checkpoint::Dtype;

use crate::config::{Config, HeadWeight, LayerNorms, Projections, QkNorm, StoredQuantized};
use crate::ops::{Compute, WeightRole};
use crate::trainer::{Recompute, Trained};
use crate::weights::{BaseFormat, BlockFormat, WeightFormat};

const F32_BYTES: u64 = 4;

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
        tables + self.layer_weights()
    }

    /// Number of weights in the projections of all layers.
    pub fn layer_weights(&self) -> u64 {
        let layer: u64 = self.layer_modules().iter().map(Module::weights).sum();
        layer * self.num_hidden_layers as u64
    }

    /// Number of weights in the largest matrix.
    pub fn largest_matrix(&self) -> u64 {
        let table = self.vocab_size as u64 * self.hidden_size as u64;
        self.layer_modules().iter().map(Module::weights).fold(table, u64::max)
    }
}

/// How frozen weights are held in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrozenFormat {
    /// As they are stored, or in what is computed in.
    AsStored,
    /// All of them in blocks.
    Blocks(BlockFormat),
    /// The linear layers but for the head quantised.
    Layers(BaseFormat),
    /// Of so many bytes in all, as a file has them.
    Bytes(u64),
}

impl FrozenFormat {
    /// That of a checkpoint whose weights are taken as they are stored.
    pub fn stored(config: &Config) -> Self {
        match config.stored_quantized {
            None => Self::AsStored,
            Some(StoredQuantized::Nf4(nf4)) => Self::Layers(BaseFormat::FourBits(nf4)),
            Some(StoredQuantized::Gguf { bytes }) => Self::Bytes(bytes),
        }
    }
}

/// What a training run is to hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainingLoad {
    /// The dtype that is computed in.
    pub compute: Compute,
    /// The type that frozen weights are read from.
    pub stored: Dtype,
    /// How frozen weights are held.
    pub frozen: FrozenFormat,
    /// What is trained.
    pub what: Trained,
    /// Trained values.
    pub trained: u64,
    /// Bytes of the optimizer's state, see [`crate::optimizer::Optimizer::state_bytes`].
    pub optimizer_bytes: u64,
    /// Values that the adapter keeps of each token for its backward, over all layers: what goes through the low rank.
    pub adapter_columns: u64,
    /// Tokens of the largest micro-batch.
    pub tokens: u64,
    /// Whether micro-batches differ in length.
    pub lengths: Lengths,
    /// What the backward computes again.
    pub recompute: Recompute,
}

/// Whether the micro-batches of a run are equally long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// All have about as many tokens as the largest.
    Equal,
    /// Some are much shorter: their buffers are of other sizes, and lie beside those of longer ones.
    Varying,
}

/// Whether several workers have the prepared weights once between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weights {
    /// They have.
    Shared,
    /// Each has its own.
    Own,
}

/// An estimate of a training run's memory, in bytes. It counts what the `cpu` kernel set has in memory at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingMemory {
    /// The prepared weights, where these are not the trained values themselves.
    pub weights: u64,
    /// Trained values and gradients, in f32, and the optimizer's state.
    pub trained: u64,
    /// What blocks save for their backward.
    pub activations: u64,
    /// The largest buffers that come and go, and those free between two uses.
    pub buffers: u64,
    /// What is copied of a trained tensor while it is saved.
    pub copies: u64,
}

impl TrainingMemory {
    /// Estimates a run.
    pub fn estimate(config: &Config, load: &TrainingLoad) -> Self {
        let layers = config.num_hidden_layers as u64;
        let saved = saved_per_token(config, load.compute);
        let kept = match load.recompute {
            Recompute::None => layers * saved + load.adapter_columns,
            Recompute::Layers => layers * config.hidden_size as u64 + saved + load.adapter_columns / layers.max(1),
        };
        let trained = load.trained * 2 * F32_BYTES + load.optimizer_bytes;
        let activations = kept * load.tokens * F32_BYTES;
        let buffers = buffer_bytes(config, load.compute, load.tokens);
        // The pool of buffers, from which all of these are taken, holds a quarter more at the most.
        let unused = match load.lengths {
            Lengths::Equal => 0,
            Lengths::Varying => (trained + activations + buffers) / 4,
        };
        let weights = match load.what {
            // Products read the trained values themselves.
            Trained::Weights => 0,
            Trained::Adapter => weight_bytes(config, load.compute, load.stored, load.frozen),
        };
        let copies = match load.what {
            // Its matrices are small.
            Trained::Adapter => 0,
            // Read into main memory, and turned into the bytes of a file.
            Trained::Weights => 2 * F32_BYTES * config.largest_matrix(),
        };
        Self { weights, trained, activations, buffers: buffers + unused, copies }
    }

    /// Of so many workers like this one; `of_weights` says whether they have the prepared weights once between them.
    #[must_use]
    pub fn of_workers(self, workers: u64, of_weights: Weights) -> Self {
        let weights = match of_weights {
            Weights::Shared => self.weights,
            Weights::Own => workers * self.weights,
        };
        let [trained, activations, buffers] =
            [self.trained, self.activations, self.buffers].map(|bytes| workers * bytes);
        // The first alone saves.
        Self { weights, trained, activations, buffers, copies: self.copies }
    }

    /// All together.
    pub fn total(&self) -> u64 {
        self.weights + self.trained + self.activations + self.buffers + self.copies
    }
}

/// An estimate of the memory of running a model without training it, in bytes: its weights, read from the stored type,
/// and what passes through one layer.
pub fn inference_bytes(config: &Config, compute: Compute, stored: Dtype, frozen: FrozenFormat, tokens: u64) -> u64 {
    weight_bytes(config, compute, stored, frozen)
        + saved_per_token(config, compute) * tokens * F32_BYTES
        + buffer_bytes(config, compute, tokens)
}

/// Keys and values of so many tokens in all layers, in bytes.
pub fn cache_bytes(config: &Config, tokens: u64) -> u64 {
    let keys = (config.num_key_value_heads * config.head_dim) as u64;
    2 * keys * config.num_hidden_layers as u64 * tokens * F32_BYTES
}

/// Bytes of the prepared weights, read from the stored dtype: f32 is computed in with weights of bf16 and f16, too.
pub fn weight_bytes(config: &Config, compute: Compute, stored: Dtype, frozen: FrozenFormat) -> u64 {
    let format = match (compute, stored) {
        (Compute::F32, Dtype::F16) => WeightFormat::F16,
        (Compute::Bf16, _) | (Compute::F32, Dtype::BF16) => WeightFormat::Bf16,
        (Compute::F32, _) => WeightFormat::F32,
    };
    let (weights, layers) = (config.matrix_weights(), config.layer_weights());
    match frozen {
        FrozenFormat::AsStored => format.bytes(weights),
        FrozenFormat::Bytes(bytes) => bytes,
        FrozenFormat::Layers(base) => format.bytes(weights - layers) + base.bytes(layers),
        FrozenFormat::Blocks(blocks) => {
            let of = |role: WeightRole, weights: u64| WeightFormat::Blocks(blocks.for_role(role)).bytes(weights);
            of(WeightRole::Matrix, layers) + of(WeightRole::Table, weights - layers)
        }
    }
}

/// Values that a layer keeps of each token: the residual stream at both blocks, queries, keys, values and the output of
/// attention, gate and up, and what norms and softmax divided by. Of gate and up and of queries, keys and values, where
/// bf16 is computed in, two are kept in the place of one.
fn saved_per_token(config: &Config, compute: Compute) -> u64 {
    let Widths { hidden, queries, keys, inner } = Widths::of(config);
    let heads = config.num_attention_heads as u64;
    let head_norms = match config.qk_norm {
        QkNorm::None => 0,
        QkNorm::PerHead => queries + keys + heads + config.num_key_value_heads as u64,
    };
    let post_norms = match config.layer_norms {
        LayerNorms::Pre => 0,
        LayerNorms::PreAndPost => 2 * (hidden + 1),
    };
    let gate_up = if compute == Compute::Bf16 { inner } else { 2 * inner };
    let qkv = if compute == Compute::Bf16 { queries.div_ceil(2) + keys } else { queries + 2 * keys };
    2 * (hidden + 1) + queries + qkv + heads + gate_up + head_norms + post_norms
}

/// Buffers that come and go. Those of one size are used again and again, while those of other sizes wait: so what
/// counts is, for each width, the most that a forward or a backward has at once.
fn buffer_bytes(config: &Config, compute: Compute, tokens: u64) -> u64 {
    let Widths { hidden, queries, keys, inner } = Widths::of(config);
    // Through the head: its input, that normed, the gradients of both and, a chunk at a time, of the logits' input once
    // more. Through attention: the gradients of its output and of the queries.
    let residual = if queries == hidden { 6 * hidden } else { 5 * hidden + 2 * queries };
    // The gradients of keys and values, and of the product of gate and up, whose own take the place of what was saved.
    let mut per_token = residual + 2 * keys + inner;
    let logits = config.vocab_size as u64 * chunk_rows(tokens as usize, logit_rows(config.vocab_size)) as u64;
    if compute == Compute::Bf16 {
        // One operand of each width, rounded; of gate and up only parts are there before they are. The gradient of the
        // logits is rounded in its own place.
        per_token += (hidden + keys) / 2;
    }
    (per_token * tokens + logits) * F32_BYTES
}

/// Columns of the tensors in a layer.
struct Widths {
    hidden: u64,
    queries: u64,
    keys: u64,
    inner: u64,
}

impl Widths {
    fn of(config: &Config) -> Self {
        let heads = |count: usize| (count * config.head_dim) as u64;
        Self {
            hidden: config.hidden_size as u64,
            queries: heads(config.num_attention_heads),
            keys: heads(config.num_key_value_heads),
            inner: config.intermediate_size as u64,
        }
    }
}

/// The most rows of logits that exist at a time: 64 MiB of them, but not so few that the product over them is slow. The
/// whole table is read for each chunk, forward and backward.
pub(crate) fn logit_rows(vocab_size: usize) -> usize {
    const LOGIT_BYTES: usize = 64 << 20;
    (LOGIT_BYTES / 4 / vocab_size).max(16)
}

/// Rows of each of the fewest chunks of at most `most` rows, all of about one size.
pub(crate) fn chunk_rows(rows: usize, most: usize) -> usize {
    rows.div_ceil(rows.div_ceil(most).max(1)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA_8B: &str = r#"{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "hidden_act": "silu", "max_position_embeddings": 131072}"#;

    fn load() -> TrainingLoad {
        TrainingLoad {
            compute: Compute::Bf16,
            stored: Dtype::BF16,
            frozen: FrozenFormat::AsStored,
            what: Trained::Adapter,
            trained: 3_407_872,
            optimizer_bytes: 3_407_872 * 8,
            adapter_columns: 2 * 8 * 32,
            tokens: 2048,
            lengths: Lengths::Equal,
            recompute: Recompute::None,
        }
    }

    #[test]
    fn the_weights_of_a_published_model_are_counted() {
        let config = Config::from_json(LLAMA_8B).unwrap();
        // The model card says 8.03 billion, norms included: 65 of 4096.
        assert_eq!(config.matrix_weights(), 8_030_261_248 - 65 * 4096);
        assert_eq!(cache_bytes(&config, 1), 2 * 1024 * 32 * 4);
    }

    #[test]
    fn weights_that_are_stored_in_4_bits_are_counted_as_such() {
        let stored = LLAMA_8B.replacen(
            '{',
            r#"{"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": true,
                "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true},"#,
            1,
        );
        let config = Config::from_json(&stored).unwrap();
        let bytes = weight_bytes(&config, Compute::Bf16, Dtype::BF16, FrozenFormat::stored(&config));
        // 4 bits a weight, a byte to a block of 64, and a float to 256 blocks; embeddings and head in 16 bits.
        let (layers, tables) = (6_979_321_856, 2 * 128_256 * 4096);
        assert_eq!(bytes, layers / 2 + layers / 64 + layers / 64 / 64 + 2 * tables);
        let plain = Config::from_json(&stored.replace(r#""bnb_4bit_use_double_quant": true"#, r#""x": 1"#)).unwrap();
        let bytes = weight_bytes(&plain, Compute::Bf16, Dtype::BF16, FrozenFormat::stored(&plain));
        assert_eq!(bytes, layers / 2 + layers / 16 + 2 * tables);
        assert_eq!(FrozenFormat::stored(&Config::from_json(LLAMA_8B).unwrap()), FrozenFormat::AsStored);
    }

    #[test]
    fn workers_have_frozen_weights_once_and_all_else_each() {
        let one = TrainingMemory::estimate(&Config::from_json(LLAMA_8B).unwrap(), &load());
        let (shared, own) = (one.of_workers(4, Weights::Shared), one.of_workers(4, Weights::Own));
        assert_eq!(shared.total(), 4 * one.total() - 3 * one.weights);
        assert_eq!(own.total(), 4 * one.total());
    }

    #[test]
    fn recomputation_keeps_one_layer() {
        let config = Config::from_json(LLAMA_8B).unwrap();
        let whole = TrainingMemory::estimate(&config, &load());
        let recomputed = TrainingMemory::estimate(&config, &TrainingLoad { recompute: Recompute::Layers, ..load() });
        assert_eq!(whole.weights, recomputed.weights);
        assert!(recomputed.activations < whole.activations / 5, "{recomputed:?} of {whole:?}");
    }

    #[test]
    fn what_is_trained_has_gradients_and_moments_and_is_saved_a_tensor_at_a_time() {
        let config = Config::from_json(LLAMA_8B).unwrap();
        let trained = config.matrix_weights();
        let full = TrainingLoad {
            what: Trained::Weights,
            trained,
            optimizer_bytes: 8 * trained,
            adapter_columns: 0,
            ..load()
        };
        let adamw = TrainingMemory::estimate(&config, &full);
        let sgd = TrainingMemory::estimate(&config, &TrainingLoad { optimizer_bytes: 0, ..full });
        assert_eq!((adamw.trained, sgd.trained), (16 * trained, 8 * trained));
        assert_eq!(adamw.copies, 8 * 128_256 * 4096);
        assert_eq!(TrainingMemory::estimate(&config, &load()).copies, 0);
    }

    #[test]
    fn micro_batches_of_changing_lengths_take_a_quarter_more() {
        let config = Config::from_json(LLAMA_8B).unwrap();
        let equal = TrainingMemory::estimate(&config, &load());
        let varying = TrainingMemory::estimate(&config, &TrainingLoad { lengths: Lengths::Varying, ..load() });
        assert_eq!(varying.total() - equal.total(), (equal.total() - equal.weights) / 4);
    }
}
