//! Chooses the next token from logits: the most likely one, or one drawn from what is left after temperature, top-k,
//! top-p and min-p.
//!
//! Each setting is that of the logits processor of its name in transformers, and they apply in its order: repetition
//! penalty, tokens that must not come yet, temperature, top-k, top-p, min-p. The draw is our own: it depends on the
//! seed, the row and the position alone, so a batch gives the same texts in whatever order or company its rows are
//! computed.

mod adjustments;
mod constraint;
mod logprobs;

use crate::random::{Address, Purpose, Stream};
pub use adjustments::Adjustments;
pub use constraint::{Constraint, Next};
pub use logprobs::TokenLogprobs;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token, exactly.
    pub temperature: f64,
    /// Keeps the most likely tokens only: this many, and those tied with the last of them.
    pub top_k: Option<usize>,
    /// Keeps the fewest most likely tokens whose probabilities reach this sum.
    pub top_p: Option<f64>,
    /// Keeps the tokens that are at least so likely, as a share of the most likely one's probability.
    pub min_p: Option<f64>,
    /// Divides the positive logits of tokens seen before and multiplies the negative ones. 1 changes nothing.
    pub repetition_penalty: Option<f64>,
    /// Seed of the draws.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self =
        Self { temperature: 0.0, top_k: None, top_p: None, min_p: None, repetition_penalty: None, seed: 0 };
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
    /// There are no logits, or none but those of tokens that must not come.
    #[error("there is no token to choose from")]
    Empty,
}

/// Chooses tokens by one [`Sampling`]; keeps its buffers between tokens.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    /// The processed logits; −∞ where a token is out.
    logits: Vec<f32>,
    /// Probabilities before scaling, beside the logits.
    weights: Vec<f64>,
    /// Token ids in the order of their logits.
    order: Vec<u32>,
}

/// Where a token is to be chosen.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// The prompt and the tokens chosen so far.
    pub seen: &'a [u32],
    /// Tokens that must not come here: ends of text while an answer is shorter than it has to be.
    pub banned: &'a [u32],
    /// The row: with the position it addresses the draw.
    pub row: u64,
    /// The position in that row.
    pub position: u64,
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
        let Sampling { temperature, top_k, top_p, min_p, repetition_penalty, .. } = sampling;
        check("temperature", temperature, temperature.is_finite() && temperature >= 0.0, "0 or more")?;
        check("top_k", 0.0, top_k != Some(0), "1 or more")?;
        if let Some(top_p) = top_p {
            check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1")?;
        }
        if let Some(min_p) = min_p {
            check("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1")?;
        }
        if let Some(penalty) = repetition_penalty {
            check("repetition_penalty", penalty, penalty.is_finite() && penalty > 0.0, "above 0")?;
        }
        Ok(Self { sampling, logits: Vec::new(), weights: Vec::new(), order: Vec::new() })
    }

    /// The next token at a place; among equally likely ones the lowest id comes first.
    ///
    /// # Errors
    /// As for [`Sampler::process`].
    pub fn next_token(&mut self, logits: &[f32], place: &Place<'_>) -> Result<u32, SamplingError> {
        self.process(logits, place.seen, place.banned)?;
        if self.sampling.temperature == 0.0 {
            return argmax(&self.logits).ok_or(SamplingError::Empty);
        }
        let address = Address::new(Purpose::Sampling).row(place.row).step(place.position);
        Ok(self.draw(Stream::new(self.sampling.seed, address).uniform()))
    }

    /// The logits that the choice is made by, those of excluded tokens −∞. At temperature 0 nothing but the penalty and
    /// the ban applies.
    ///
    /// # Errors
    /// Fails if `logits` holds NaN or infinity (a masked token may be −∞), or no token is left.
    pub fn process(&mut self, logits: &[f32], seen: &[u32], banned: &[u32]) -> Result<&[f32], SamplingError> {
        let bad = logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY);
        if let Some(token) = bad {
            return Err(SamplingError::NotFinite { token, value: logits[token] });
        }
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        if let Some(penalty) = self.sampling.repetition_penalty {
            penalize(&mut self.logits, logits, seen, penalty as f32);
        }
        for token in banned {
            if let Some(logit) = self.logits.get_mut(*token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        if self.sampling.temperature != 0.0 {
            self.warp();
        }
        match greatest(&self.logits) {
            f32::NEG_INFINITY => Err(SamplingError::Empty),
            _ => Ok(&self.logits),
        }
    }

    /// Temperature, top-k, top-p and min-p.
    fn warp(&mut self) {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let temperature = temperature as f32;
        let overflows = |logit: &f32| logit.is_finite() && !(logit / temperature).is_finite();
        if self.logits.iter().any(overflows) {
            // So cold that f32 cannot hold the quotients: those of the distances to the greatest logit say the same.
            let greatest = greatest(&self.logits);
            let cold = |logit: f32| if logit == greatest { 0.0 } else { (logit - greatest) / temperature };
            self.logits.iter_mut().for_each(|logit| *logit = cold(*logit));
        } else {
            self.logits.iter_mut().for_each(|logit| *logit /= temperature);
        }
        if let Some(k) = top_k {
            let least = kth_greatest(&self.logits, k);
            mask(&mut self.logits, |logit| logit < least);
        }
        if let Some(top_p) = top_p.filter(|top_p| *top_p < 1.0) {
            self.keep_top_p(top_p);
        }
        if let Some(min_p) = min_p {
            let greatest = greatest(&self.logits);
            let sum: f64 = self.logits.iter().map(|logit| weight(*logit, greatest)).sum();
            let least = min_p as f32 * (1.0 / sum) as f32;
            mask(&mut self.logits, |logit| ((weight(logit, greatest) / sum) as f32) < least);
        }
    }

    /// Takes tokens away from the least likely on, as long as together they have no more than `1 − top_p`; never the
    /// last one.
    fn keep_top_p(&mut self, top_p: f64) {
        let logits = &mut self.logits;
        let greatest = greatest(logits);
        let sum: f64 = logits.iter().map(|logit| weight(*logit, greatest)).sum();
        self.order.clear();
        self.order.extend((0..logits.len() as u32).filter(|token| logits[*token as usize] > f32::NEG_INFINITY));
        // Of equals the lowest ids stay; transformers leaves that to an unstable sort.
        self.order.sort_unstable_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize]).then(b.cmp(a)));
        let most = (1.0 - top_p) as f32;
        let mut together = 0.0;
        let but_the_last = self.order.len().saturating_sub(1);
        for token in &self.order[..but_the_last] {
            let logit = &mut logits[*token as usize];
            together += f64::from((weight(*logit, greatest) / sum) as f32);
            if together as f32 > most {
                break;
            }
            *logit = f32::NEG_INFINITY;
        }
    }

    /// The token at `share` of the summed probabilities, in the order of the ids.
    fn draw(&mut self, share: f64) -> u32 {
        let greatest = greatest(&self.logits);
        self.weights.clear();
        self.weights.extend(self.logits.iter().map(|logit| weight(*logit, greatest)));
        let total: f64 = self.weights.iter().sum();
        let mut left = share * total;
        let mut last = 0;
        for (token, weight) in self.weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            last = token as u32;
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

/// A probability before scaling: 1 for the most likely token.
fn weight(logit: f32, greatest: f32) -> f64 {
    f64::from(logit - greatest).exp()
}

/// In lanes, as each comparison of a plain fold would wait for the one before.
fn greatest(logits: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 32];
    let chunks = logits.chunks_exact(lanes.len());
    let rest = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for chunk in chunks {
        lanes.iter_mut().zip(chunk).for_each(|(lane, logit)| *lane = if *logit > *lane { *logit } else { *lane });
    }
    lanes.into_iter().fold(rest, f32::max)
}

fn mask(logits: &mut [f32], out: impl Fn(f32) -> bool) {
    logits.iter_mut().filter(|logit| out(**logit)).for_each(|logit| *logit = f32::NEG_INFINITY);
}

/// Source: Keskar et al., arXiv:1909.05858, as `RepetitionPenaltyLogitsProcessor` has it: once per distinct token.
fn penalize(penalized: &mut [f32], logits: &[f32], seen: &[u32], penalty: f32) {
    for token in seen {
        if let (Some(to), Some(from)) = (penalized.get_mut(*token as usize), logits.get(*token as usize)) {
            let scaled = if *from < 0.0 { from * penalty } else { from / penalty };
            // An extreme penalty takes a token away or sets it first; it must not make a number that is none.
            *to = if from.is_finite() { scaled.clamp(f32::MIN, f32::MAX) } else { *from };
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
mod tests;
