//! The frequencies of the rotary embedding and its tables.
//!
//! One kind (longrope) turns long documents by other frequencies than short ones. What counts here is the length of
//! each document alone: a packed row turns each of its documents as if it stood alone, so packing changes nothing. A
//! cached sequence that outgrows the short frequencies has to be computed anew from its first token; [`crate::session`]
//! does so.

use std::borrow::Cow;
use std::f64::consts::TAU;

use crate::batch::Documents;
use crate::ops::{Ops, Result, RopeTables};

/// A rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// How the frequencies are stretched.
    pub scaling: RopeScaling,
    /// Elements of a head that turn; even.
    pub rotary_dims: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// How the frequencies are stretched beyond the length of pretraining.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// All by the same factor.
    Linear {
        /// Divides each frequency.
        factor: f64,
    },
    /// The low ones by a factor, the high ones not, those between by a blend.
    Llama3 {
        /// Divides the low frequencies.
        factor: f64,
        /// Wavelengths longer than the original length over this are stretched in full.
        low_freq_factor: f64,
        /// Wavelengths shorter than the original length over this are not.
        high_freq_factor: f64,
        /// Length of pretraining, in tokens.
        original_max_position_embeddings: f64,
    },
    /// As llama3, with a ramp over the pairs instead of the wavelengths, and scaled rotations.
    Yarn(Yarn),
    /// Each by a factor of its own, of one list in short documents and of another in long ones, and scaled rotations.
    LongRope(LongRope),
}

/// The numbers of a YaRN embedding. Source: Peng et al., arXiv:2309.00071, with the defaults of transformers.
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Divides the low frequencies.
    pub factor: f64,
    /// Pairs that turn more often than this within the original length keep their frequency.
    pub beta_fast: f64,
    /// Pairs that turn less often than this are divided in full.
    pub beta_slow: f64,
    /// Length of pretraining, in tokens.
    pub original_max_position_embeddings: f64,
    /// Where the ramp between the two begins and ends.
    pub ramp: Ramp,
    /// Factor on cosines and sines.
    pub attention_factor: f64,
}

/// Where the ramp of a [`Yarn`] begins and ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ramp {
    /// At whole pairs, rounded outwards (`truncate`).
    WholePairs,
    /// Where the formula says.
    Exact,
}

/// The numbers of a longrope embedding. Source: Ding et al., arXiv:2402.13753, in the form of Phi-3.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Divides the frequencies in documents of up to the original length, one factor per turning pair.
    pub short_factor: Vec<f64>,
    /// Divides them in longer documents.
    pub long_factor: Vec<f64>,
    /// Length of pretraining, in tokens.
    pub original_max_position_embeddings: usize,
    /// Factor on cosines and sines, in short documents too.
    pub attention_factor: f64,
}

impl Rope {
    /// Radians per position of each turning pair, in a document of so many tokens.
    pub fn frequencies(&self, tokens: usize) -> Vec<f64> {
        let pairs = self.rotary_dims / 2;
        let plain = (0..pairs).map(|pair| self.theta.powf(-2.0 * pair as f64 / self.rotary_dims as f64));
        match &self.scaling {
            RopeScaling::Default => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor).collect(),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let stretched = |frequency: f64| {
                    let turns = original_max_position_embeddings * frequency / TAU;
                    let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    blend(frequency / factor, frequency, kept)
                };
                plain.map(stretched).collect()
            }
            RopeScaling::Yarn(yarn) => {
                let (from, to) = yarn.ramp(self.theta, self.rotary_dims);
                let kept = |pair: usize| 1.0 - ((pair as f64 - from) / (to - from)).clamp(0.0, 1.0);
                plain.enumerate().map(|(pair, plain)| blend(plain / yarn.factor, plain, kept(pair))).collect()
            }
            RopeScaling::LongRope(long) => {
                plain.zip(long.factors(tokens)).map(|(frequency, factor)| frequency / factor).collect()
            }
        }
    }

    /// Factor on cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        match &self.scaling {
            RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
            RopeScaling::Yarn(yarn) => yarn.attention_factor,
            RopeScaling::LongRope(long) => long.attention_factor,
        }
    }

    /// The tokens of the longest document that is turned by the frequencies for short ones; none where there are no
    /// others.
    pub fn short_positions(&self) -> Option<usize> {
        match &self.scaling {
            RopeScaling::LongRope(long) => Some(long.original_max_position_embeddings),
            RopeScaling::Default | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } | RopeScaling::Yarn(_) => {
                None
            }
        }
    }

    /// Whether a sequence that grows from `before` tokens to `after` changes its frequencies, so that keys made so far
    /// are void.
    pub fn turns_anew(&self, before: usize, after: usize) -> bool {
        self.short_positions().is_some_and(|short| before <= short && after > short)
    }

    /// Tables for documents of up to so many tokens.
    ///
    /// Angles are products in f32, as in the reference: at position 100,000 their rounding is larger than that of the
    /// cosine.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn tables<B: Ops>(&self, ops: &B, positions: usize) -> Result<RopeTables<B::Tensor>> {
        let short_positions = self.short_positions().filter(|&short| short < positions);
        let short = short_positions.unwrap_or(positions);
        let long = if short_positions.is_some() { positions } else { 0 };
        let parts = [(short, self.frequencies(short)), (long, self.frequencies(positions))];
        let scale = self.attention_factor();
        let table = |of: fn(f64) -> f64| {
            let mut values = Vec::with_capacity((short + long) * self.rotary_dims / 2);
            for (positions, frequencies) in &parts {
                for position in 0..*positions {
                    let angle = |frequency: &f64| f64::from(position as f32 * *frequency as f32);
                    values.extend(frequencies.iter().map(|frequency| (of(angle(frequency)) * scale) as f32));
                }
            }
            ops.tensor(short + long, self.rotary_dims / 2, &values)
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        Ok(RopeTables { cos, sin, rotary_dims: self.rotary_dims, head_dim: self.head_dim, short_positions })
    }
}

impl<T> RopeTables<T> {
    /// For each row of an activation, the row of the tables that turns it.
    pub fn rows<'a>(&self, documents: &'a Documents) -> Cow<'a, [u32]> {
        let Some(short) = self.short_positions else { return Cow::Borrowed(documents.positions()) };
        let mut rows = documents.positions().to_vec();
        for span in documents.spans().iter().filter(|span| span.start + span.rows.len() > short) {
            rows[span.rows.clone()].iter_mut().for_each(|row| *row += short as u32);
        }
        Cow::Owned(rows)
    }
}

impl Yarn {
    /// The factor on cosines and sines that goes with a stretch by `factor`.
    ///
    /// `mscale` and `mscale_all_dim` are the factors that some models give for the part that turns and for all of it.
    pub fn attention_factor(factor: f64, mscale: Option<(f64, f64)>) -> f64 {
        let of = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
        mscale.map_or(of(1.0), |(turning, all)| of(turning) / of(all))
    }

    /// The pair up to which frequencies are kept, and that from which on they are divided in full.
    fn ramp(&self, theta: f64, rotary_dims: usize) -> (f64, f64) {
        let dims = rotary_dims as f64;
        let pair_of =
            |turns: f64| dims * (self.original_max_position_embeddings / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (from, to) = match self.ramp {
            Ramp::WholePairs => (pair_of(self.beta_fast).floor(), pair_of(self.beta_slow).ceil()),
            Ramp::Exact => (pair_of(self.beta_fast), pair_of(self.beta_slow)),
        };
        let (from, to) = (from.max(0.0), to.min(dims - 1.0));
        (from, if from == to { to + 0.001 } else { to })
    }
}

impl LongRope {
    /// The factor on cosines and sines that goes with a stretch by `factor`, where a model gives none.
    pub fn attention_factor(factor: f64, original_max_position_embeddings: usize) -> f64 {
        if factor <= 1.0 {
            return 1.0;
        }
        (1.0 + factor.ln() / (original_max_position_embeddings as f64).ln()).sqrt()
    }

    fn factors(&self, tokens: usize) -> &[f64] {
        if tokens > self.original_max_position_embeddings { &self.long_factor } else { &self.short_factor }
    }
}

fn blend(stretched: f64, plain: f64, kept: f64) -> f64 {
    (1.0 - kept) * stretched + kept * plain
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;
    use crate::ops::Compute;

    #[test]
    fn llama31_stretches_the_low_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
        let plain = Rope { theta: 5e5, scaling: RopeScaling::Default, rotary_dims: 128, head_dim: 128 };
        let ratios: Vec<f64> = Rope { scaling, ..plain.clone() }
            .frequencies(1)
            .iter()
            .zip(plain.frequencies(1))
            .map(|(stretched, plain)| stretched / plain)
            .collect();
        // Figures of transformers for Llama-3.1.
        for (pair, expected) in
            [(0, 1.0), (28, 1.0), (29, 0.828168), (30, 0.643743), (32, 0.371122), (34, 0.190211), (35, 0.125)]
        {
            assert!((ratios[pair] - expected).abs() < 1e-6, "pair {pair}: {}", ratios[pair]);
        }
    }

    #[test]
    fn each_document_of_a_pack_is_turned_by_its_own_length() {
        let long = LongRope {
            short_factor: vec![1.0, 1.0],
            long_factor: vec![2.0, 4.0],
            original_max_position_embeddings: 3,
            attention_factor: 1.5,
        };
        let rope = Rope { theta: 100.0, scaling: RopeScaling::LongRope(long), rotary_dims: 4, head_dim: 6 };
        assert_eq!(rope.frequencies(3), [1.0, 0.1]);
        assert_eq!(rope.frequencies(4), [0.5, 0.025]);
        let ops = Cpu::new(1, Compute::F32).unwrap();
        let tables = rope.tables(&ops, 5).unwrap();
        assert_eq!(ops.shape(&tables.cos), (3 + 5, 2));
        let documents = Documents::new(&[2, 4, 3]);
        assert_eq!(*tables.rows(&documents), [0, 1, 3, 4, 5, 6, 0, 1, 2]);
        // One new token that makes a cached sequence four tokens long.
        assert_eq!(*tables.rows(&Documents::continued([(0, 3, 1)])), [3 + 3]);
        let sin = ops.read(&tables.sin).unwrap();
        for (row, angle) in [(2, 2.0), (3 + 4, 2.0), (3 + 1, 0.5)] {
            assert!((sin[row * 2] - 1.5 * f32::sin(angle)).abs() < 1e-6, "row {row}");
        }
        // While no document can be long, there are no rows for one.
        let short = rope.tables(&ops, 3).unwrap();
        assert_eq!((ops.shape(&short.cos), short.short_positions), ((3, 2), None));
        assert!(rope.turns_anew(3, 4) && !rope.turns_anew(1, 3) && !rope.turns_anew(4, 5));
    }
}
