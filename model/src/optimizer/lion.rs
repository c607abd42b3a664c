//! Lion: the sign of an interpolated momentum.

use serde::{Deserialize, Serialize};

use super::{Element, Elementwise, Rule, StateFormat, StateSpec, Step, TensorInfo, Updated};
use crate::ops::{Ops, Result};

/// Lion. Each element changes by the learning rate, so that it wants a rate 3 to 10 times lower than AdamW's and a
/// weight decay as much higher.
///
/// With `g = gradient · gradient_scale`: `p ← p - lr·weight_decay·p`; `p ← p - lr · sign(β1·m + (1-β1)·g)`;
/// `m ← β2·m + (1-β2)·g`.
///
/// Source: Chen et al., arXiv:2302.06675, algorithm 2.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lion {
    /// β1, the share of the momentum in the update, and β2, its decay rate.
    pub betas: (f64, f64),
    /// Decoupled weight decay, on every trained tensor.
    pub weight_decay: f64,
}

impl Default for Lion {
    /// As in the paper's code: 0.9, 0.99 and no decay.
    fn default() -> Self {
        Self { betas: (0.9, 0.99), weight_decay: 0.0 }
    }
}

impl Rule for Lion {
    fn state(&self, _: TensorInfo<'_>) -> Vec<StateSpec> {
        vec![StateSpec { name: "exp_avg", format: StateFormat::F32 }]
    }

    fn rate_moves(&self) -> bool {
        true
    }

    fn update<O: Ops>(&self, ops: &O, step: &Step, _: TensorInfo<'_>, updated: Updated<'_, O::Tensor>) -> Result {
        let (beta1, beta2) = self.betas;
        let formula = LionFormula {
            scale: step.gradient_scale as f32,
            betas: (beta1 as f32, beta2 as f32),
            new: ((1.0 - beta1) as f32, (1.0 - beta2) as f32),
            keep: (1.0 - step.learning_rate * self.weight_decay) as f32,
            rate: step.learning_rate as f32,
        };
        ops.update(&formula, updated)
    }
}

/// The constants of a step.
#[derive(Clone, Copy)]
struct LionFormula {
    scale: f32,
    betas: (f32, f32),
    /// One minus each of them.
    new: (f32, f32),
    /// Share of the value that weight decay leaves.
    keep: f32,
    rate: f32,
}

impl Elementwise<1> for LionFormula {
    const NAME: &'static str = "lion";

    #[inline(always)]
    fn element<E: Element>(&self, p: E, g: E, [m]: [E; 1]) -> (E, [E; 1]) {
        let g = g * self.scale;
        let direction = (m.clone() * self.betas.0 + g.clone() * self.new.0).sign();
        let m = m * self.betas.1 + g * self.new.1;
        (p * self.keep - direction * self.rate, [m])
    }
}
