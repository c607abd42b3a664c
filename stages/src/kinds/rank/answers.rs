//! The answers of one or several `generate` stages, read side by side with the rows that were asked.

use std::collections::VecDeque;

use arrow::array::{Array, StringArray, UInt64Array};
use engine::context::{Artifact, StageContext};
use engine::error::StageError;

use super::Rank;
use crate::compute::inference::Ended;
use crate::data::prompt::behind_reasoning;
use crate::data::results::TableReader;
use crate::kinds::generate::{TABLE, samples};

/// An answer to a prompt.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answer {
    pub text: String,
    /// What is compared with the reference: the text without the reasoning before the answer.
    pub compared: String,
    /// The response that the row has.
    pub reference: Option<String>,
    /// Whether it came to no end.
    pub is_cut: bool,
}

/// The answers of all stages, prompt by prompt.
pub(super) struct Answers(Vec<Source>);

/// Those of a stage.
struct Source {
    stage: String,
    table: TableReader,
    end_of_reasoning: Option<String>,
    waiting: VecDeque<(u64, Option<Answer>)>,
}

impl Answers {
    /// Opens the samples.
    ///
    /// # Errors
    /// Fails where they are answers to other rows than these.
    pub(super) fn open(params: &Rank, prompts: &Artifact, context: &mut StageContext) -> Result<Self, StageError> {
        let mut sources = Vec::new();
        for input in &params.samples.0 {
            let stage = input.reference.stage.clone();
            let artifact = context.open(input)?;
            let asked = artifact.description.facts.get(samples::PROMPTS).and_then(|identity| identity.as_str());
            if asked != Some(prompts.description.identity.to_string().as_str()) {
                let of = &params.prompts.reference.stage;
                let message = format!("`{stage}` has completions of other prompts than those of `{of}`");
                return Err(StageError::bad_data(message)
                    .with_help(format!("generate with `prompts: {of}`, not with a list of strings")));
            }
            let columns = ["row", "completion", "reference", "stop"];
            let table = TableReader::open(&artifact.folder.join(TABLE), &columns)?;
            let end = artifact.description.facts.get(samples::END_OF_REASONING).and_then(|end| end.as_str());
            let end_of_reasoning = end.map(str::to_owned);
            sources.push(Source { stage, table, end_of_reasoning, waiting: VecDeque::new() });
        }
        Ok(Self(sources))
    }

    /// The answers to the next prompt, each with the number of its stage. Prompts come in their order.
    ///
    /// # Errors
    /// Fails where a table is damaged.
    pub(super) fn of_prompt(&mut self, row: u64) -> Result<Vec<(usize, Option<Answer>)>, StageError> {
        let mut answers = Vec::new();
        for (number, source) in self.0.iter_mut().enumerate() {
            while source.has_next()? && source.waiting[0].0 == row {
                answers.extend(source.waiting.pop_front().map(|(_, answer)| (number, answer)));
            }
        }
        Ok(answers)
    }

    /// Checks that there are no others.
    ///
    /// # Errors
    /// Fails where there are.
    pub(super) fn finish(mut self) -> Result<(), StageError> {
        for source in &mut self.0 {
            if source.has_next()? {
                return Err(StageError::bad_data(format!("the completions of `{}` are not in order", source.stage)));
            }
        }
        Ok(())
    }
}

impl Source {
    /// Whether there is another, read if need be.
    fn has_next(&mut self) -> Result<bool, StageError> {
        if self.waiting.is_empty()
            && let Some(batch) = self.table.next_batch()?
        {
            let rows: &UInt64Array = self.table.column(&batch, "row")?;
            let [texts, references, stops] =
                ["completion", "reference", "stop"].map(|name| self.table.column::<StringArray>(&batch, name));
            let (texts, references, stops) = (texts?, references?, stops?);
            let text = |column: &StringArray, at: usize| column.is_valid(at).then(|| column.value(at).to_owned());
            let answer = |at: usize| {
                let is_cut = text(stops, at).as_deref() == Some(Ended::Length.name());
                let text_of = text(texts, at)?;
                let compared = behind_reasoning(&text_of, self.end_of_reasoning.as_deref()).trim().to_owned();
                Some(Answer { text: text_of, compared, reference: text(references, at), is_cut })
            };
            self.waiting.extend((0..batch.num_rows()).map(|at| (rows.value(at), answer(at))));
        }
        Ok(!self.waiting.is_empty())
    }
}
