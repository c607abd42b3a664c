//! Direct preference optimization (Rafailov et al., arXiv:2305.18290), with what is varied in it most.

use super::{Pair, PairLoss, PairValue, log_sigmoid, smoothed};

/// `-(1 - ε) · log sigmoid(β · m) - ε · log sigmoid(-β · m)`, where `m` is by how much more the chosen response's
/// log-ratio `log π(y|x) - log π_ref(y|x)` has grown than the rejected one's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dpo {
    /// How strongly the policy is held to the reference; more than 0.
    pub beta: f64,
    /// `ε`, the share of pairs whose label is taken to be wrong: cDPO (Mitchell, 2023).
    pub label_smoothing: f64,
    /// Whether log-ratios are divided by the number of the response's tokens.
    pub length_normalized: bool,
    /// Which divergence from the reference the rewards belong to.
    pub divergence: DpoDivergence,
}

/// A divergence `f(π / π_ref)`, whose derivative turns a log-ratio into a reward: Wang et al., arXiv:2309.16240.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DpoDivergence {
    /// `f'(u) = log u + 1`: DPO as it is.
    ReverseKl,
    /// `f'(u) = -1 / u`.
    ForwardKl,
    /// `f'(u) = log(2u / (1 + u))`.
    JensenShannon,
    /// `f'(u) = (1 - u^-α) / α`, with `α` in (0, 1).
    Alpha(f64),
}

/// The largest exponent: `e^80` is still finite in f32.
const LARGEST_EXPONENT: f64 = 80.0;

impl DpoDivergence {
    /// `f'` at the ratio of this logarithm, but for a constant, which the difference of two takes away; and its
    /// derivative.
    fn reward(self, log_ratio: f64) -> (f64, f64) {
        let power = |factor: f64| (factor * log_ratio).min(LARGEST_EXPONENT).exp();
        let slope = |factor: f64, slope: f64| if factor * log_ratio < LARGEST_EXPONENT { slope } else { 0.0 };
        match self {
            Self::ReverseKl => (log_ratio, 1.0),
            Self::ForwardKl => (-power(-1.0), slope(-1.0, power(-1.0))),
            Self::JensenShannon => (log_sigmoid(log_ratio), super::sigmoid(-log_ratio)),
            Self::Alpha(alpha) => (-power(-alpha) / alpha, slope(-alpha, power(-alpha))),
        }
    }
}

impl PairLoss for Dpo {
    fn value(&self, pair: &Pair) -> PairValue {
        let length = |length: f64| if self.length_normalized { length } else { 1.0 };
        let (of_chosen, of_rejected) = (length(pair.chosen.length()), length(pair.rejected.length()));
        let (chosen, chosen_slope) = self.divergence.reward(pair.chosen.gain() / of_chosen);
        let (rejected, rejected_slope) = self.divergence.reward(pair.rejected.gain() / of_rejected);
        let (loss, slope) = smoothed(self.beta * (chosen - rejected), self.label_smoothing);
        PairValue {
            loss,
            chosen: self.beta * slope * chosen_slope / of_chosen,
            rejected: -self.beta * slope * rejected_slope / of_rejected,
        }
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        pair.rewards(self.beta)
    }
}
