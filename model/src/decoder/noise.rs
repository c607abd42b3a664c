//! Noise on the token embeddings while training (NEFTune).

use crate::batch::Batch;
use crate::random::{Address, Purpose, StepSeed, Stream};

/// Uniform noise on the token embeddings of a training pass, and of no other.
///
/// An element of a document of `L` tokens in a model of width `d` gets a draw from `[-m, m)` with
/// `m = alpha / sqrt(L · d)`. Element `(token, column)` is draw `token · d + column` of a stream that is addressed by
/// the seed, the optimizer step and the document's token ids. So it is the same however a step is divided into
/// micro-batches and workers, whether the document is packed with others or not, and after a resume; equal documents of
/// one step get equal noise. TRL counts in `L` the padding of the batch, which there is none of here.
///
/// Source: Jain et al., arXiv:2310.05914; `neftune_noise_alpha` of transformers 5 and TRL, whose noise is on what the
/// embedding returns: of the gemmas, after it is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbeddingNoise {
    /// The scale of the noise, above 0; 5 to 15 in the paper.
    pub alpha: f64,
}

impl EmbeddingNoise {
    /// The noise on the embeddings of a batch, `[tokens, hidden_size]`.
    pub(super) fn of(&self, batch: &Batch, hidden_size: usize, step: StepSeed) -> Vec<f32> {
        let mut noise = vec![0.0; batch.tokens() * hidden_size];
        let (mut ids, mut rest) = (&batch.input_ids[..], &mut noise[..]);
        for &length in &batch.document_lengths {
            let (document, other_ids) = ids.split_at(length);
            let (values, other_values) = rest.split_at_mut(length * hidden_size);
            self.fill(document, step, values);
            (ids, rest) = (other_ids, other_values);
        }
        noise
    }

    fn fill(&self, document: &[u32], step: StepSeed, values: &mut [f32]) {
        let stream = Stream::new(step.seed, Address::new(Purpose::EmbeddingNoise).step(step.step).tokens(document));
        let limit = self.alpha / (values.len() as f64).sqrt();
        for (block, values) in (0..).zip(values.chunks_mut(4)) {
            let drawn = stream.uniforms_at(block, limit);
            values.copy_from_slice(&drawn[..values.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOISE: EmbeddingNoise = EmbeddingNoise { alpha: 5.0 };
    const STEP: StepSeed = StepSeed { seed: 1, step: 3 };

    fn batch(documents: &[&[u32]]) -> Batch {
        let mut batch = Batch::default();
        for (row, ids) in documents.iter().enumerate() {
            batch.push_row(row as u64, ids, &vec![0; ids.len()], &[ids.len()]);
        }
        batch
    }

    #[test]
    fn it_is_uniform_and_as_large_as_the_reference_has_it() {
        let ids: Vec<u32> = (0..100).collect();
        let noise = NOISE.of(&batch(&[&ids]), 64, STEP);
        // TRL: dims = seq_len · hidden_size; mag_norm = alpha / sqrt(dims); uniform_(-mag_norm, mag_norm).
        let magnitude = 5.0 / 6400.0f32.sqrt();
        assert!(noise.iter().all(|value| value.abs() <= magnitude));
        assert!(
            noise.iter().any(|value| *value > 0.99 * magnitude) && noise.iter().any(|value| *value < -0.99 * magnitude)
        );
        let mean = noise.iter().sum::<f32>() / 6400.0;
        let variance = noise.iter().map(|value| value * value).sum::<f32>() / 6400.0;
        // A uniform draw from [-m, m) has mean 0 and variance m²/3; both within four standard errors.
        assert!(mean.abs() < 4.0 * magnitude / 3.0f32.sqrt() / 80.0, "{mean}");
        let third = magnitude * magnitude / 3.0;
        assert!((variance - third).abs() < 4.0 * magnitude * magnitude * (4.0f32 / 45.0).sqrt() / 80.0, "{variance}");
    }

    #[test]
    fn a_document_has_the_same_noise_in_any_company() {
        let (one, other): (&[u32], &[u32]) = (&[5, 6, 7], &[8, 9]);
        let of = |documents: &[&[u32]]| NOISE.of(&batch(documents), 7, STEP);
        let together = of(&[one, other]);
        assert_eq!(together, [of(&[one]), of(&[other])].concat());
        assert_eq!(of(&[other, one]), [of(&[other]), of(&[one])].concat());
        let mut packed = Batch::default();
        packed.push_row(9, &[5, 6, 7, 8, 9], &[0; 5], &[3, 2]);
        assert_eq!(NOISE.of(&packed, 7, STEP), together);
    }

    #[test]
    fn another_step_seed_or_document_has_other_noise() {
        let of = |ids: &[u32], seed, step| NOISE.of(&batch(&[ids]), 8, StepSeed { seed, step });
        let noise = of(&[1, 2], 1, 1);
        for other in [of(&[1, 2], 2, 1), of(&[1, 2], 1, 2), of(&[2, 1], 1, 1), of(&[1, 3], 1, 1)] {
            assert!(noise.iter().zip(&other).filter(|(one, other)| one == other).count() < 2);
        }
    }
}
