//! How likely the model finds the responses of the rows.

use engine::context::StageContext;
use engine::error::{Cause, StageError};

use super::examples::Example;
use super::measures::Measures;
use super::{Evaluate, Subject, of_row};
use crate::compute::inference::RowScore;
use crate::data::artifact::Row;
use crate::data::prompt::Encoded;
use crate::metrics::{Observed, Reads};

/// What was found so far, over all response tokens.
#[derive(Debug, Default)]
pub(super) struct Likelihood {
    tokens: u64,
    truncated_rows: u64,
    rows_without_tokens: u64,
    /// Rows whose only response is a desirable one.
    desirable_rows: u64,
    undesirable_rows: u64,
}

impl Likelihood {
    /// Scores the responses of a group of rows, and notes each row's share with its example.
    pub(super) fn measure(
        &mut self,
        params: &Evaluate,
        subject: &mut Subject,
        group: &mut [(Row, Example)],
        measures: &mut Measures,
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let lessons = group.iter().map(|(row, example)| lesson(params, subject, row, example));
        let (lessons, cut): (Vec<Encoded>, Vec<bool>) = lessons.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        let (first, total) = (group.first().map_or(0, |(_, example)| example.row), subject.count);
        let scores = subject.session.score(
            &lessons,
            &mut |done, context| {
                // Where the model also answers, which takes much longer, its answers are counted instead.
                if !params.reads(Reads::Answer) {
                    context.progress("rows", first + done as u64, Some(total), None);
                }
            },
            context,
        )?;
        for (((row, example), is_cut), score) in group.iter_mut().zip(cut).zip(scores) {
            let RowScore { nll, tokens, correct } = score;
            if !nll.is_finite() {
                let message = format!("the negative log-likelihood of row {} is {nll}", example.row + 1);
                return Err(StageError::new(Cause::Numeric, message).with_help(
                    "weights of the model that are not finite or too great do that: did its training diverge?",
                ));
            }
            (example.nll, example.tokens, example.correct) = (Some(nll), Some(tokens), Some(correct));
            self.tokens += tokens;
            self.truncated_rows += u64::from(is_cut);
            self.rows_without_tokens += u64::from(tokens == 0);
            if tokens > 0 {
                self.count_kind(row);
            }
            measures.add(&Observed::Likelihood { score, is_cut }, example);
        }
        Ok(())
    }

    fn count_kind(&mut self, row: &Row) {
        let Row::Judged(judged) = row else { return };
        match (&judged.chosen, &judged.rejected) {
            (Some(_), None) => self.desirable_rows += 1,
            (None, Some(_)) => self.undesirable_rows += 1,
            // Of a pair it is the chosen response that is scored.
            (Some(_), Some(_)) | (None, None) => {}
        }
    }

    /// Warns of rows that were cut, and of responses that are taken together though they are not alike.
    ///
    /// # Errors
    /// Fails if nothing was measured at all.
    pub(super) fn warn(
        &self,
        params: &Evaluate,
        subject: &Subject,
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let max_seq_len = longest(params, subject);
        if self.tokens == 0 {
            let cut = match self.truncated_rows {
                0 => String::new(),
                cut => format!("; {cut} of {} rows are cut to {max_seq_len} tokens", subject.count),
            };
            let message = format!("no row has a response token for perplexity{cut}");
            return Err(StageError::bad_data(message));
        }
        if self.truncated_rows > 0 {
            context.warn(format!("{} rows are cut to {max_seq_len} tokens for perplexity", self.truncated_rows));
        }
        if self.rows_without_tokens > 0 {
            context.warn(format!("{} rows have no response token to take perplexity over", self.rows_without_tokens));
        }
        let Self { desirable_rows, undesirable_rows, .. } = self;
        if *desirable_rows > 0 && *undesirable_rows > 0 {
            context.warn(format!(
                "{desirable_rows} desirable and {undesirable_rows} undesirable responses are taken together \
                 for perplexity"
            ));
        }
        Ok(())
    }
}

/// A row as tokens, cut where it is too long; and whether it is.
fn lesson(params: &Evaluate, subject: &Subject, row: &Row, example: &Example) -> Result<(Encoded, bool), StageError> {
    let max_seq_len = longest(params, subject);
    let tokenizer = &subject.session.tokenizer;
    let lesson = subject.renderer.lesson(row, tokenizer).and_then(|lesson| lesson.encode(tokenizer));
    let mut lesson = lesson.map_err(of_row(example.row))?;
    let is_cut = lesson.input_ids.len() > max_seq_len;
    lesson.input_ids.truncate(max_seq_len);
    lesson.labels.truncate(max_seq_len);
    subject.session.check_vocabulary(&lesson.input_ids, || format!("row {}", example.row + 1))?;
    Ok((lesson, is_cut))
}

/// Tokens of a row that are read, at most.
fn longest(params: &Evaluate, subject: &Subject) -> usize {
    let positions = subject.session.max_position_embeddings();
    params.max_seq_len.unwrap_or(positions).min(positions)
}
