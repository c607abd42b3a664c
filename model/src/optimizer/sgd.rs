//! Stochastic gradient descent, with momentum by choice.

use serde::{Deserialize, Serialize};

use super::{Element, Elementwise, Rule, StateFormat, StateSpec, Step, TensorInfo, Updated};
use crate::ops::{Ops, Result};

/// Gradient descent; the default is the plain one.
///
/// With `g = gradient · gradient_scale + weight_decay·p`: without momentum `p ← p - lr·g`. Else `b ← g` in the first
/// step and `b ← momentum·b + (1 - dampening)·g` in each after it; then `p ← p - lr·(g + momentum·b)` if nesterov, else
/// `p ← p - lr·b`.
///
/// Source: `torch.optim.SGD`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sgd {
    /// Share of the momentum buffer that is kept in each step; 0: there is no buffer.
    pub momentum: f64,
    /// The new gradient enters the buffer times `1 - dampening`, but for the first.
    pub dampening: f64,
    /// Looks one step ahead along the buffer.
    pub nesterov: bool,
    /// Added to the gradient times the value (coupled, unlike AdamW's).
    pub weight_decay: f64,
}

impl Rule for Sgd {
    /// The momentum buffer has the name that it has had in saved states since there are any.
    fn state(&self, _: TensorInfo<'_>) -> Vec<StateSpec> {
        match self.momentum {
            0.0 => Vec::new(),
            _ => vec![StateSpec { name: "exp_avg", format: StateFormat::F32 }],
        }
    }

    fn rate_moves(&self) -> bool {
        false
    }

    fn update<O: Ops>(&self, ops: &O, step: &Step, _: TensorInfo<'_>, updated: Updated<'_, O::Tensor>) -> Result {
        let descent = Descent {
            scale: step.gradient_scale as f32,
            decay: self.weight_decay as f32,
            rate: step.learning_rate as f32,
        };
        if self.momentum == 0.0 {
            return ops.update(&descent, updated);
        }
        let momentum = self.momentum as f32;
        let buffer = if step.number == 1 { (0.0, 1.0) } else { (momentum, (1.0 - self.dampening) as f32) };
        // Without nesterov the change is the buffer alone.
        let change = if self.nesterov { (1.0, momentum) } else { (0.0, 1.0) };
        ops.update(&Momentum { descent, buffer, change }, updated)
    }
}

/// Without momentum.
#[derive(Clone, Copy)]
struct Descent {
    scale: f32,
    decay: f32,
    rate: f32,
}

/// With momentum.
#[derive(Clone, Copy)]
struct Momentum {
    descent: Descent,
    /// Factors of the buffer and of the gradient in the new buffer.
    buffer: (f32, f32),
    /// Factors of the gradient and of the buffer in the change.
    change: (f32, f32),
}

impl Elementwise<0> for Descent {
    const NAME: &'static str = "sgd";

    #[inline(always)]
    fn element<E: Element>(&self, p: E, g: E, _: [E; 0]) -> (E, [E; 0]) {
        let g = g * self.scale + p.clone() * self.decay;
        (p - g * self.rate, [])
    }
}

impl Elementwise<1> for Momentum {
    const NAME: &'static str = "sgd";

    #[inline(always)]
    fn element<E: Element>(&self, p: E, g: E, [b]: [E; 1]) -> (E, [E; 1]) {
        let Descent { scale, decay, rate } = self.descent;
        let g = g * scale + p.clone() * decay;
        let b = b * self.buffer.0 + g.clone() * self.buffer.1;
        let change = g * self.change.0 + b.clone() * self.change.1;
        (p - change * rate, [b])
    }
}
