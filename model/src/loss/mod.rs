//! What training minimises. A loss is an object of one of two kinds.
//!
//! A [`TokenLoss`] works where logits are: inside the head, on a chunk of rows at a time. Cross-entropy and
//! distillation are such losses. A [`DocumentObjective`] sees no logits: it gets the scores of whole documents and
//! returns a loss and a weight for each; preference losses are such objectives ([`Preference`], [`Kto`]).

mod cross_entropy;
mod distillation;
mod document;
mod preference;

pub use cross_entropy::CrossEntropy;
pub use distillation::{Distillation, Divergence};
pub(crate) use document::target_weights;
pub use document::{
    Compared, DocumentLoss, DocumentObjective, DocumentScore, Gathering, ObjectiveError, StepTotals, score_documents,
};
pub use preference::{
    ApoDown, ApoZero, Cpo, Dpo, DpoDivergence, Hinge, Ipo, Kto, Nca, Orpo, Pair, PairLoss, PairValue, Preference,
    Response, Robust, Sft, SimPo, Sppo,
};

use std::fmt::Debug;

use crate::cpu::InstructionSet;
use crate::ops::TokenScore;

/// A loss of each target by itself, from the logits of its row.
///
/// To add one, implement [`TokenLoss::row`] in a file of its own: every kernel set computes it, the `cpu` set on all
/// threads and within the chunk of the head, a set on a device by way of host memory. Only a loss that is needed at
/// the speed of a device has kernels there, as cross-entropy does.
pub trait TokenLoss: Debug + Send + Sync {
    /// Scores one target. Where `row.gradient_scale` is given, the logits become `∂loss/∂logits` times it.
    fn row(&self, row: LossRow<'_>) -> TokenScore;

    /// This loss where it is a cross-entropy, for which kernel sets have kernels of their own.
    fn as_cross_entropy(&self) -> Option<CrossEntropy> {
        None
    }

    /// Whether each row needs the logits of a teacher.
    fn needs_teacher(&self) -> bool {
        false
    }
}

/// One target, and the logits that predict it.
#[derive(Debug)]
pub struct LossRow<'a> {
    /// The instruction set to compute with.
    pub set: InstructionSet,
    /// The logits, `[vocab_size]`, after the head's soft cap if it has one.
    pub logits: &'a mut [f32],
    /// A teacher's logits for the same token, `[vocab_size]`, where the loss needs them.
    pub teacher: Option<&'a [f32]>,
    /// The target, less than `vocab_size`.
    pub target: usize,
    /// Factor on the gradient; none where only the score is needed.
    pub gradient_scale: Option<f32>,
}

/// Runs [`TokenLoss::row`] on logits before the head's soft cap, `cap · tanh(x / cap)`; the gradient is that before
/// the cap.
pub(crate) fn row_before_cap(loss: &dyn TokenLoss, row: LossRow<'_>, soft_cap: Option<f32>) -> TokenScore {
    let Some(cap) = soft_cap else { return loss.row(row) };
    let LossRow { logits, gradient_scale, .. } = row;
    logits.iter_mut().for_each(|logit| *logit = cap * (*logit / cap).tanh());
    let capped = gradient_scale.map(|_| logits.to_vec());
    let score = loss.row(LossRow { logits: &mut *logits, ..row });
    for (gradient, capped) in logits.iter_mut().zip(capped.iter().flatten()) {
        let share = capped / cap;
        *gradient *= 1.0 - share * share;
    }
    score
}
