//! Cross-entropy over rows of logits, with its gradient in place.

use super::instructions::multiversion;
use super::vector::{exp, exponentials, max, sum, tanh};
use crate::ops::{LogitGradient, TokenScore};

multiversion! {
    /// Scores one row of logits and leaves the gradient in it if asked: `softmax - target distribution`, times its scale
    /// and the slope of the cap. The target distribution is one-hot but for the share `label_smoothing`, which is even.
    pub(crate) fn cross_entropy(
        logits: &mut [f32],
        target: usize,
        soft_cap: Option<f32>,
        label_smoothing: f32,
        gradient: LogitGradient,
    ) -> TokenScore {
        if let Some(cap) = soft_cap {
            logits.iter_mut().for_each(|logit| *logit = cap * tanh(*logit / cap));
        }
        let largest = max(logits);
        let at_target = logits[target];
        let correct = at_target == largest && logits[..target].iter().all(|&logit| logit < largest);
        let smoothed = label_smoothing > 0.0;
        // How far the mean logit lies below the largest.
        let below_largest = match smoothed {
            true => sum(logits.len(), |index| largest - logits[index]) / logits.len() as f32,
            false => 0.0,
        };
        // The slope of the cap needs the logits once more; else their exponentials take their place.
        let total = match soft_cap {
            None => exponentials(logits, largest),
            Some(_) => sum(logits.len(), |index| exp(logits[index] - largest)),
        };
        // In this order: `largest + ln(total)` would round away the last digits of a small loss.
        let nll = (largest - at_target) + total.ln();
        let loss = if smoothed { (1.0 - label_smoothing) * nll + label_smoothing * (below_largest + total.ln()) } else { nll };
        let score = TokenScore { nll, loss, correct };
        let LogitGradient::InPlace { scale } = gradient else { return score };
        let inverse = scale / total;
        let (at_target, elsewhere) = match smoothed {
            true => (scale * (1.0 - label_smoothing), scale * label_smoothing / logits.len() as f32),
            false => (scale, 0.0),
        };
        match soft_cap {
            None => {
                logits.iter_mut().for_each(|exponential| *exponential *= inverse);
                if smoothed {
                    logits.iter_mut().for_each(|gradient| *gradient -= elsewhere);
                }
                logits[target] -= at_target;
            }
            Some(cap) => {
                for (index, logit) in logits.iter_mut().enumerate() {
                    let capped = *logit / cap;
                    let expected = if index == target { elsewhere + at_target } else { elsewhere };
                    *logit = (exp(*logit - largest) * inverse - expected) * (1.0 - capped * capped);
                }
            }
        }
        score
    }
}

#[cfg(test)]
mod tests {
    use super::super::InstructionSet;
    use super::*;

    #[test]
    fn a_small_loss_keeps_its_digits_beside_large_logits() {
        let mut logits = [20.0, 8.0, 7.0];
        let expected = ((8.0f64 - 20.0).exp() + (7.0f64 - 20.0).exp()).ln_1p();
        let score = cross_entropy(InstructionSet::detect(), &mut logits, 0, None, 0.0, LogitGradient::Skip);
        assert!((f64::from(score.nll) - expected).abs() < 1e-7, "{} and {expected}", score.nll);
    }
}
