//! Simple preference optimization (Meng et al., arXiv:2405.14734): no reference, and mean log-probabilities.

use super::{Pair, PairLoss, PairValue, smoothed};

/// `-log sigmoid(β · (mean log π(chosen) - mean log π(rejected)) - γ)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimPo {
    /// Scales the difference; more than 0.
    pub beta: f64,
    /// The margin that is asked for, outside of `β`.
    pub gamma: f64,
    /// The share of pairs whose label is taken to be wrong.
    pub label_smoothing: f64,
}

impl PairLoss for SimPo {
    fn value(&self, pair: &Pair) -> PairValue {
        let x = self.beta * (pair.chosen.mean() - pair.rejected.mean()) - self.gamma;
        let (loss, slope) = smoothed(x, self.label_smoothing);
        PairValue::of_mean_margin(pair, loss, self.beta * slope)
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        [self.beta * pair.chosen.mean(), self.beta * pair.rejected.mean()]
    }

    fn needs_reference(&self) -> bool {
        false
    }
}
