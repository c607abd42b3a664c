//! The model's own answers to the prompts of the rows.

use engine::context::StageContext;
use engine::error::StageError;
use model::generation::Request;
use serde::Serialize;

use super::examples::Example;
use super::measures::Measures;
use super::{Evaluate, Subject, of_row};
use crate::compute::inference::{Answer, BatchProgress, Ended, StreamMode};
use crate::data::artifact::Row;
use crate::data::prompt::behind_reasoning;
use crate::metrics::Observed;
use crate::metrics::exact_match::strip;

/// How many rows the model answered, for every figure about answers: part of `metrics.json`.
#[derive(Debug, Default, Serialize)]
pub(super) struct Answers {
    /// Rows answered.
    rows: u64,
    /// Rows left out: without a reference, or with a prompt that does not fit the model.
    pub skipped_rows: u64,
    /// Answers without any text.
    empty: u64,
    /// Answers that the limit ended, not the model.
    cut: u64,
}

impl Answers {
    /// Lets the model answer a group of rows, greedily, and compares.
    pub(super) fn measure(
        &mut self,
        subject: &mut Subject,
        group: &mut [(Row, Example)],
        measures: &mut Measures,
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let first = group.first().map_or(0, |(_, example)| example.row);
        let prompts: Vec<Vec<u32>> =
            group.iter_mut().map(|(row, example)| ask(subject, row, example)).collect::<Result<_, _>>()?;
        let (mut examples, mut requests) = (Vec::new(), Vec::new());
        for ((row, example), prompt) in group.iter_mut().zip(&prompts) {
            if example.reference.is_none() || subject.session.misfit(prompt).is_some() {
                self.skipped_rows += 1;
                continue;
            }
            requests.push(Request { prompt, row: example.row });
            examples.push((&*row, example));
        }
        let progress = BatchProgress { unit: "rows", done: first, total: Some(subject.count), mode: StreamMode::Count };
        let answers = subject.session.answer(&requests, progress, context)?;
        for ((row, example), answer) in examples.into_iter().zip(answers) {
            self.add(example, answer, subject.renderer.end_of_reasoning_in(row), measures);
        }
        Ok(())
    }

    /// Adds an answer; `end` is what ends the reasoning before it, which references are without.
    fn add(&mut self, example: &mut Example, answer: Answer, end: Option<&str>, measures: &mut Measures) {
        let prediction = strip(behind_reasoning(&answer.text, end)).to_owned();
        let reference = example.reference.clone().unwrap_or_default();
        self.rows += 1;
        self.empty += u64::from(prediction.is_empty());
        self.cut += u64::from(answer.ended == Ended::Length);
        measures.add(&Observed::Answer { prediction: &prediction, reference: &reference }, example);
        (example.prediction, example.ended) = (Some(prediction), Some(answer.ended));
    }

    /// Warns of rows that were left out, and of answers that came to no end.
    ///
    /// # Errors
    /// Fails if no row was answered at all.
    pub(super) fn warn(&self, params: &Evaluate, context: &mut StageContext) -> Result<(), StageError> {
        let Self { rows, skipped_rows, cut, .. } = *self;
        if rows == 0 {
            let message = "no row has both a prompt that fits the model and a reference";
            return Err(StageError::bad_data(message).with_help(
                "`pipeline show` shows the rows: is the response column the right one, and are prompts too long?",
            ));
        }
        if skipped_rows > 0 {
            let all = rows + skipped_rows;
            context.warn(format!(
                "{skipped_rows} of {all} rows have no prediction: they have no reference, or a prompt that fills the \
                 model's positions"
            ));
        }
        if cut > 0 {
            let limit = params.inference.max_new_tokens;
            context.warn(format!(
                "{cut} of {rows} completions are cut off, at `max_new_tokens: {limit}` or the model's positions"
            ));
        }
        Ok(())
    }

    /// How many completions are empty or cut off, where any are: then the figures say less than they seem to.
    pub(super) fn unfinished(&self) -> Option<String> {
        let Self { rows, empty, cut, .. } = self;
        let parts = [(empty, "empty"), (cut, "cut off by `max_new_tokens`")];
        let parts = parts.iter().filter(|(count, _)| **count > 0).map(|(count, what)| match *count == rows {
            true => format!("all {rows} completions are {what}"),
            false => format!("{count} of {rows} completions are {what}"),
        });
        let parts: Vec<String> = parts.collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }
}

/// The prompt of a row, as tokens; its text and the row's answer are noted.
fn ask(subject: &Subject, row: &Row, example: &mut Example) -> Result<Vec<u32>, StageError> {
    let tokenizer = &subject.session.tokenizer;
    let question = subject.renderer.question(row, tokenizer).map_err(of_row(example.row))?;
    example.prompt = Some(question.prompt.to_text(tokenizer).map_err(of_row(example.row))?);
    example.reference = question.reference;
    let ids = question.prompt.encode(tokenizer).map_err(of_row(example.row))?.input_ids;
    subject.session.check_vocabulary(&ids, || format!("the prompt of row {}", example.row + 1))?;
    Ok(ids)
}
