//! Odds ratio preference optimization (Hong et al., arXiv:2403.07691).

use super::{Pair, PairLoss, PairValue, Response, log_sigmoid, sigmoid};

/// `-λ · log sigmoid(log odds(chosen) - log odds(rejected))`, where `odds = p / (1 - p)` and `log p` is the mean
/// log-probability of a response's tokens. The paper adds the likelihood of the chosen response.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Orpo {
    /// `λ` in the paper, `beta` in TRL; more than 0.
    pub beta: f64,
}

impl PairLoss for Orpo {
    fn value(&self, pair: &Pair) -> PairValue {
        let (chosen, rejected) = (pair.chosen.mean().min(0.0), least_certain(&pair.rejected));
        // ln((1 - e^chosen) / (1 - e^rejected)); negative infinity where the chosen response is certain.
        let (not_chosen, not_rejected) = (log_of_rest(chosen), log_of_rest(rejected));
        let log_odds = (chosen - rejected) - (not_chosen - not_rejected);
        // d log odds / d log p is 1 / (1 - p). Where the chosen response is certain that is infinite and the sigmoid 0;
        // their product then is the odds of the rejected one.
        let slope = sigmoid(-log_odds);
        let rejected_odds = rejected.exp() / not_rejected.exp();
        let of_chosen = if not_chosen.is_finite() { slope / not_chosen.exp() } else { rejected_odds };
        PairValue {
            loss: -self.beta * log_sigmoid(log_odds),
            chosen: -self.beta * of_chosen / pair.chosen.length(),
            rejected: self.beta * slope / not_rejected.exp() / pair.rejected.length(),
        }
    }

    fn rewards(&self, pair: &Pair) -> [f64; 2] {
        [self.beta * pair.chosen.mean(), self.beta * pair.rejected.mean()]
    }

    fn needs_reference(&self) -> bool {
        false
    }
}

/// The mean log-probability, no nearer to 0 than a sum in f32 can tell: the loss of a certain rejected response is
/// infinite.
fn least_certain(response: &Response) -> f64 {
    response.mean().min(-f64::from(f32::EPSILON) / 2.0 / response.length())
}

/// `ln(1 - e^x)` for `x ≤ 0`, without the loss of digits near to 0 and far from it.
fn log_of_rest(x: f64) -> f64 {
    if x < -std::f64::consts::LN_2 { (-x.exp()).ln_1p() } else { (-x.exp_m1()).ln() }
}
