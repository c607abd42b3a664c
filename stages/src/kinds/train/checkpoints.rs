//! Saving the working state of a run and taking it up again.

use std::path::{Path, PathBuf};

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::preflight::is_known;
use engine::protocol::WorkerEvent;
use engine::stage::{InputFacts, WorkingState};
use model::blocks::Blocks;
use model::schedule::Horizon;
use model::trainer::{TrainedTensor, Trainer};

use super::parameters::TrainParams;
use super::state::{self, Progress, State, StateError};

/// Takes up the newest saved step, where there is one that this run continues: its progress and its records.
pub(super) fn resume<B: Blocks>(
    params: &TrainParams,
    fresh: &Progress,
    trainer: &mut Trainer<B>,
    context: &mut StageContext,
) -> Result<Option<(Progress, String)>, StageError> {
    let (saved, damaged) = state::newest(context.working()).map_err(disk)?;
    passed_over(damaged, context);
    let Some(State { mut progress, tensors, metrics }) = saved else { return Ok(None) };
    if !goes_on(params, &progress, fresh, context)? {
        return Ok(None);
    }
    let step = progress.step;
    trainer
        .restore(progress.optimizer_steps, tensors)
        .or_fail(Cause::Internal, || format!("cannot take up the saved step {step}"))?;
    if let Some(scaler) = progress.loss_scaler {
        trainer.restore_loss_scaler(scaler);
    }
    progress.total_steps = fresh.total_steps;
    progress.computed_by.clone_from(&fresh.computed_by);
    Ok(Some((progress, metrics)))
}

/// The newest saved step, where there is one that this run continues, by its folder: for a worker that takes it up
/// itself.
pub(super) fn to_resume(
    params: &TrainParams,
    fresh: &Progress,
    context: &mut StageContext,
) -> Result<Option<PathBuf>, StageError> {
    let (saved, damaged) = state::newest_whole(context.working()).map_err(disk)?;
    passed_over(damaged, context);
    let Some((progress, folder)) = saved else { return Ok(None) };
    Ok(goes_on(params, &progress, fresh, context)?.then_some(folder))
}

pub(super) fn saved_steps(context: &StageContext) -> Option<u64> {
    state::newest_progress(context.working()).ok().flatten().map(|progress| progress.step)
}

/// Warns of damaged steps.
fn passed_over(damaged: Vec<StateError>, context: &mut StageContext) {
    for error in damaged {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        context.warn(format!("passing over a saved step: {error}{}", cause.unwrap_or_default()));
    }
}

/// Whether this run continues a saved one, which is told; what it cannot continue is removed.
fn goes_on(
    params: &TrainParams,
    saved: &Progress,
    fresh: &Progress,
    context: &mut StageContext,
) -> Result<bool, StageError> {
    let step = saved.step;
    if let Some(reason) = starts_over(params, saved, fresh.total_steps) {
        context.warn(format!("starting over: {reason}"));
        state::clear(context.working()).map_err(disk)?;
        return Ok(false);
    }
    // The torch worker adds its versions, which are not known before it runs.
    let rest = saved.computed_by.strip_prefix(&fresh.computed_by);
    if !rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(',')) {
        context.warn(format!(
            "step {step} was computed by {}, and this run is by {}: their last digits may differ",
            saved.computed_by, fresh.computed_by
        ));
    }
    context.record("resumed_from_step", step);
    context.note(format!("resuming from step {step} of {}", fresh.total_steps));
    Ok(true)
}

/// How far an interrupted run came, for one who asks before it goes on. Only what a saved step says of itself is read:
/// whether its tensors are whole is found out by [`resume`].
pub(super) fn standing(params: &TrainParams, working: &Path, inputs: &InputFacts) -> Option<WorkingState> {
    let saved = state::newest_progress(working).ok()??;
    let rows = params.data.reference.facts_in(inputs).filter(|facts| is_known(facts));
    let rows = rows.and_then(|facts| facts.get("rows")?.as_u64()).and_then(|rows| usize::try_from(rows).ok());
    let total = rows.map(|rows| params.total_steps(rows));
    if let Some(because) = total.and_then(|total| starts_over(params, &saved, total)) {
        return Some(WorkingState::StartsOver { because });
    }
    Some(WorkingState::GoesOn { unit: "step".to_owned(), done: saved.step, of: total })
}

/// Why a saved run cannot be the beginning of one of `now` steps, if so.
fn starts_over(params: &TrainParams, saved: &Progress, now: u64) -> Option<String> {
    let Progress { step, total_steps, .. } = *saved;
    if total_steps != now && params.scheduler.horizon() == Horizon::Total {
        return Some(format!(
            "the saved run of {total_steps} steps had another learning rate from its first step on than one of {now}"
        ));
    }
    (step > now).then(|| format!("the saved run stands at step {step}, beyond the {now} steps of this one"))
}

/// Saves the state after the last whole step.
pub(super) fn save<B: Blocks>(
    progress: &mut Progress,
    metrics: &str,
    keep_last: usize,
    trainer: &Trainer<B>,
    context: &mut StageContext,
) -> Result<(), StageError> {
    progress.optimizer_steps = trainer.steps();
    progress.loss_scaler = trainer.loss_scaler();
    let state = State { progress: progress.clone(), tensors: trainer.trained_tensors(), metrics: metrics.to_owned() };
    state::save(context.working(), &state, keep_last).map_err(disk)?;
    context.emit(WorkerEvent::Checkpoint { step: progress.step });
    Ok(())
}

/// Keeps the present values as those of the best step so far.
pub(super) fn save_best<B: Blocks>(
    progress: &mut Progress,
    trainer: &Trainer<B>,
    context: &StageContext,
) -> Result<(), StageError> {
    let best = state::save_best(context.working(), progress.step, &trainer.trained_tensors()).map_err(disk)?;
    progress.best_weights = Some(best);
    Ok(())
}

/// Gives the trainer the values of the best step, to be written as the result.
pub(super) fn take_best<B: Blocks>(
    progress: &Progress,
    trainer: &mut Trainer<B>,
    context: &StageContext,
) -> Result<(), StageError> {
    let is_present = progress.validation.best.is_none_or(|best| best.step == progress.step);
    let Some(best) = progress.best_weights.filter(|_| !is_present) else { return Ok(()) };
    let mut tensors = tensors(trainer)?;
    state::load_best(context.working(), &best, &mut tensors).map_err(disk)?;
    trainer.restore(trainer.steps(), tensors).or_fail(Cause::Internal, || "cannot take up the best step".to_owned())
}

/// Everything that is trained, sorted by name.
fn tensors<B: Blocks>(trainer: &Trainer<B>) -> Result<Vec<TrainedTensor>, StageError> {
    let mut tensors = trainer.state().or_fail(Cause::Internal, || "cannot read the state of training".to_owned())?;
    tensors.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(tensors)
}

fn disk(error: StateError) -> StageError {
    StageError::new(Cause::Machine, "cannot keep the state of training").with_source(error)
}
