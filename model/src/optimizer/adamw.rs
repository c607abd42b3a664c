//! AdamW: Adam with decoupled weight decay.

use serde::{Deserialize, Serialize};

use super::{Element, Elementwise, Rule, StateFormat, StateSpec, Step, TensorInfo, Updated};
use crate::ops::{Ops, Result};

/// AdamW.
///
/// With `g = gradient · gradient_scale` and `t` the number of the step:
/// `p ← p - lr·weight_decay·p`; `m ← β1·m + (1-β1)·g`; `v ← β2·v + (1-β2)·g²`;
/// `p ← p - lr · (m / (1-β1ᵗ)) / (sqrt(v / (1-β2ᵗ)) + eps)`.
///
/// Source: Loshchilov and Hutter, arXiv:1711.05101, as in `torch.optim.AdamW`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdamW {
    /// β1 and β2, the decay rates of the two moments.
    pub betas: (f64, f64),
    /// Added to the root of the second moment, outside it.
    pub eps: f64,
    /// Decoupled weight decay, on every trained tensor.
    pub weight_decay: f64,
    /// The dtype that the moments are kept in between steps.
    #[serde(default, skip_serializing_if = "MomentDtype::is_f32")]
    pub state_dtype: MomentDtype,
}

/// The dtype of moments between steps; an update itself is computed in f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MomentDtype {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16, rounded to the nearest. The second moment stays where a step would change it by less than a 512th:
    /// with β2 of 0.999 and more it grows, and hardly falls again.
    Bf16,
}

impl MomentDtype {
    fn is_f32(&self) -> bool {
        *self == Self::F32
    }

    fn format(self) -> StateFormat {
        match self {
            Self::F32 => StateFormat::F32,
            Self::Bf16 => StateFormat::Bf16,
        }
    }
}

impl Default for AdamW {
    /// As in PyTorch: 0.9, 0.999, 1e-8 and a decay of 0.01; moments in f32.
    fn default() -> Self {
        Self { betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01, state_dtype: MomentDtype::F32 }
    }
}

impl Rule for AdamW {
    fn state(&self, _: TensorInfo<'_>) -> Vec<StateSpec> {
        ["exp_avg", "exp_avg_sq"].map(|name| StateSpec { name, format: self.state_dtype.format() }).to_vec()
    }

    fn rate_moves(&self) -> bool {
        true
    }

    fn update<O: Ops>(&self, ops: &O, step: &Step, _: TensorInfo<'_>, updated: Updated<'_, O::Tensor>) -> Result {
        ops.update(&self.formula(step), updated)
    }
}

impl AdamW {
    /// The formula of a step; its state tensors are `m` and `v`.
    pub(super) fn formula(&self, step: &Step) -> AdamWFormula {
        let ((beta1, beta2), t) = (self.betas, step.number as f64);
        let correction = 1.0 - beta2.powf(t);
        AdamWFormula {
            scale: step.gradient_scale as f32,
            betas: (beta1 as f32, beta2 as f32),
            new: ((1.0 - beta1) as f32, (1.0 - beta2) as f32),
            keep: (1.0 - step.learning_rate * self.weight_decay) as f32,
            rate: (step.learning_rate / (1.0 - beta1.powf(t))) as f32,
            inverse_root: (1.0 / correction.sqrt()) as f32,
            inverse_correction: (1.0 / correction) as f32,
            eps: self.eps as f32,
        }
    }
}

/// The constants of a step.
#[derive(Clone, Copy)]
pub(super) struct AdamWFormula {
    scale: f32,
    betas: (f32, f32),
    /// One minus each of them.
    new: (f32, f32),
    /// Share of the value that weight decay leaves.
    keep: f32,
    /// Learning rate over `1-β1ᵗ`.
    rate: f32,
    /// One over `sqrt(1-β2ᵗ)`.
    inverse_root: f32,
    /// One over `1-β2ᵗ`.
    inverse_correction: f32,
    eps: f32,
}

impl Elementwise<2> for AdamWFormula {
    const NAME: &'static str = "adamw";

    #[inline(always)]
    fn element<E: Element>(&self, p: E, g: E, [m, v]: [E; 2]) -> (E, [E; 2]) {
        let g = g * self.scale;
        let m = m * self.betas.0 + g.clone() * self.new.0;
        let v = v * self.betas.1 + g.clone() * self.new.1 * g;
        let p = p * self.keep - m.clone() * self.rate / (v.clone().sqrt() * self.inverse_root + self.eps);
        (p, [m, v])
    }

    /// The root is taken after the correction: runs of whole-tensor kernel sets go on to the bit from the states that
    /// earlier versions have saved, which computed so.
    fn tensors<E: Element>(&self, p: E, g: E, [m, v]: [E; 2]) -> (E, [E; 2]) {
        let g = g * self.scale;
        let m = m * self.betas.0 + g.clone() * self.new.0;
        let v = v * self.betas.1 + g.clone() * g * self.new.1;
        let root = (v.clone() * self.inverse_correction).sqrt() + self.eps;
        let p = p * self.keep - m.clone() * self.rate / root;
        (p, [m, v])
    }
}
