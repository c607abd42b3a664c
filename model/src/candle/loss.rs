//! Cross-entropy over the vocabulary, with its gradient, and the cap on logits.

use candle_core::{DType, Result, Tensor};

use crate::ops::TokenScore;

/// `cap · tanh(x / cap)`.
pub(super) fn soft_cap(x: &Tensor, cap: f32) -> Result<Tensor> {
    (x / f64::from(cap))?.tanh()? * f64::from(cap)
}

/// Logits with a target per row, scored.
pub(super) struct Scored {
    /// After the cap, `(rows, vocabulary)`.
    logits: Tensor,
    /// `(rows, 1)`.
    targets: Tensor,
    /// The greatest logit, `(rows, 1)`.
    greatest: Tensor,
    /// The log of the summed exponentials of what the logits are below it, `(rows, 1)`.
    log_sum: Tensor,
    soft_cap: Option<f32>,
    label_smoothing: f32,
}

/// Scores the targets, `(rows, 1)`, under the capped logits.
pub(super) fn score(logits: &Tensor, targets: &Tensor, cap: Option<f32>, label_smoothing: f32) -> Result<Scored> {
    let logits = match cap {
        Some(cap) => soft_cap(logits, cap)?,
        None => logits.clone(),
    };
    let greatest = logits.max_keepdim(1)?;
    let log_sum = logits.broadcast_sub(&greatest)?.exp()?.sum_keepdim(1)?.log()?;
    Ok(Scored { logits, targets: targets.clone(), greatest, log_sum, soft_cap: cap, label_smoothing })
}

impl Scored {
    /// The score of each row.
    pub(super) fn token_scores(&self) -> Result<impl Iterator<Item = TokenScore>> {
        // In this order: the sum of both parts would round away the last digits of a small loss.
        let below = (&self.greatest - self.logits.gather(&self.targets, 1)?)?;
        let nll = (below + &self.log_sum)?.flatten_all()?.to_vec1::<f32>()?;
        let losses = match self.label_smoothing > 0.0 {
            true => self.smoothed(&nll)?,
            false => nll.clone(),
        };
        let targets = self.targets.flatten_all()?.to_vec1::<u32>()?;
        let likeliest = self.first_greatest()?.flatten_all()?.to_vec1::<f32>()?;
        let scores = nll.into_iter().zip(losses).zip(targets.into_iter().zip(likeliest));
        Ok(scores.map(|((nll, loss), (target, likeliest))| {
            let correct = target == likeliest as u32;
            TokenScore { nll, loss, correct }
        }))
    }

    /// The losses with label smoothing, from those without.
    fn smoothed(&self, nll: &[f32]) -> Result<Vec<f32>> {
        let below = self.logits.broadcast_sub(&self.greatest)?.neg()?.mean_keepdim(1)?;
        let even = (below + &self.log_sum)?.flatten_all()?.to_vec1::<f32>()?;
        let mixed = |(nll, even): (&f32, f32)| (1.0 - self.label_smoothing) * nll + self.label_smoothing * even;
        Ok(nll.iter().zip(even).map(mixed).collect())
    }

    /// The least index of a greatest logit per row. candle's own `argmax` promises no order among equals.
    fn first_greatest(&self) -> Result<Tensor> {
        let (rows, vocab_size) = self.logits.dims2()?;
        let device = self.logits.device();
        // Exact: a vocabulary has far fewer than 2^24 entries.
        let indices = Tensor::arange(0.0, vocab_size as f32, device)?.unsqueeze(0)?.broadcast_as((rows, vocab_size))?;
        let is_greatest = self.logits.broadcast_eq(&self.greatest)?;
        let none = Tensor::full(vocab_size as f32, (rows, vocab_size), device)?.to_dtype(DType::F32)?;
        is_greatest.where_cond(&indices.contiguous()?, &none)?.min_keepdim(1)
    }

    /// The gradient of the summed loss with respect to the logits before the cap: `softmax − target
    /// distribution`, times `1 − tanh²`.
    pub(super) fn gradient(&self) -> Result<Tensor> {
        let probabilities = self.logits.broadcast_sub(&self.greatest)?.broadcast_sub(&self.log_sum)?.exp()?;
        let at_target = f64::from(self.label_smoothing) - 1.0;
        let at_target = self.targets.to_dtype(DType::F32)?.zeros_like()?.affine(1.0, at_target)?;
        let probabilities = match self.label_smoothing > 0.0 {
            true => (probabilities - f64::from(self.label_smoothing) / self.logits.dim(1)? as f64)?,
            false => probabilities,
        };
        let gradient = probabilities.scatter_add(&self.targets, &at_target, 1)?;
        match self.soft_cap {
            Some(cap) => gradient * (1.0 - (&self.logits / f64::from(cap))?.sqr()?)?,
            None => Ok(gradient),
        }
    }
}
