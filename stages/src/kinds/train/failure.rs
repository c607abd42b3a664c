//! A failed step as a failure of the stage, with the rows that were in it.

use engine::error::{Cause, StageError};
use model::batch::Batch;
use model::decoder::RunError;
use model::trainer::{CollectiveError, TrainError};

use super::parameters::LossScale;
use super::rows::listed;

/// A failure, before any row was read or of a whole step; `rows` are numbers of the data.
pub(super) fn of_rows(error: TrainError, rows: &[u64]) -> StageError {
    if rows.is_empty() || matches!(error, TrainError::Collective(_)) {
        return failure(error);
    }
    let rows = format!("its rows of the data: {} (look at them with `pipeline show`)", listed(rows));
    with_remedy(error, rows)
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
    of_guilty(error, &guilty, rows)
}

/// A failure of a micro-batch of these rows, of which some are at fault.
pub(super) fn of_guilty(error: TrainError, guilty: &[u64], rows: &[u64]) -> StageError {
    if guilty.is_empty() || guilty.len() == rows.len() {
        return of_rows(error, rows);
    }
    let help = format!(
        "its rows of the data: {}, in a micro-batch of rows {} (look at them with `pipeline show`)",
        listed(guilty),
        listed(rows)
    );
    with_remedy(error, help)
}

/// A failure with its rows and what to do.
fn with_remedy(error: TrainError, rows: String) -> StageError {
    let help = match remedy(&error) {
        Some(remedy) => format!("{remedy}; {rows}"),
        None => rows,
    };
    failure(error).with_help(help)
}

/// What to do about a loss or a gradient that is not finite.
fn remedy(error: &TrainError) -> Option<&'static str> {
    let (TrainError::LossNotFinite { step, .. } | TrainError::GradientNotFinite { step, .. }) = error else {
        return None;
    };
    Some(match step {
        1 => {
            "nothing has been trained yet: the model, or the adapter of the warm start, has values that are not \
             finite or too large, or `lora.alpha` is too large"
        }
        _ => "lower `optimizer.learning_rate`, or set `clip_grad_norm` or a longer `scheduler.warmup_steps`",
    })
}

/// The failure of a run whose every step was skipped; `loss_scale` is that after the last one.
pub(super) fn of_overflows(loss_scale: Option<f32>) -> StageError {
    let default = LossScale::default().init_scale;
    let help = match loss_scale.filter(|scale| f64::from(*scale) > default) {
        Some(scale) => format!(
            "the loss scale is still {scale:e}: lower `loss_scale.init_scale` (default: {default}), or train for more \
             steps"
        ),
        None => "compute in bf16 or f32".to_owned(),
    };
    let message = "the gradients of every step overflowed: nothing was trained";
    StageError::new(Cause::Numeric, message).with_help(help)
}

/// A failure of workers to go on together, which is one of this stage already where rank 0 has lost another.
pub(super) fn of_workers(CollectiveError(source): CollectiveError) -> StageError {
    match source.downcast::<StageError>() {
        Ok(error) => *error,
        Err(source) => StageError::internal("the workers could not continue together").with_source(source),
    }
}

fn failure(error: TrainError) -> StageError {
    let error = match error {
        TrainError::Collective(error) => return of_workers(error),
        error => error,
    };
    let cause = match &error {
        TrainError::NothingToTrain(_) | TrainError::NoTeacher | TrainError::TeacherVocabulary { .. } => {
            Cause::BadParameters
        }
        TrainError::NoTargets { .. } | TrainError::Objective { .. } => Cause::BadData,
        TrainError::LossNotFinite { .. }
        | TrainError::GradientNotFinite { .. }
        | TrainError::OverflowPersists { .. }
        | TrainError::NotMoved { .. } => Cause::Numeric,
        TrainError::FrozenMoved { .. } | TrainError::WorkersDiffer { .. } | TrainError::Collective(_) => {
            Cause::Internal
        }
        TrainError::Run(RunError::Batch(_)) => Cause::BadData,
        TrainError::Run(RunError::Kernel(_)) => Cause::Machine,
    };
    StageError::new(cause, "training stopped").with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflows_of_a_high_scale_are_told_from_those_of_any_scale() {
        let help = |scale| of_overflows(scale).help.unwrap();
        let lower =
            "the loss scale is still 3.125e6: lower `loss_scale.init_scale` (default: 1024), or train for more steps";
        assert_eq!(help(Some(3_125_000.0)), lower);
        for scale in [Some(1024.0), Some(0.5), None] {
            assert_eq!(help(scale), "compute in bf16 or f32");
        }
    }
}
