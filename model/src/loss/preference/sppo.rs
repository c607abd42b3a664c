//! Self-play preference optimization with hard labels (Wu et al., arXiv:2405.00675).

use super::{Pair, PairLoss, PairValue};

/// `(a - ½ / β)² + (b + ½ / β)²` of the log-ratios: the chosen response wins always, and the rejected one never.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sppo {
    /// `1 / η` in the paper; more than 0.
    pub beta: f64,
}

impl PairLoss for Sppo {
    fn value(&self, pair: &Pair) -> PairValue {
        let half = 0.5 / self.beta;
        let (chosen, rejected) = (pair.chosen.gain() - half, pair.rejected.gain() + half);
        PairValue { loss: chosen.powi(2) + rejected.powi(2), chosen: 2.0 * chosen, rejected: 2.0 * rejected }
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        pair.rewards(self.beta)
    }
}
