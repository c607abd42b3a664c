//! Why training stopped.

use super::CollectiveError;
use crate::decoder::RunError;
use crate::loss::ObjectiveError;
use crate::ops::KernelError;

/// Why training stopped.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// Nothing would be trained.
    #[error("nothing to train: {0}")]
    NothingToTrain(&'static str),
    /// The loss compares with a teacher, and there is none.
    #[error("the loss needs a teacher model, and there is none")]
    NoTeacher,
    /// Teacher and student have other tokens.
    #[error("the teacher has a vocabulary of {teacher} tokens and the model one of {student}: they must be the same")]
    TeacherVocabulary {
        /// Of the model that is trained.
        student: usize,
        /// Of the teacher.
        teacher: usize,
    },
    /// The documents of a step are not what the objective compares.
    #[error("the documents of step {step} do not fit the loss")]
    Objective {
        /// Number of the step, from 1.
        step: u64,
        /// What is wrong.
        #[source]
        source: ObjectiveError,
    },
    /// A step has no target.
    #[error("step {step} has no target token: every label is ignored")]
    NoTargets {
        /// Number of the step, from 1.
        step: u64,
    },
    /// The loss is infinite or not a number.
    #[error("the loss is {loss} in step {step}{}", before(largest_gradient.as_deref()))]
    LossNotFinite {
        /// Number of the step, from 1.
        step: u64,
        /// The summed loss of the micro-batch.
        loss: f64,
        /// Indices in the micro-batch of the documents whose own loss is not finite.
        documents: Vec<usize>,
        /// The trained tensor with the largest gradient before this micro-batch: among the step's micro-batches so far
        /// or, at its first, in the step before. None in the very first micro-batch. (The gradient of a loss
        /// that is not finite says nothing: it is not finite everywhere.)
        largest_gradient: Option<String>,
    },
    /// A gradient is infinite or not a number.
    #[error("the gradient of `{tensor}` is not finite in step {step}{}", before(largest_gradient.as_deref()))]
    GradientNotFinite {
        /// Number of the step, from 1.
        step: u64,
        /// The first such tensor, counted from the embedding.
        tensor: String,
        /// The trained tensor with the largest gradient in the step before.
        largest_gradient: Option<String>,
    },
    /// Gradients overflow though the factor on the loss is as small as it may be.
    #[error(
        "the gradient of `{tensor}` is not finite in step {step}, after {skipped} skipped attempts down to a loss scale of {loss_scale}"
    )]
    OverflowPersists {
        /// Number of the step, from 1.
        step: u64,
        /// The first tensor that overflowed in the last attempt.
        tensor: String,
        /// Attempts skipped in a row.
        skipped: u64,
        /// The factor on the loss in the last of them.
        loss_scale: f64,
    },
    /// A frozen tensor is not what it was before training.
    #[error("`{tensor}` is frozen, and is not after step {step} what it was before the first: the kernels changed it")]
    FrozenMoved {
        /// The tensor.
        tensor: String,
        /// Number of the step.
        step: u64,
    },
    /// A trained tensor is where it was, but for weight decay.
    #[error(
        "no gradient has moved `{tensor}` in {steps} steps with a learning rate: none reaches it, or too small a one"
    )]
    NotMoved {
        /// The tensor.
        tensor: String,
        /// Steps so far whose learning rate was high enough to move it.
        steps: u64,
    },
    /// Workers that should hold the same do not.
    #[error("rank {rank} holds other weights than rank 0 in step {step}: their updates were not the same")]
    WorkersDiffer {
        /// The first worker that differs from the one of rank 0.
        rank: usize,
        /// Number of the step, from 1.
        step: u64,
    },
    /// The workers could not go on together.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// A batch does not fit, or the device failed.
    #[error(transparent)]
    Run(#[from] RunError),
}

impl From<KernelError> for TrainError {
    fn from(error: KernelError) -> Self {
        Self::Run(RunError::Kernel(error))
    }
}

/// Which gradient was the largest, as the end of a message.
fn before(largest_gradient: Option<&str>) -> String {
    largest_gradient.map_or_else(String::new, |name| format!("; the largest gradient before it was that of `{name}`"))
}
