//! Why the torch worker cannot do a step: what it found, in the words that the native trainer has for it.

use engine::error::StageError;
use model::trainer::TrainError;
use serde::Deserialize;

use crate::kinds::train::failure;

/// What a rank found.
#[derive(Debug, Deserialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub(super) enum Stopped {
    LossNotFinite {
        /// As JSON has no such number.
        loss: String,
        /// The rows whose own loss it is.
        guilty: Vec<u64>,
        /// Those of the micro-batch.
        rows: Vec<u64>,
        largest_gradient: Option<String>,
    },
    GradientNotFinite {
        tensor: String,
        largest_gradient: Option<String>,
    },
    OverflowPersists {
        tensor: String,
        skipped: u64,
        loss_scale: f64,
    },
    NotMoved {
        tensor: String,
        steps: u64,
    },
}

impl Stopped {
    /// The failure of a step of these rows.
    pub(super) fn failure(self, step: u64, of_step: &[u64]) -> StageError {
        let error = match self {
            Self::LossNotFinite { loss, guilty, rows, largest_gradient } => {
                let loss = loss.parse().unwrap_or(f64::NAN);
                let error = TrainError::LossNotFinite { step, loss, documents: Vec::new(), largest_gradient };
                return failure::of_guilty(error, &guilty, &rows);
            }
            Self::GradientNotFinite { tensor, largest_gradient } => {
                TrainError::GradientNotFinite { step, tensor, largest_gradient }
            }
            Self::OverflowPersists { tensor, skipped, loss_scale } => {
                TrainError::OverflowPersists { step, tensor, skipped, loss_scale }
            }
            Self::NotMoved { tensor, steps } => TrainError::NotMoved { tensor, steps },
        };
        failure::of_rows(error, of_step)
    }
}
