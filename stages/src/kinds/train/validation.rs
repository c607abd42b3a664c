//! Validation: when the model is scored on rows that it does not learn from, and what follows from it.

use std::sync::Arc;

use engine::context::StageContext;
use engine::error::{Cause, StageError};
use model::batch::Batch;
use model::loss::DocumentObjective;
use serde::{Deserialize, Serialize};

use super::learner::{Learner, Ranks, Scored, Scorer, Scores};
use super::order::Division;
use super::parameters::{BestBy, EarlyStopping};
use super::preference::{self, Figures, LogProbs};
use super::rows::listed;
use crate::data::artifact::TokensReader;
use crate::kinds::log_probs::Record;

/// The validation rows.
pub(super) struct Validator {
    rows: TokensReader,
    /// Rows that a rank computes at once.
    rows_at_once: usize,
    ranks: Ranks,
    /// Optimizer steps between two validations; each epoch's end if left out.
    every: Option<u64>,
    /// For losses of preferences.
    preference: Option<Comparison>,
}

/// What the rows are compared by.
struct Comparison {
    objective: Arc<dyn DocumentObjective>,
    known: LogProbs,
    reference: Option<LogProbs>,
}

/// The loss over all validation rows.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Validated {
    /// Mean negative log-likelihood over all targets together, in nats; for a loss of preferences that loss.
    pub(super) loss: f64,
    pub(super) rows: u64,
    pub(super) target_tokens: u64,
    pub(super) preference: Option<Figures>,
}

impl Validated {
    /// What says how good a step is: the lowest is the best.
    pub(super) fn measure(&self, by: BestBy) -> f64 {
        let figure = self.preference.as_ref().and_then(|figures| figures.of_name(by));
        by.turned(figure.unwrap_or(self.loss))
    }
}

impl Validator {
    /// A validator of rows that have targets.
    ///
    /// # Errors
    /// Fails where they have none.
    pub(super) fn new(
        rows: TokensReader,
        rows_at_once: usize,
        ranks: Ranks,
        every: Option<u64>,
    ) -> Result<Self, StageError> {
        if rows.facts().target_tokens == 0 {
            let message = "no validation row has a target token: there is nothing to measure";
            return Err(StageError::bad_data(message).with_help("look at the rows with `pipeline show`"));
        }
        Ok(Self { rows, rows_at_once, ranks, every, preference: None })
    }

    /// Has the rows compared by an objective, with a reference if it needs one, which is scored now,
    /// where it was not scored ahead.
    ///
    /// # Errors
    /// Fails where a row cannot be read or scored, or the user wants to stop.
    pub(super) fn compare(
        &mut self,
        objective: Arc<dyn DocumentObjective>,
        reference: Option<Scorer>,
        ahead: Option<&[Record]>,
        learner: &mut dyn Learner,
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let known = LogProbs::unknown(&mut self.rows, objective.scope())?;
        let (count, ranks, at_once) = (self.rows.len(), self.ranks.clone(), self.rows_at_once);
        let mut first = 0;
        let mut batches = |rows: &mut TokensReader| round(rows, &mut first, count, &ranks, at_once);
        let reference = match (reference, ahead) {
            (Some(_), Some(records)) => Some(LogProbs::of_records(&mut self.rows, records)?),
            (Some(scorer), None) => {
                let of_rows =
                    preference::reference(&mut self.rows, "validation", scorer, &mut batches, learner, context)?;
                Some(of_rows)
            }
            (None, _) => None,
        };
        self.preference = Some(Comparison { objective, known, reference });
        Ok(())
    }

    /// Whether it is due once so many steps are done. It is before the first one, so that a curve shows what training
    /// changed.
    pub(super) fn is_due(&self, steps: u64, division: &Division) -> bool {
        is_due(self.every, steps, division)
    }

    /// Scores every row, a micro-batch at a time, which go around among the ranks.
    ///
    /// # Errors
    /// Fails where a row cannot be read or scored, or its loss is not finite, and as cancelled where the user wants to
    /// stop.
    pub(super) fn validate(
        &mut self,
        learner: &mut dyn Learner,
        step: u64,
        context: &mut StageContext,
    ) -> Result<Validated, StageError> {
        let (count, target_tokens) = (self.rows.len(), self.rows.facts().target_tokens);
        let (rows, ranks, at_once) = (&mut self.rows, &self.ranks, self.rows_at_once);
        let mut first = 0;
        let mut rounds = |context: &StageContext| {
            context.stop_if_cancelled()?;
            round(rows, &mut first, count, ranks, at_once)
        };
        if let Some(Comparison { objective, known, reference }) = &self.preference {
            let (loss, figures) =
                preference::validate(known, reference.as_ref(), &**objective, &mut rounds, learner, context)?;
            return Ok(Validated { loss, rows: count, target_tokens, preference: Some(figures) });
        }
        match learner.score(step, &mut rounds, context)? {
            Scored::Finite(Scores { nll, target_tokens }) => {
                Ok(Validated { loss: nll / target_tokens as f64, rows: count, target_tokens, preference: None })
            }
            Scored::NotFinite { loss, rows } => Err(not_finite(loss, &rows, step)),
        }
    }
}

/// Whether something that is done every so many steps, else at the end of each epoch, is due once so many are done.
pub(super) fn is_due(every: Option<u64>, steps: u64, division: &Division) -> bool {
    match every {
        Some(every) => steps.is_multiple_of(every),
        None => steps == 0 || division.ends_epoch(steps),
    }
}

/// The micro-batches of the ranks that are fed, of which the first of all begins at a row; none beyond the last row.
fn round(
    rows: &mut TokensReader,
    first: &mut u64,
    count: u64,
    ranks: &Ranks,
    at_once: usize,
) -> Result<Option<Vec<Batch>>, StageError> {
    if *first >= count {
        return Ok(None);
    }
    let of_rank = |rank: usize| {
        let mut batch = Batch::default();
        let begin = *first + (rank * at_once) as u64;
        for row in begin..count.min(begin + at_once as u64) {
            batch.push(row, &rows.row(row)?);
        }
        Ok(batch)
    };
    let batches = ranks.fed.clone().map(of_rank).collect::<Result<_, StageError>>()?;
    *first += (ranks.size * at_once) as u64;
    Ok(Some(batches))
}

/// A loss after so many steps that is no number, of a micro-batch of these rows.
fn not_finite(loss: f64, rows: &[u64], step: u64) -> StageError {
    let help = format!(
        "{}; the micro-batch's rows of the validation data: {}",
        match step {
            0 => "nothing has been trained yet: check the model, or the adapter of the warm start",
            _ => "lower `optimizer.learning_rate`, or set `clip_grad_norm`",
        },
        listed(rows)
    );
    StageError::new(Cause::Numeric, format!("the validation loss is {loss} after step {step}")).with_help(help)
}

/// How validation has gone so far: part of the working state.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Course {
    /// Steps done before the last validation.
    pub last: Option<u64>,
    /// The lowest loss of those after a step.
    pub best: Option<Best>,
    /// Validations since one that was an improvement.
    pub without_improvement: u64,
}

/// The step with the lowest validation loss.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Best {
    /// Steps done.
    pub step: u64,
    pub loss: f64,
}

impl Course {
    /// Takes in the loss after so many steps; whether it is the lowest. The loss before the first step is there to be
    /// looked at: it is no candidate.
    pub(super) fn add(&mut self, step: u64, loss: f64, stopping: Option<&EarlyStopping>) -> bool {
        self.last = Some(step);
        if step == 0 {
            return false;
        }
        let least = self.best.map(|best| best.loss);
        let min_delta = stopping.map_or(0.0, |stopping| stopping.min_delta);
        if least.is_none_or(|least| least - loss > min_delta) {
            self.without_improvement = 0;
        } else {
            self.without_improvement += 1;
        }
        let lowest = least.is_none_or(|least| loss < least);
        if lowest {
            self.best = Some(Best { step, loss });
        }
        lowest
    }

    /// Whether training ends here.
    pub(super) fn ends_early(&self, stopping: Option<&EarlyStopping>) -> bool {
        stopping.is_some_and(|stopping| self.without_improvement >= stopping.patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn training_ends_after_so_many_validations_without_enough_improvement() {
        let stopping = EarlyStopping { patience: 2, min_delta: 0.1 };
        let mut course = Course::default();
        let mut ends = Vec::new();
        // The third is lower than the second, and not by enough.
        for (step, loss) in [(0, 0.1), (5, 3.0), (10, 2.5), (15, 2.45), (20, 2.3), (25, 2.4), (30, 2.3)] {
            course.add(step, loss, Some(&stopping));
            ends.push(course.ends_early(Some(&stopping)));
        }
        assert_eq!(ends, [false, false, false, false, false, false, true]);
        assert_eq!(course.best, Some(Best { step: 20, loss: 2.3 }));
        assert!(!course.ends_early(None));
    }

    #[test]
    fn an_equal_loss_is_no_improvement_and_the_first_of_equals_stays_the_best() {
        let stopping = EarlyStopping { patience: 1, min_delta: 0.0 };
        let mut course = Course::default();
        assert!(course.add(1, 2.0, Some(&stopping)) && !course.add(2, 2.0, Some(&stopping)));
        assert!(course.ends_early(Some(&stopping)));
        assert_eq!(course.best.map(|best| best.step), Some(1));
    }
}
