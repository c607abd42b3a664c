//! Noise contrastive alignment of pairs (Chen et al., arXiv:2402.05369).

use super::{Pair, PairLoss, PairValue, log_sigmoid, sigmoid};

/// `-log sigmoid(r) - ½ · log sigmoid(-r) - ½ · log sigmoid(-s)` of the rewards `r` of the chosen and `s` of the
/// rejected response: the likelihood of the chosen one does not fall.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nca {
    /// As in [`super::Dpo`].
    pub beta: f64,
}

impl PairLoss for Nca {
    fn value(&self, pair: &Pair) -> PairValue {
        let [chosen, rejected] = pair.rewards(self.beta);
        PairValue {
            loss: -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected),
            chosen: self.beta * (0.5 * sigmoid(chosen) - sigmoid(-chosen)),
            rejected: self.beta * 0.5 * sigmoid(rejected),
        }
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        pair.rewards(self.beta)
    }
}
