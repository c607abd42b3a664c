//! How likely the model finds both responses of the rows that are pairs.

use engine::context::StageContext;
use engine::error::{Cause, StageError};

use super::examples::Example;
use super::measures::Measures;
use super::{Subject, of_row};
use crate::compute::inference::RowScore;
use crate::data::artifact::{Role, Row};
use crate::data::prompt::ResponseBorder;
use crate::metrics::Observed;

/// What was found so far, over pairs.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    scored: u64,
    /// Rows left out: longer than the model reads, or with a response of which no token is predicted.
    pub skipped_rows: u64,
}

impl Pairs {
    /// Scores both responses of a group of rows.
    ///
    /// # Errors
    /// Fails where a row is no pair or cannot be scored.
    pub(super) fn measure(
        &mut self,
        subject: &mut Subject,
        group: &mut [(Row, Example)],
        measures: &mut Measures,
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let longest = subject.session.max_position_embeddings();
        let (mut responses, mut examples) = (Vec::new(), Vec::new());
        for (row, example) in group {
            let Row::Judged(judged) = row else {
                return Err(StageError::bad_data("the rows are no pairs of responses"));
            };
            let tokenizer = &subject.session.tokenizer;
            let sides = subject.renderer.responses(judged, ResponseBorder::Segments, tokenizer);
            let sides = sides.map_err(of_row(example.row))?;
            if sides.iter().map(|side| side.role).ne([Role::Chosen, Role::Rejected])
                || sides.iter().any(|side| side.encoded.input_ids.len() > longest)
            {
                self.skipped_rows += 1;
                continue;
            }
            responses.extend(sides.into_iter().map(|side| side.encoded));
            examples.push(example);
        }
        let scores = subject.session.score(&responses, &mut |_, _| {}, context)?;
        for (example, pair) in examples.into_iter().zip(scores.chunks_exact(2)) {
            let [chosen, rejected]: [RowScore; 2] = [pair[0], pair[1]];
            if chosen.tokens == 0 || rejected.tokens == 0 {
                self.skipped_rows += 1;
                continue;
            }
            let margin = rejected.nll - chosen.nll;
            if !margin.is_finite() {
                return Err(StageError::new(Cause::Numeric, format!("a response's log-probability is {margin}")));
            }
            self.scored += 1;
            measures.add(&Observed::Pair { chosen, rejected }, example);
        }
        Ok(())
    }

    /// Warns of pairs that were left out.
    ///
    /// # Errors
    /// Fails where no pair was scored.
    pub(super) fn warn(&self, context: &mut StageContext) -> Result<(), StageError> {
        let Self { scored, skipped_rows } = *self;
        if scored == 0 {
            return Err(StageError::bad_data("no pair of responses could be scored"));
        }
        if skipped_rows > 0 {
            let all = scored + skipped_rows;
            context.warn(format!(
                "{skipped_rows} of {all} pairs are left out: a response is empty, or longer with its prompt than the \
                 model's positions"
            ));
        }
        Ok(())
    }
}
