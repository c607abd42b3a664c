//! Chooses the next token from logits: greedy, or drawn after temperature, top-k and top-p.
//!
//! A draw depends on the seed, the row and the position alone, so a batch gives the same texts in whatever order or
//! company its rows are computed.

use crate::random::{Address, Purpose, Stream};

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token, exactly.
    pub temperature: f32,
    /// Keeps the most likely tokens only: this many, and those tied with the last of them.
    pub top_k: Option<usize>,
    /// Keeps the fewest most likely tokens whose probabilities reach this sum.
    pub top_p: Option<f32>,
    /// Divides the positive logits of tokens seen before and multiplies the negative ones. 1 changes nothing.
    pub repetition_penalty: Option<f32>,
    /// Seed of the draws.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: None, top_p: None, repetition_penalty: None, seed: 0 };
}

/// Why no token could be chosen, or a setting makes no sense.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A setting lies outside of its range.
    #[error("`{name}` is {value}, which is not {range}")]
    OutOfRange {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it may be.
        range: &'static str,
    },
    /// The model computed something that is no number.
    #[error("the logit of token {token} is {value}")]
    NotFinite {
        /// The first such token.
        token: usize,
        /// Its logit.
        value: f32,
    },
    /// There are no logits.
    #[error("there are no logits to choose from")]
    Empty,
}

/// Chooses tokens by one [`Sampling`]; keeps its buffers between tokens.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    logits: Vec<f32>,
    /// Candidates, and their probabilities before scaling.
    candidates: Vec<(u32, f64)>,
}

impl Sampler {
    /// Checks the settings.
    ///
    /// # Errors
    /// Fails if a setting lies outside of its range.
    pub fn new(sampling: Sampling) -> Result<Self, SamplingError> {
        let check = |name, value: f64, good: bool, range| {
            if good { Ok(()) } else { Err(SamplingError::OutOfRange { name, value, range }) }
        };
        let Sampling { temperature, top_k, top_p, repetition_penalty, .. } = sampling;
        check("temperature", temperature.into(), temperature.is_finite() && temperature >= 0.0, "0 or more")?;
        check("top_k", 0.0, top_k != Some(0), "1 or more")?;
        if let Some(top_p) = top_p {
            check("top_p", top_p.into(), top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        }
        if let Some(penalty) = repetition_penalty {
            check("repetition_penalty", penalty.into(), penalty.is_finite() && penalty > 0.0, "above 0")?;
        }
        Ok(Self { sampling, logits: Vec::new(), candidates: Vec::new() })
    }

    /// The token after `seen` (prompt and tokens chosen so far) of row `row`, at `position` in that row.
    ///
    /// Penalty, temperature, top-k and top-p apply in this order, as in transformers; among equally likely tokens the
    /// lowest id comes first.
    ///
    /// # Errors
    /// Fails if `logits` is empty or holds NaN or infinity (a masked token may be −∞).
    pub fn next_token(&mut self, logits: &[f32], seen: &[u32], row: u64, position: u64) -> Result<u32, SamplingError> {
        let bad = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY);
        if let Some(token) = bad {
            return Err(SamplingError::NotFinite { token, value: logits[token] });
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        if let Some(penalty) = self.sampling.repetition_penalty {
            penalize(&mut self.logits, logits, seen, penalty);
        }
        let best = argmax(&self.logits).ok_or(SamplingError::Empty)?;
        if self.sampling.temperature == 0.0 {
            return Ok(best);
        }
        self.collect_candidates(self.logits[best as usize]);
        let address = Address::new(Purpose::Sampling).row(row).step(position);
        Ok(self.draw(Stream::new(self.sampling.seed, address).uniform()))
    }

    /// Fills `candidates` with what top-k and top-p leave, each with `exp((logit − greatest) / temperature)`.
    fn collect_candidates(&mut self, greatest: f32) {
        let least = self.sampling.top_k.map_or(f32::NEG_INFINITY, |k| kth_greatest(&self.logits, k));
        let temperature = f64::from(self.sampling.temperature);
        let weight = |logit: f32| (f64::from(logit - greatest) / temperature).exp();
        let kept = self.logits.iter().enumerate().filter(|(_, logit)| **logit >= least);
        self.candidates.clear();
        self.candidates.extend(kept.map(|(token, logit)| (token as u32, weight(*logit))));
        let Some(top_p) = self.sampling.top_p else { return };
        // A stable sort, so that the lowest id comes first among equals.
        self.candidates.sort_by(|a, b| b.1.total_cmp(&a.1));
        let total: f64 = self.candidates.iter().map(|candidate| candidate.1).sum();
        let mut before = 0.0;
        let kept = self.candidates.iter().take_while(|candidate| {
            let keep = before < f64::from(top_p) * total;
            before += candidate.1;
            keep
        });
        let kept = kept.count().max(1);
        self.candidates.truncate(kept);
    }

    /// The candidate at `share` of the summed weights.
    fn draw(&self, share: f64) -> u32 {
        let total: f64 = self.candidates.iter().map(|candidate| candidate.1).sum();
        let mut left = share * total;
        let mut last = self.candidates[0].0;
        for (token, weight) in self.candidates.iter().filter(|candidate| candidate.1 > 0.0) {
            last = *token;
            if left < *weight {
                break;
            }
            left -= weight;
        }
        last
    }
}

/// The most likely token, the lowest id among equals.
pub fn argmax(logits: &[f32]) -> Option<u32> {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    (!logits.is_empty()).then_some(best as u32)
}

/// Source: Keskar et al., arXiv:1909.05858, as `RepetitionPenaltyLogitsProcessor` has it: once per distinct token.
fn penalize(penalized: &mut [f32], logits: &[f32], seen: &[u32], penalty: f32) {
    for token in seen {
        if let (Some(to), Some(from)) = (penalized.get_mut(*token as usize), logits.get(*token as usize)) {
            *to = if *from < 0.0 { from * penalty } else { from / penalty };
        }
    }
}

/// The `k`-th greatest logit, or −∞ where there are no more than `k`.
fn kth_greatest(logits: &[f32], k: usize) -> f32 {
    if k >= logits.len() {
        return f32::NEG_INFINITY;
    }
    let mut sorted = logits.to_vec();
    *sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    fn counts(sampling: Sampling, logits: &[f32], draws: u64) -> Vec<u64> {
        let mut sampler = Sampler::new(sampling).unwrap();
        let mut counts = vec![0; logits.len()];
        for row in 0..draws {
            counts[sampler.next_token(logits, &[], row, 7).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn temperature_zero_is_the_greatest_logit() {
        let mut sampler = Sampler::new(Sampling::GREEDY).unwrap();
        let logits = [0.1, 3.0, 3.0 - 1e-6, f32::NEG_INFINITY, 3.0];
        for row in 0..20 {
            assert_eq!(sampler.next_token(&logits, &[], row, 0).unwrap(), 1);
        }
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [1.0_f32.ln(), 2.0_f32.ln(), 5.0_f32.ln(), f32::NEG_INFINITY];
        let plain = counts(PLAIN, &logits, 40_000);
        for (count, expected) in plain.iter().zip([5_000, 10_000, 25_000, 0]) {
            assert!(count.abs_diff(expected) < 400, "{plain:?}");
        }
        // Temperature ½ squares the odds: 1 : 4 : 25.
        let sharp = counts(Sampling { temperature: 0.5, ..PLAIN }, &logits, 30_000);
        for (count, expected) in sharp.iter().zip([1_000, 4_000, 25_000, 0]) {
            assert!(count.abs_diff(expected) < 400, "{sharp:?}");
        }
    }

    #[test]
    fn top_k_keeps_ties_and_top_p_keeps_the_token_that_crosses() {
        let logits = [0.0, 2.0, 1.0, 1.0, -1.0];
        let kept = |sampling| counts(sampling, &logits, 2_000).iter().map(|count| *count > 0).collect::<Vec<_>>();
        assert_eq!(kept(Sampling { top_k: Some(2), ..PLAIN }), [false, true, true, true, false]);
        assert_eq!(kept(Sampling { top_k: Some(1), ..PLAIN }), [false, true, false, false, false]);
        // Probabilities: 0.071, 0.525, 0.193, 0.193, 0.026 (rounded): 0.6 is crossed by the first of the two equals.
        assert_eq!(kept(Sampling { top_p: Some(0.6), ..PLAIN }), [false, true, true, false, false]);
        assert_eq!(kept(Sampling { top_p: Some(0.01), ..PLAIN }), [false, true, false, false, false]);
        assert_eq!(kept(Sampling { top_p: Some(1.0), ..PLAIN }), [true; 5]);
    }

    #[test]
    fn a_repeated_token_is_penalized_once() {
        let mut sampler = Sampler::new(Sampling { repetition_penalty: Some(2.0), ..Sampling::GREEDY }).unwrap();
        assert_eq!(sampler.next_token(&[4.0, 3.0, -1.0], &[0, 0, 0], 0, 0).unwrap(), 1);
        assert_eq!(sampler.next_token(&[4.0, 1.5, -1.0], &[0, 0, 0], 0, 0).unwrap(), 0, "4 / 2, not 4 / 8");
        assert_eq!(sampler.next_token(&[-1.0, -1.5], &[0], 0, 0).unwrap(), 1);
    }

    #[test]
    fn a_draw_depends_on_its_address_alone() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.7).sin()).collect();
        let mut sampler = Sampler::new(Sampling { seed: 5, ..PLAIN }).unwrap();
        let draw = |sampler: &mut Sampler, row, position| sampler.next_token(&logits, &[], row, position).unwrap();
        let forwards: Vec<u32> = (0..50).map(|row| draw(&mut sampler, row, 3)).collect();
        let backwards: Vec<u32> = (0..50).rev().map(|row| draw(&mut sampler, row, 3)).collect();
        assert!(forwards.iter().eq(backwards.iter().rev()));
        let elsewhere: Vec<u32> = (0..50).map(|row| draw(&mut sampler, row, 4)).collect();
        assert_ne!(forwards, elsewhere);
    }

    #[test]
    fn nonsense_is_refused() {
        let mut sampler = Sampler::new(PLAIN).unwrap();
        let error = sampler.next_token(&[0.0, f32::NAN], &[], 0, 0).unwrap_err();
        assert!(matches!(error, SamplingError::NotFinite { token: 1, .. }));
        assert_eq!(sampler.next_token(&[], &[], 0, 0), Err(SamplingError::Empty));
        for bad in [
            Sampling { temperature: -1.0, ..PLAIN },
            Sampling { temperature: f32::NAN, ..PLAIN },
            Sampling { top_k: Some(0), ..PLAIN },
            Sampling { top_p: Some(0.0), ..PLAIN },
            Sampling { top_p: Some(1.5), ..PLAIN },
            Sampling { repetition_penalty: Some(0.0), ..PLAIN },
        ] {
            assert!(Sampler::new(bad).is_err(), "{bad:?}");
        }
    }
}
