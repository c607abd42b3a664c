//! What a request changes of logits before a token is chosen: biases of single tokens, and penalties on those that the
//! completion has already.
//!
//! `logit[token] += bias[token] - presence_penalty - frequency_penalty · count(token)`, the penalties only where the
//! completion holds the token; the prompt does not count. Source: the OpenAI API reference, "Frequency and presence
//! penalties".

use std::collections::BTreeMap;

/// Changes of logits.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Adjustments {
    /// What is added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Taken from the logit of every token that the completion holds.
    pub presence_penalty: f32,
    /// Taken from a token's logit for each time that the completion holds it.
    pub frequency_penalty: f32,
}

impl Adjustments {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.logit_bias.is_empty() && self.presence_penalty == 0.0 && self.frequency_penalty == 0.0
    }

    /// Changes the logits that follow a completion so far. Tokens beyond the vocabulary change nothing.
    pub fn apply(&self, logits: &mut [f32], completion: &[u32]) {
        for (token, bias) in &self.logit_bias {
            if let Some(logit) = logits.get_mut(*token as usize) {
                *logit += bias;
            }
        }
        if self.presence_penalty == 0.0 && self.frequency_penalty == 0.0 {
            return;
        }
        let mut counts: BTreeMap<u32, f32> = BTreeMap::new();
        completion.iter().for_each(|token| *counts.entry(*token).or_default() += 1.0);
        for (token, count) in counts {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit -= self.presence_penalty + self.frequency_penalty * count;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penalties_count_tokens_of_the_completion_and_biases_are_added() {
        let adjustments = Adjustments {
            logit_bias: vec![(0, 2.0), (3, -100.0), (9, 1.0)],
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
        };
        let mut logits = [1.0, 1.0, 1.0, 1.0];
        adjustments.apply(&mut logits, &[1, 2, 1, 1, 8]);
        assert_eq!(logits, [3.0, -0.25, 0.25, -99.0]);
        let mut unchanged = [0.5];
        assert!(Adjustments::default().is_empty());
        Adjustments::default().apply(&mut unchanged, &[0, 0]);
        assert_eq!(unchanged, [0.5]);
    }
}
