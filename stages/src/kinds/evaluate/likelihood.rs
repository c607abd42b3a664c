//! How likely the model finds the responses of the rows: perplexity and token accuracy.

use engine::context::StageContext;
use engine::error::{Cause, StageError};

use super::examples::Example;
use super::figures::{Perplexity, TokenAccuracy};
use super::{Evaluate, Subject, of_row};
use crate::compute::inference::RowScore;
use crate::data::artifact::Row;
use crate::data::prompt::Encoded;

/// What was found so far, over all response tokens.
#[derive(Debug, Default)]
pub(super) struct Likelihood {
    nll: f64,
    tokens: u64,
    correct: u64,
    truncated_rows: u64,
    rows_without_tokens: u64,
}

impl Likelihood {
    /// Scores the responses of a group of rows, and notes each row's share with its example.
    pub(super) fn measure(
        &mut self,
        params: &Evaluate,
        subject: &mut Subject,
        group: &mut [(Row, Example)],
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let mut lessons = Vec::with_capacity(group.len());
        for (row, example) in &*group {
            lessons.push(self.lesson(params, subject, row, example)?);
        }
        let (first, total) = (group.first().map_or(0, |(_, example)| example.row), subject.count);
        let scores = subject.respondent.score(
            &lessons,
            &mut |done, context| {
                // Where the model also answers, which takes much longer, its answers are counted instead.
                if !params.measures_answers() {
                    context.progress("rows", first + done as u64, Some(total), None);
                }
            },
            context,
        )?;
        for ((_, example), RowScore { nll, tokens, correct }) in group.iter_mut().zip(scores) {
            if !nll.is_finite() {
                let message = format!("the negative log-likelihood of row {} is {nll}", example.row + 1);
                return Err(StageError::new(Cause::Numeric, message).with_help(
                    "weights of the model that are not finite or too great do that: did its training diverge?",
                ));
            }
            (example.nll, example.tokens, example.correct) = (Some(nll), Some(tokens), Some(correct));
        }
        for (_, example) in group {
            self.nll += example.nll.unwrap_or(0.0);
            self.tokens += example.tokens.unwrap_or(0);
            self.correct += example.correct.unwrap_or(0);
            self.rows_without_tokens += u64::from(example.tokens == Some(0));
        }
        Ok(())
    }

    /// A row as tokens, cut where it is too long.
    fn lesson(
        &mut self,
        params: &Evaluate,
        subject: &Subject,
        row: &Row,
        example: &Example,
    ) -> Result<Encoded, StageError> {
        let max_seq_len = longest(params, subject);
        let tokenizer = &subject.respondent.tokenizer;
        let lesson = subject.renderer.lesson(row, tokenizer).and_then(|lesson| lesson.encode(tokenizer));
        let mut lesson = lesson.map_err(of_row(example.row))?;
        if lesson.input_ids.len() > max_seq_len {
            self.truncated_rows += 1;
            lesson.input_ids.truncate(max_seq_len);
            lesson.labels.truncate(max_seq_len);
        }
        subject.respondent.check_vocabulary(&lesson.input_ids, || format!("row {}", example.row + 1))?;
        Ok(lesson)
    }

    /// Warns of rows that were cut.
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
        Ok(())
    }

    /// Perplexity over all response tokens together.
    ///
    /// # Errors
    /// Fails if it is no number.
    pub(super) fn perplexity(&self) -> Result<Perplexity, StageError> {
        let mean = self.nll / self.tokens as f64;
        let value = mean.exp();
        if !value.is_finite() {
            let message = format!("the mean negative log-likelihood is {mean:.3e}: its perplexity is no number");
            let help = "is this model trained, and on this tokenizer?";
            return Err(StageError::new(Cause::Numeric, message).with_help(help));
        }
        Ok(Perplexity {
            value,
            nll: self.nll,
            tokens: self.tokens,
            truncated_rows: self.truncated_rows,
            rows_without_tokens: self.rows_without_tokens,
            ..Perplexity::default()
        })
    }

    /// Token accuracy over all response tokens together.
    pub(super) fn token_accuracy(&self) -> TokenAccuracy {
        TokenAccuracy {
            value: self.correct as f64 / self.tokens as f64,
            correct: self.correct,
            tokens: self.tokens,
            ..TokenAccuracy::default()
        }
    }
}

/// Tokens of a row that are read, at most.
fn longest(params: &Evaluate, subject: &Subject) -> usize {
    let positions = subject.respondent.max_position_embeddings();
    params.max_seq_len.unwrap_or(positions).min(positions)
}
