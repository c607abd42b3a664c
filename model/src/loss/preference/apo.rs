//! Anchored preference optimization (D'Oosterlinck et al., arXiv:2408.06266).

use super::{Pair, PairLoss, PairValue, sigmoid};

/// `1 - sigmoid(β · a) + sigmoid(β · b)` of the log-ratios: the chosen response becomes likelier and the rejected one
/// less likely, each for itself. For chosen responses that are better than the model's own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ApoZero {
    /// As in [`super::Dpo`].
    pub beta: f64,
}

/// `sigmoid(β · a) + 1 - sigmoid(β · (a - b))`: both become less likely, the rejected one more so. For chosen
/// responses that are worse than the model's own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ApoDown {
    /// As in [`super::Dpo`].
    pub beta: f64,
}

/// The derivative of the sigmoid.
fn slope(x: f64) -> f64 {
    sigmoid(x) * sigmoid(-x)
}

impl PairLoss for ApoZero {
    fn value(&self, pair: &Pair) -> PairValue {
        let [chosen, rejected] = pair.rewards(self.beta);
        PairValue {
            loss: sigmoid(-chosen) + sigmoid(rejected),
            chosen: -self.beta * slope(chosen),
            rejected: self.beta * slope(rejected),
        }
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        pair.rewards(self.beta)
    }
}

impl PairLoss for ApoDown {
    fn value(&self, pair: &Pair) -> PairValue {
        let [chosen, rejected] = pair.rewards(self.beta);
        let of_margin = slope(chosen - rejected);
        PairValue {
            loss: sigmoid(chosen) + sigmoid(rejected - chosen),
            chosen: self.beta * (slope(chosen) - of_margin),
            rejected: self.beta * of_margin,
        }
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        pair.rewards(self.beta)
    }
}
