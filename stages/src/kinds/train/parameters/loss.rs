//! `loss:`: what training minimises. Each loss takes its own options and no other's.

use std::sync::Arc;

use engine::parameter::{Input, Parameters};
use model::loss::{self, CrossEntropy, TokenLoss};

use crate::data::artifact::Model;

/// What training minimises, over the target tokens of a step.
#[derive(Parameters, Debug)]
#[parameters(default)]
pub enum Loss {
    /// The negative log-likelihood of the targets.
    #[semantic(default)]
    CrossEntropy {
        /// Share of the target distribution that is spread evenly over the vocabulary, as
        /// `torch.nn.functional.cross_entropy`.
        #[semantic(default = 0.0, range = 0.0..1.0)]
        label_smoothing: f64,
    },
    /// The distributions of a teacher with the same vocabulary, beside the targets.
    Distillation {
        /// The model that is learned from.
        #[semantic]
        teacher: Input<Model>,
        /// Divides the logits of both models in the divergence, which is multiplied by its square.
        #[semantic(default = 1.0, above = 0.0)]
        temperature: f64,
        /// Share of the divergence; the rest is the cross-entropy of the targets.
        #[semantic(default = 0.5, range = 0.0..=1.0)]
        alpha: f64,
        /// How the two distributions are compared.
        #[semantic(default = Divergence::ForwardKl)]
        divergence: Divergence,
    },
}

/// How the distributions of a teacher and a student are compared.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Divergence {
    /// KL(teacher ‖ student): the student covers all that the teacher finds likely.
    ForwardKl,
    /// KL(student ‖ teacher): the student keeps to what the teacher finds likely.
    ReverseKl,
    /// The mean of the divergences of both from their mean.
    JensenShannon,
}

impl Loss {
    /// As the trainer takes it.
    pub(crate) fn token_loss(&self) -> Arc<dyn TokenLoss> {
        match *self {
            Self::CrossEntropy { label_smoothing } => {
                Arc::new(CrossEntropy { label_smoothing: label_smoothing as f32 })
            }
            Self::Distillation { temperature, alpha, divergence, .. } => Arc::new(loss::Distillation {
                temperature: temperature as f32,
                alpha: alpha as f32,
                divergence: match divergence {
                    Divergence::ForwardKl => loss::Divergence::ForwardKl,
                    Divergence::ReverseKl => loss::Divergence::ReverseKl,
                    Divergence::JensenShannon => loss::Divergence::JensenShannon,
                },
            }),
        }
    }

    /// The model that is learned from, where there is one.
    pub(crate) fn teacher(&self) -> Option<&Input<Model>> {
        match self {
            Self::CrossEntropy { .. } => None,
            Self::Distillation { teacher, .. } => Some(teacher),
        }
    }

    /// What of it this program alone computes, as a file says it.
    pub(crate) fn native_only(&self) -> Option<&'static str> {
        match self {
            Self::CrossEntropy { label_smoothing: 0.0 } => None,
            Self::CrossEntropy { .. } => Some("`loss.label_smoothing`"),
            Self::Distillation { .. } => Some("`loss: distillation`"),
        }
    }
}
