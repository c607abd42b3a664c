//! Identity preference optimization (Azar et al., arXiv:2310.12036).

use super::{Pair, PairLoss, PairValue};

/// `(m - 1 / (2β))²`: the margin is to reach `1 / (2β)`, and no more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ipo {
    /// `τ` in the paper; more than 0.
    pub beta: f64,
    /// Whether log-ratios are divided by the number of the response's tokens. The authors say so of their formula;
    /// its letter has sums.
    pub length_normalized: bool,
}

impl PairLoss for Ipo {
    fn value(&self, pair: &Pair) -> PairValue {
        let target = 1.0 / (2.0 * self.beta);
        let margin = if self.length_normalized { pair.mean_margin() } else { pair.margin() };
        let (loss, slope) = ((margin - target).powi(2), 2.0 * (margin - target));
        if self.length_normalized {
            PairValue::of_mean_margin(pair, loss, slope)
        } else {
            PairValue::of_margin(loss, slope)
        }
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        pair.rewards(self.beta)
    }
}
