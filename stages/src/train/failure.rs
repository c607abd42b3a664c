//! A failed step as a failure of the stage, with the rows that were in it.

use engine::error::{Cause, StageError};
use model::batch::Batch;
use model::decoder::RunError;
use model::trainer::TrainError;

use super::rows::listed;

/// A failure, before any row was read or of a whole step; `rows` are numbers of the data.
pub(super) fn of_rows(error: TrainError, rows: &[u64]) -> StageError {
    let failure = failure(error);
    if rows.is_empty() {
        return failure;
    }
    failure.with_help(format!("its rows of the data: {} (look at them with `pipeline show`)", listed(rows)))
}

/// A failure of a micro-batch of these rows: where some of its documents alone are at fault, their rows are named.
pub(super) fn of_micro_batch(error: TrainError, rows: &[u64], batch: &Batch) -> StageError {
    let guilty: Vec<u64> = match &error {
        TrainError::LossNotFinite { documents, .. } => {
            let mut guilty: Vec<u64> = documents.iter().filter_map(|&index| batch.rows.get(index).copied()).collect();
            guilty.dedup();
            guilty
        }
        _ => Vec::new(),
    };
    if guilty.is_empty() || guilty.len() == rows.len() {
        return of_rows(error, rows);
    }
    let help = format!(
        "its rows of the data: {}, in a micro-batch of rows {} (look at them with `pipeline show`)",
        listed(&guilty),
        listed(rows)
    );
    failure(error).with_help(help)
}

fn failure(error: TrainError) -> StageError {
    let cause = match &error {
        TrainError::NothingToTrain(_) => Cause::BadParameters,
        TrainError::NoTargets { .. } => Cause::BadData,
        TrainError::LossNotFinite { .. }
        | TrainError::GradientNotFinite { .. }
        | TrainError::OverflowPersists { .. }
        | TrainError::NotMoved { .. } => Cause::Numeric,
        TrainError::FrozenMoved { .. } => Cause::Internal,
        TrainError::Run(RunError::Batch(_)) => Cause::BadData,
        TrainError::Run(RunError::Kernel(_)) => Cause::Machine,
    };
    StageError::new(cause, "training stopped").with_source(error)
}
