//! Log-probabilities of tokens, as the model has them: before temperature, penalties and biases.

use super::greatest;

/// The log-probability of a token, and those of the most likely ones in its place.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token's, in nats.
    pub logprob: f32,
    /// The most likely tokens, the likeliest first; of equals the lowest id.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Those of a token, and of so many of the most likely ones, where a model has these logits. A token beyond the
    /// vocabulary has −∞.
    pub fn of(logits: &[f32], token: u32, top: usize) -> Self {
        let greatest = greatest(logits);
        let sum: f64 = logits.iter().map(|logit| f64::from(logit - greatest).exp()).sum();
        let normalizer = f64::from(greatest) + sum.ln();
        let logprob = |logit: f32| (f64::from(logit) - normalizer) as f32;
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
        let top = top.min(order.len());
        if top > 0 && top < order.len() {
            order.select_nth_unstable_by(top - 1, by_logit);
        }
        order.truncate(top);
        order.sort_unstable_by(by_logit);
        let chosen = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        Self {
            logprob: logprob(chosen),
            top: order.into_iter().map(|token| (token, logprob(logits[token as usize]))).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one_and_the_likeliest_come_first() {
        let logits = [0.5, 2.0, -1.0, 2.0, 100.0, 99.0];
        let all = TokenLogprobs::of(&logits, 5, 9);
        let sum: f64 = all.top.iter().map(|(_, logprob)| f64::from(*logprob).exp()).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{sum}");
        assert_eq!(all.top.iter().map(|(token, _)| *token).collect::<Vec<_>>(), [4, 5, 1, 3, 0, 2]);
        let one = TokenLogprobs::of(&logits, 5, 1);
        assert_eq!((one.logprob, one.top.as_slice()), (all.top[1].1, &all.top[..1]));
        assert_eq!(TokenLogprobs::of(&logits, 77, 0), TokenLogprobs { logprob: f32::NEG_INFINITY, top: Vec::new() });
    }
}
