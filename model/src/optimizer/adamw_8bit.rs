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
/// Source: Dettmers et al., arXiv:2110.02861, as `bitsandbytes.optim.AdamW8bit`, with the exact nearest code, which
/// bitsandbytes approximates on CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamW8bit {
    /// β1 and β2, the decay rates of the two moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment, outside it.
    pub eps: f64,
    /// Decoupled weight decay, on every trained tensor.
    pub weight_decay: f64,
}

impl Default for AdamW8bit {
    /// Those of [`AdamW`].
    fn default() -> Self {
        let AdamW { betas, eps, weight_decay, .. } = AdamW::default();
        Self { betas, eps, weight_decay }
    }
}

impl AdamW8bit {
    fn adamw(self) -> AdamW {
        let Self { betas, eps, weight_decay } = self;
        AdamW { betas, eps, weight_decay, state_dtype: MomentDtype::F32 }
    }
}

impl Rule for AdamW8bit {
    fn state(&self, tensor: TensorInfo<'_>) -> Vec<StateSpec> {
        if tensor.elements() < MIN_8BIT_SIZE {
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
