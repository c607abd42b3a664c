//! Contrastive preference optimization (Xu et al., arXiv:2401.08417): DPO with a uniform reference.

use super::{Pair, PairLoss, PairValue, smoothed};

/// `-log sigmoid(β · (log π(chosen) - log π(rejected)))`. The paper adds the likelihood of the chosen response.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cpo {
    /// Scales the difference; more than 0.
    pub beta: f64,
    /// The share of pairs whose label is taken to be wrong.
    pub label_smoothing: f64,
}

impl PairLoss for Cpo {
    fn value(&self, pair: &Pair) -> PairValue {
        let x = self.beta * (pair.chosen.log_prob - pair.rejected.log_prob);
        let (loss, slope) = smoothed(x, self.label_smoothing);
        PairValue::of_margin(loss, self.beta * slope)
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        [self.beta * pair.chosen.log_prob, self.beta * pair.rejected.log_prob]
    }

    fn needs_reference(&self) -> bool {
        false
    }
}
