//! Saving the working state of a run and taking it up again.

use std::fs;
use std::path::{Path, PathBuf};

use engine::context::StageContext;
use engine::error::{Cause, OrFail, StageError};
use engine::protocol::WorkerEvent;
use engine::stage::{InputFacts, WorkingState};
use model::schedule::Horizon;

use super::learner::{Learner, Restored, Written};
use super::parameters::Train;
use super::state::{self, BestDraft, Progress, Saved, StateDraft, StateError};

/// Takes up the newest saved step, where there is one that this run continues: its progress and its records.
pub(super) fn resume(
    params: &Train,
    fresh: &Progress,
    learner: &mut dyn Learner,
    context: &mut StageContext,
) -> Result<Option<(Progress, String)>, StageError> {
    let (saved, damaged) = state::newest(context.working()).map_err(state::failure)?;
    passed_over(damaged, context);
    let Some(Saved { mut progress, metrics, files }) = saved else { return Ok(None) };
    if !goes_on(params, &progress, fresh, context)? {
        return Ok(None);
    }
    let Progress { optimizer_steps, loss_scaler, .. } = progress;
    learner.restore(Restored { files, optimizer_steps, loss_scaler }, context)?;
    progress.total_steps = fresh.total_steps;
    progress.computed_by.clone_from(&fresh.computed_by);
    Ok(Some((progress, metrics)))
}

/// A crash, with the step that the next run goes on from.
pub(super) fn with_saved_step(mut error: StageError, context: &StageContext) -> StageError {
    let saved = state::newest_progress(context.working()).ok().flatten();
    if let Some(Progress { step, .. }) = saved.filter(|_| error.cause == Cause::Crashed && error.help.is_none()) {
        error.help = Some(format!("step {step} is saved: run again to resume from there"));
    }
    error
}

/// Warns of damaged steps.
fn passed_over(damaged: Vec<StateError>, context: &mut StageContext) {
    for error in damaged {
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
        context.warn(format!("passing over a saved step: {error}{}", cause.unwrap_or_default()));
    }
}

/// Whether this run continues a saved one, which is told; what it cannot continue is removed.
fn goes_on(params: &Train, saved: &Progress, fresh: &Progress, context: &mut StageContext) -> Result<bool, StageError> {
    let step = saved.step;
    if let Some(reason) = starts_over(params, saved, fresh.total_steps) {
        context.warn(format!("starting over: {reason}"));
        state::clear(context.working()).map_err(state::failure)?;
        return Ok(false);
    }
    if saved.computed_by != fresh.computed_by {
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
pub(super) fn standing(params: &Train, working: &Path, inputs: &InputFacts) -> Option<WorkingState> {
    let saved = state::newest_progress(working).ok()??;
    let rows = params.data.reference.facts_in(inputs);
    let rows = rows.and_then(|facts| facts.get("rows")?.as_u64()).and_then(|rows| usize::try_from(rows).ok());
    let total = rows.map(|rows| params.total_steps(rows));
    if let Some(because) = total.and_then(|total| starts_over(params, &saved, total)) {
        return Some(WorkingState::StartsOver { because });
    }
    Some(WorkingState::GoesOn { unit: "step".to_owned(), done: saved.step, of: total })
}

/// Why a saved run cannot be the beginning of one of `now` steps, if so.
fn starts_over(params: &Train, saved: &Progress, now: u64) -> Option<String> {
    let Progress { step, total_steps, .. } = *saved;
    if total_steps != now && params.scheduler.horizon() == Horizon::Total {
        return Some(format!(
            "the saved run of {total_steps} steps had another learning rate from its first step on than one of {now}"
        ));
    }
    (step > now).then(|| format!("the saved run is at step {step}, beyond the {now} steps of this one"))
}

/// Saves the state after the last whole step.
pub(super) fn save(
    progress: &mut Progress,
    metrics: &str,
    keep_last: usize,
    learner: &mut dyn Learner,
    context: &mut StageContext,
) -> Result<(), StageError> {
    progress.optimizer_steps = learner.optimizer_steps();
    progress.loss_scaler = learner.loss_scaler();
    let draft = StateDraft::begin(context.working()).map_err(state::failure)?;
    let tensors = learner.save(draft.folder(), Written::State, context)?;
    draft.finish(progress, metrics, tensors, keep_last).map_err(state::failure)?;
    context.emit(WorkerEvent::Checkpoint { step: progress.step });
    Ok(())
}

/// Keeps the present values as those of the best step so far.
pub(super) fn save_best(
    progress: &mut Progress,
    learner: &mut dyn Learner,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let draft = BestDraft::begin(context.working()).map_err(state::failure)?;
    let files = learner.save(draft.folder(), Written::Values, context)?;
    progress.best_weights = Some(draft.finish(progress.step, files).map_err(state::failure)?);
    Ok(())
}

/// The files of the values that are the result: those of the best step, or of the last one, which was saved.
pub(super) fn result(
    params: &Train,
    progress: &Progress,
    learner: &mut dyn Learner,
    context: &mut StageContext,
) -> Result<Vec<PathBuf>, StageError> {
    let is_last = progress.validation.best.is_none_or(|best| best.step == progress.step);
    let files = match progress.best_weights.filter(|_| params.keep_best && !is_last) {
        Some(best) => best.files(context.working()),
        None if learner.state_has_names_of_files() => state::values_of_step(context.working(), progress.step),
        None => {
            let folder = context.scratch().join("result");
            fs::create_dir_all(&folder).or_fail(Cause::Machine, || format!("cannot create `{}`", folder.display()))?;
            let files = learner.save(&folder, Written::Values, context)?;
            return Ok(files.into_iter().map(|file| folder.join(file)).collect());
        }
    };
    files.map_err(state::failure)
}
