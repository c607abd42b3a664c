//! Whether the model finds the better response of a pair likelier than the worse one.

use engine::context::StageContext;
use engine::error::{Cause, StageError};

use super::figures::PreferenceAccuracy;
use super::{Subject, of_row};
use crate::compute::inference::RowScore;
use crate::data::artifact::{Role, Row};
use crate::data::prompt::ResponseBorder;

/// What was found so far, over pairs.
#[derive(Debug, Default)]
pub(super) struct Preference {
    pairs: u64,
    preferred: u64,
    preferred_by_token: u64,
    margin: f64,
    skipped_rows: u64,
}

impl Preference {
    /// Scores both responses of a group of rows.
    ///
    /// # Errors
    /// Fails where a row is no pair or cannot be scored.
    pub(super) fn measure<'a>(
        &mut self,
        subject: &mut Subject,
        group: impl Iterator<Item = (&'a Row, u64)>,
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let longest = subject.respondent.max_position_embeddings();
        let mut responses = Vec::new();
        for (row, number) in group {
            let Row::Judged(judged) = row else {
                return Err(StageError::bad_data("the rows are no pairs of responses"));
            };
            let tokenizer = &subject.respondent.tokenizer;
            let sides = subject.renderer.responses(judged, ResponseBorder::Segments, tokenizer);
            let sides = sides.map_err(of_row(number))?;
            if sides.iter().map(|side| side.role).ne([Role::Chosen, Role::Rejected])
                || sides.iter().any(|side| side.encoded.input_ids.len() > longest)
            {
                self.skipped_rows += 1;
                continue;
            }
            responses.extend(sides.into_iter().map(|side| side.encoded));
        }
        let scores = subject.respondent.score(&responses, &mut |_, _| {}, context)?;
        for pair in scores.chunks_exact(2) {
            let [chosen, rejected] = [&pair[0], &pair[1]].map(|score: &RowScore| (-score.nll, score.tokens));
            if chosen.1 == 0 || rejected.1 == 0 {
                self.skipped_rows += 1;
                continue;
            }
            let margin = chosen.0 - rejected.0;
            if !margin.is_finite() {
                return Err(StageError::new(Cause::Numeric, format!("a response's log-probability is {margin}")));
            }
            let by_token = chosen.0 / chosen.1 as f64 - rejected.0 / rejected.1 as f64;
            self.pairs += 1;
            self.preferred += u64::from(margin > 0.0);
            self.preferred_by_token += u64::from(by_token > 0.0);
            self.margin += margin;
        }
        Ok(())
    }

    /// The figure.
    ///
    /// # Errors
    /// Fails where no pair was scored.
    pub(super) fn figure(&self) -> Result<PreferenceAccuracy, StageError> {
        if self.pairs == 0 {
            return Err(StageError::bad_data("no pair of responses could be scored"));
        }
        let pairs = self.pairs as f64;
        Ok(PreferenceAccuracy {
            value: self.preferred as f64 / pairs,
            by_token: self.preferred_by_token as f64 / pairs,
            mean_margin: self.margin / pairs,
            preferred: self.preferred,
            pairs: self.pairs,
            skipped_rows: self.skipped_rows,
            ..PreferenceAccuracy::default()
        })
    }
}
