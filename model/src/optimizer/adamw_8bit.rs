//! AdamW with moments of 8 bits.

use serde::{Deserialize, Serialize};

use super::{AdamW, MomentDtype, Rule, Sign, StateFormat, StateSpec, Step, TensorInfo, Updated};
use crate::ops::{Ops, Result};

/// Tensors of fewer elements have their moments in f32, as in bitsandbytes: they take little, and among them are those
/// that suffer most from coarse moments.
const MIN_8BIT_SIZE: usize = 4096;

/// AdamW whose moments are kept in 8 bits between steps: each block of 256 as codes of a dynamic map (signed for the
/// first moment, unsigned for the second) and its largest magnitude in f32. An update itself is [`AdamW`]'s, in f32.
///
/// The token embedding's moments are kept in f32 unless said otherwise: a block spans rows of tokens that occur often
/// and rarely, and where the second moment of a rare one rounds to zero its update is divided by `eps` alone.
///
/// Source: Dettmers et al., arXiv:2110.02861, as `bitsandbytes.optim.AdamW8bit`, with the exact nearest code, which
/// bitsandbytes approximates on CPUs; the embedding in f32 as transformers' `Trainer` has it (`optim_bits: 32`).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamW8bit {
    /// β1 and β2, the decay rates of the two moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment, outside it.
    pub eps: f64,
    /// Decoupled weight decay, on every trained tensor.
    pub weight_decay: f64,
    /// How the moments of the token embedding are kept.
    pub embedding_state: EmbeddingState,
}

/// How the moments of the token embedding are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmbeddingState {
    /// In f32.
    F32,
    /// In 8 bits, as those of other tensors.
    Int8,
}

impl Default for AdamW8bit {
    /// Those of [`AdamW`].
    fn default() -> Self {
        let AdamW { betas, eps, weight_decay, .. } = AdamW::default();
        Self { betas, eps, weight_decay, embedding_state: EmbeddingState::F32 }
    }
}

impl AdamW8bit {
    fn adamw(self) -> AdamW {
        let Self { betas, eps, weight_decay, embedding_state: _ } = self;
        AdamW { betas, eps, weight_decay, state_dtype: MomentDtype::F32 }
    }

    fn is_8bit(self, tensor: TensorInfo<'_>) -> bool {
        let is_embedding = tensor.name.contains("embed_tokens");
        tensor.elements() >= MIN_8BIT_SIZE && (!is_embedding || self.embedding_state == EmbeddingState::Int8)
    }
}

impl Rule for AdamW8bit {
    fn state(&self, tensor: TensorInfo<'_>) -> Vec<StateSpec> {
        if !self.is_8bit(tensor) {
            return self.adamw().state(tensor);
        }
        let moments = [("exp_avg", Sign::Signed), ("exp_avg_sq", Sign::Unsigned)];
        moments.map(|(name, sign)| StateSpec { name, format: StateFormat::Dynamic8(sign) }).to_vec()
    }

    fn rate_moves(&self) -> bool {
        true
    }

    fn update<O: Ops>(&self, ops: &O, step: &Step, tensor: TensorInfo<'_>, updated: Updated<'_, O::Tensor>) -> Result {
        self.adamw().update(ops, step, tensor, updated)
    }
}
