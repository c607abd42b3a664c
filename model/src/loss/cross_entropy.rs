//! Cross-entropy, with label smoothing.

use super::{LossRow, TokenLoss};
use crate::cpu::cross_entropy_row;
use crate::ops::{LogitGradient, TokenScore};

/// Cross-entropy of the target: `(1 - ε) · nll + ε · mean over v of -log softmax(logits)[v]`, with `ε` the label
/// smoothing. As `torch.nn.functional.cross_entropy`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CrossEntropy {
    /// Share of the target distribution that is spread evenly over the vocabulary, in `[0, 1)`.
    pub label_smoothing: f32,
}

impl TokenLoss for CrossEntropy {
    fn row(&self, row: LossRow<'_>) -> TokenScore {
        let gradient = row.gradient_scale.map_or(LogitGradient::Skip, |scale| LogitGradient::InPlace { scale });
        cross_entropy_row(row.set, row.logits, row.target, None, self.label_smoothing, gradient)
    }

    fn as_cross_entropy(&self) -> Option<CrossEntropy> {
        Some(*self)
    }
}
