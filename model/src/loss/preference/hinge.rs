//! The hinge loss of SLiC over DPO's log-ratios: RSO (Liu et al., arXiv:2309.06657).

use super::{Pair, PairLoss, PairValue};

/// `max(0, 1 - β · m)`; without gradient in the corner.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hinge {
    /// As in [`super::Dpo`]; the inverse of the margin that is asked for, `gamma` in torchtune's `RSOLoss`.
    pub beta: f64,
}

impl PairLoss for Hinge {
    fn value(&self, pair: &Pair) -> PairValue {
        let missing = 1.0 - self.beta * pair.margin();
        if missing > 0.0 { PairValue::of_margin(missing, -self.beta) } else { PairValue::default() }
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        pair.rewards(self.beta)
    }
}
