//! The optimizers over candle's tensors.

use super::CandleTensor;
use crate::ops::{AdamWStep, SgdStep, Write};

/// One AdamW update; see [`crate::ops::Ops::adamw`].
pub(super) fn adamw(
    step: &AdamWStep,
    value: &mut CandleTensor,
    gradient: &CandleTensor,
    exp_avg: &mut CandleTensor,
    exp_avg_sq: &mut CandleTensor,
) -> candle_core::Result<()> {
    let AdamWStep { learning_rate, betas: (beta1, beta2), eps, weight_decay, gradient_scale, .. } = *step;
    let steps = step.step as f64;
    let gradient = (gradient.get() * gradient_scale)?;
    let first = ((exp_avg.get() * beta1)? + (&gradient * (1.0 - beta1))?)?;
    let second = ((exp_avg_sq.get() * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
    let root = ((&second / (1.0 - beta2.powf(steps)))?.sqrt()? + eps)?;
    let change = ((&first * (learning_rate / (1.0 - beta1.powf(steps))))? / root)?;
    let decayed = (value.get() * (1.0 - learning_rate * weight_decay))?;
    value.put(Write::Replace, (decayed - change)?)?;
    exp_avg.put(Write::Replace, first)?;
    exp_avg_sq.put(Write::Replace, second)
}

/// One update by gradient descent; see [`crate::ops::Ops::sgd`].
pub(super) fn sgd(
    step: &SgdStep,
    value: &mut CandleTensor,
    gradient: &CandleTensor,
    momentum_buffer: &mut CandleTensor,
) -> candle_core::Result<()> {
    let gradient = ((gradient.get() * step.gradient_scale)? + (value.get() * step.weight_decay)?)?;
    let change = if step.momentum == 0.0 {
        gradient
    } else {
        let kept = match step.step {
            1 => gradient.clone(),
            _ => ((momentum_buffer.get() * step.momentum)? + (&gradient * (1.0 - step.dampening))?)?,
        };
        momentum_buffer.put(Write::Replace, kept.clone())?;
        if step.nesterov { (gradient + (kept * step.momentum)?)? } else { kept }
    };
    value.put(Write::Replace, (value.get() - (change * step.learning_rate)?)?)
}
