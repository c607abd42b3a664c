//! Knowledge distillation: a student learns the distributions of a teacher with the same vocabulary.

use serde::Serialize;

use super::{LossRow, TokenLoss};
use crate::cpu::multiversion;
use crate::cpu::vector::{exp, max, sum};
use crate::ops::TokenScore;

/// `(1 - alpha) · cross-entropy + alpha · temperature² · divergence(teacher, student)`, where both distributions are
/// `softmax(logits / temperature)`. The factor `temperature²` keeps the size of the gradient of the divergence about
/// the same whatever the temperature (Hinton et al., arXiv:1503.02531, section 2).
///
/// torchtune's `kd_ratio` is `alpha`, its temperature is 1. Its `ForwardKLLoss` leaves out the entropy of the
/// teacher, which no parameter of the student changes: its value is larger by that entropy, its gradient is the same.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Distillation {
    /// Divides the logits of both models; more than 0.
    pub temperature: f32,
    /// Share of the divergence, in `[0, 1]`; the rest is the cross-entropy of the label, at temperature 1.
    pub alpha: f32,
    /// How the distributions are compared.
    pub divergence: Divergence,
}

/// How two distributions `p` (the teacher's) and `q` (the student's) are compared, in nats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Divergence {
    /// `KL(p ‖ q) = Σ p (log p - log q)`: the student covers all modes of the teacher.
    ForwardKl,
    /// `KL(q ‖ p) = Σ q (log q - log p)`: the student concentrates on the main modes of the teacher.
    ReverseKl,
    /// `½ KL(p ‖ m) + ½ KL(q ‖ m)` with `m = ½ (p + q)`.
    JensenShannon,
}

impl TokenLoss for Distillation {
    fn row(&self, row: LossRow<'_>) -> TokenScore {
        let teacher = row.teacher.expect("the head computes the teacher's logits for a loss that needs them");
        assert_eq!(row.logits.len(), teacher.len(), "teacher and student have the same vocabulary");
        distill(row.set, row.logits, teacher, row.target, *self, row.gradient_scale)
    }

    fn needs_teacher(&self) -> bool {
        true
    }
}

/// `log softmax(logits / temperature)[i] = (logits[i] - largest) / temperature - log_sum`.
#[derive(Clone, Copy)]
struct LogSoftmax {
    largest: f32,
    inverse_temperature: f32,
    log_sum: f32,
}

impl LogSoftmax {
    #[inline(always)]
    fn of(logits: &[f32], temperature: f32) -> Self {
        let (largest, inverse_temperature) = (max(logits), 1.0 / temperature);
        let total = sum(logits.len(), |index| exp((logits[index] - largest) * inverse_temperature));
        Self { largest, inverse_temperature, log_sum: total.ln() }
    }

    #[inline(always)]
    fn at(self, logit: f32) -> f32 {
        (logit - self.largest) * self.inverse_temperature - self.log_sum
    }
}

impl Divergence {
    /// The summand of one entry of the vocabulary.
    #[inline(always)]
    fn term(self, log_p: f32, log_q: f32) -> f32 {
        match self {
            Self::ForwardKl => exp(log_p) * (log_p - log_q),
            Self::ReverseKl => exp(log_q) * (log_q - log_p),
            Self::JensenShannon => {
                let (p, q) = (exp(log_p), exp(log_q));
                let log_m = (0.5 * (p + q)).ln();
                0.5 * (p * (log_p - log_m) + q * (log_q - log_m))
            }
        }
    }

    /// The derivative with respect to `q`, but for a constant, which the softmax takes away. Not used for the forward
    /// divergence, whose gradient with respect to the logits is `q - p`.
    #[inline(always)]
    fn slope(self, log_p: f32, log_q: f32) -> f32 {
        match self {
            Self::ForwardKl => 0.0,
            Self::ReverseKl => log_q - log_p,
            Self::JensenShannon => 0.5 * (log_q - (0.5 * (exp(log_p) + exp(log_q))).ln()),
        }
    }
}

multiversion! {
    /// Scores one row and leaves the gradient in it if asked.
    fn distill(
        logits: &mut [f32],
        teacher: &[f32],
        target: usize,
        loss: Distillation,
        gradient_scale: Option<f32>,
    ) -> TokenScore {
        let Distillation { temperature, alpha, divergence } = loss;
        let hard = LogSoftmax::of(logits, 1.0);
        let (p, q) = (LogSoftmax::of(teacher, temperature), LogSoftmax::of(logits, temperature));
        let at_target = logits[target];
        let correct = at_target == hard.largest && logits[..target].iter().all(|&logit| logit < hard.largest);
        let nll = (hard.largest - at_target) + hard.log_sum;
        let compared = sum(logits.len(), |index| divergence.term(p.at(teacher[index]), q.at(logits[index])));
        let score = TokenScore { nll, loss: (1.0 - alpha) * nll + alpha * temperature * temperature * compared, correct };
        let Some(scale) = gradient_scale else { return score };
        // The derivative of logits / temperature takes one of the two factors away.
        let (of_label, of_teacher) = ((1.0 - alpha) * scale, alpha * temperature * scale);
        let mean_slope = match divergence {
            Divergence::ForwardKl => 0.0,
            _ => sum(logits.len(), |index| {
                let (log_p, log_q) = (p.at(teacher[index]), q.at(logits[index]));
                exp(log_q) * divergence.slope(log_p, log_q)
            }),
        };
        for (logit, &teacher) in logits.iter_mut().zip(teacher) {
            let (log_p, log_q) = (p.at(teacher), q.at(*logit));
            let compared = match divergence {
                Divergence::ForwardKl => exp(log_q) - exp(log_p),
                _ => exp(log_q) * (divergence.slope(log_p, log_q) - mean_slope),
            };
            *logit = of_label * exp(hard.at(*logit)) + of_teacher * compared;
        }
        logits[target] -= of_label;
        score
    }
}
