//! What is said of a run as a whole: surprises before it, facts and a few lines after it.

use serde_json::{Map, Value, json};

use super::figures::History;
use super::order::Division;
use super::parameters::{BestBy, Leftover, Train};
use super::state::Progress;

/// What a user would otherwise find out from a loss curve.
pub(super) fn surprises(params: &Train, division: &Division, total_steps: u64) -> Vec<String> {
    let mut surprises = Vec::new();
    surprises.extend(params.low_peak(total_steps));
    if division.rows_left_out() > 0 {
        let because = match (params.max_steps_per_epoch, params.leftover) {
            (Some(_), _) => "max_steps_per_epoch",
            (None, Leftover::Drop | Leftover::Step) => "leftover: drop",
        };
        surprises.push(format!(
            "`{because}` leaves out {} of {} rows in each epoch",
            division.rows_left_out(),
            division.rows
        ));
    }
    surprises
}

/// At how large a share of skipped steps a run is worth a warning, as a divisor: a few at the start, in which the loss
/// scale is found, are none.
const MANY_SKIPPED: u64 = 4;

/// That gradients overflowed in many steps, which trained nothing.
pub(super) fn many_skipped(progress: &Progress) -> Option<String> {
    let Progress { step, skipped_steps, .. } = *progress;
    let are_many = skipped_steps > 0 && skipped_steps.saturating_mul(MANY_SKIPPED) >= step;
    are_many.then(|| {
        format!(
            "{skipped_steps} of {step} steps were skipped, as their gradients overflowed, and trained nothing: lower \
             `loss_scale.init_scale`, raise `loss_scale.growth_interval`, or train for more steps"
        )
    })
}

/// What is known of the whole run: the same for equal inputs.
pub(super) fn facts(params: &Train, division: &Division, progress: &Progress, history: &History) -> Map<String, Value> {
    let mut facts = Map::new();
    let mut add = |name: &str, value: Value| drop(facts.insert(name.to_owned(), value));
    add("steps", progress.step.into());
    add("rows", division.rows.into());
    add("rows_per_step", division.rows_per_step.into());
    add("leftover_rows", division.leftover_rows().into());
    add("rows_left_out", division.rows_left_out().into());
    add("target_tokens", progress.target_tokens.into());
    if progress.skipped_steps > 0 {
        add("skipped_steps", progress.skipped_steps.into());
    }
    if let Some(loss) = history.last_loss("train") {
        add("last_loss", loss.into());
    }
    if let Some(loss) = history.last_loss("validation") {
        add("last_validation_loss", loss.into());
    }
    history.last_of_tasks().into_iter().for_each(|(name, value)| add(&name, value));
    if let Some(best) = progress.validation.best {
        let name = match params.best_by {
            BestBy::Loss => "best_validation_loss".to_owned(),
            by => format!("best_validation_{}", by.name()),
        };
        add(&name, params.best_by.turned(best.loss).into());
        add("best_step", best.step.into());
        add("result_step", if params.keep_best { best.step } else { progress.step }.into());
    }
    if progress.step < progress.total_steps {
        add("ended_early", json!({ "at": progress.step, "of": progress.total_steps }));
    }
    facts
}

/// The run in a few lines for a person.
pub(super) fn text(params: &Train, division: &Division, progress: &Progress, history: &History) -> String {
    let Division { rows, rows_per_step, .. } = *division;
    let mut lines = vec![format!("{} steps of {rows_per_step} rows, {rows} rows in the data", progress.step)];
    match (division.leftover_rows(), params.leftover) {
        _ if params.max_steps_per_epoch.is_some() && division.rows_left_out() > 0 => {
            lines.push(format!("each epoch leaves out {} rows (max_steps_per_epoch)", division.rows_left_out()));
        }
        (0, _) => {}
        (rest, Leftover::Step) => lines.push(format!("each epoch ends with a step of {rest} rows (leftover: step)")),
        (rest, Leftover::Drop) => lines.push(format!("each epoch leaves out {rest} rows (leftover: drop)")),
    }
    let loss = history.last_loss("train").map(|loss| format!(", loss of the last step {loss:.4}"));
    lines.push(format!("trained on {} target tokens{}", progress.target_tokens, loss.unwrap_or_default()));
    lines.extend(validation(params, progress, history));
    lines.join("\n")
}

/// How validation went.
fn validation(params: &Train, progress: &Progress, history: &History) -> Vec<String> {
    let (Some(first), Some(last)) = (history.first_loss("validation"), history.last_loss("validation")) else {
        return Vec::new();
    };
    let mut lines = vec![format!("validation loss {first:.4} before the first step, {last:.4} after the last")];
    if let Some(best) = progress.validation.best {
        let kept = if params.keep_best { "the result (keep_best)" } else { "the result is the last step's" };
        let (by, step) = (params.best_by, best.step);
        let what = match by {
            BestBy::Loss => "lowest validation loss".to_owned(),
            by => format!("best {} of a validation", by.name()),
        };
        lines.push(format!("{what} {:.4} after step {step}: {kept}", by.turned(best.loss)));
    }
    if let Some(stopping) =
        params.early_stopping.as_ref().filter(|stopping| progress.validation.ends_early(Some(stopping)))
    {
        let (patience, step, total) = (stopping.patience, progress.step, progress.total_steps);
        lines.push(format!("ended at step {step} of {total}: {patience} validations without improvement"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_skipped_steps_are_reported_and_a_few_are_not() {
        let said = |skipped_steps, step| {
            many_skipped(&Progress { step, skipped_steps, ..Progress::fresh(step, String::new()) })
        };
        for (skipped, steps) in [(0, 0), (0, 10), (2, 10), (5, 1000)] {
            assert_eq!(said(skipped, steps), None, "{skipped} of {steps}");
        }
        assert!(said(3, 12).is_some());
        let message = said(8, 10).unwrap();
        assert!(message.starts_with("8 of 10 steps were skipped"), "{message}");
        assert!(message.contains("lower `loss_scale.init_scale`"), "{message}");
    }
}
