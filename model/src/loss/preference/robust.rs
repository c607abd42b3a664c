//! DPO where labels are wrong with a known probability (Chowdhury et al., arXiv:2403.00409).

use super::{Pair, PairLoss, PairValue, log_sigmoid, sigmoid};

/// `(-(1 - ε) · log sigmoid(β · m) + ε · log sigmoid(-β · m)) / (1 - 2ε)`: without bias whatever the share `ε` of wrong
/// labels, where cDPO has one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Robust {
    /// As in [`super::Dpo`].
    pub beta: f64,
    /// `ε`, in `[0, ½)`.
    pub label_smoothing: f64,
}

impl PairLoss for Robust {
    fn value(&self, pair: &Pair) -> PairValue {
        let Self { beta, label_smoothing: wrong } = *self;
        let x = beta * pair.margin();
        let scale = 1.0 / (1.0 - 2.0 * wrong);
        let loss = -(1.0 - wrong) * log_sigmoid(x) + wrong * log_sigmoid(-x);
        let slope = -(1.0 - wrong) * sigmoid(-x) - wrong * sigmoid(x);
        PairValue::of_margin(scale * loss, scale * beta * slope)
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        pair.rewards(self.beta)
    }
}
