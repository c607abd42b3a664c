//! The frequencies of the rotary embedding and its tables.

use std::f64::consts::TAU;

use crate::ops::{Ops, Result, RopeTables};

/// A rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
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
#[derive(Clone, Copy, Debug, PartialEq)]
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
}

impl RopeScaling {
    fn apply(self, frequency: f64) -> f64 {
        match self {
            Self::Default => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } => {
                let turns = original_max_position_embeddings * frequency / TAU;
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                (1.0 - kept) * frequency / factor + kept * frequency
            }
        }
    }
}

impl Rope {
    /// Radians per position of each turning pair.
    pub fn frequencies(&self) -> Vec<f64> {
        let pairs = self.rotary_dims / 2;
        let frequency = |pair: usize| self.theta.powf(-2.0 * pair as f64 / self.rotary_dims as f64);
        (0..pairs).map(|pair| self.scaling.apply(frequency(pair))).collect()
    }

    /// Tables for positions `0 .. positions`.
    ///
    /// Angles are products in f32, as in the reference: at position 100,000 their rounding is larger than that of the cosine.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn tables<B: Ops>(&self, ops: &B, positions: usize) -> Result<RopeTables<B::Tensor>> {
        let frequencies = self.frequencies();
        let angle = |position: usize, frequency: f64| f64::from(position as f32 * frequency as f32);
        let table = |of: fn(f64) -> f64| {
            let rows =
                (0..positions).flat_map(|position| frequencies.iter().map(move |&f| of(angle(position, f)) as f32));
            ops.tensor(positions, frequencies.len(), &rows.collect::<Vec<_>>())
        };
        let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
        Ok(RopeTables { cos, sin, rotary_dims: self.rotary_dims, head_dim: self.head_dim })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama31_stretches_the_low_frequencies() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
        let plain = Rope { theta: 5e5, scaling: RopeScaling::Default, rotary_dims: 128, head_dim: 128 };
        let ratios: Vec<f64> = Rope { scaling, ..plain }
            .frequencies()
            .iter()
            .zip(plain.frequencies())
            .map(|(stretched, plain)| stretched / plain)
            .collect();
        // Figures of transformers for Llama-3.1.
        for (pair, expected) in
            [(0, 1.0), (28, 1.0), (29, 0.828168), (30, 0.643743), (32, 0.371122), (34, 0.190211), (35, 0.125)]
        {
            assert!((ratios[pair] - expected).abs() < 1e-6, "pair {pair}: {}", ratios[pair]);
        }
    }
}
