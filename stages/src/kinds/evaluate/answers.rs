//! The model's own answers against those of the rows: ROUGE, BLEU and exact match.

use engine::context::StageContext;
use engine::error::StageError;
use model::generation::Request;

use super::exact_match::{Normalization, strip};
use super::examples::Example;
use super::figures::{AnswerCounts, Bleu, ExactMatch, Rouge};
use super::{Evaluate, Metric, Subject, of_row};
use crate::compute::inference::{Aloud, Answer, Ended, Standing};
use crate::data::artifact::Row;
use crate::metrics::bleu;
use crate::metrics::rouge::{Stemming, rouge};

/// What was found so far.
#[derive(Debug, Default)]
pub(super) struct Answers {
    counts: AnswerCounts,
    rouge: Rouge,
    bleu: bleu::Counts,
    matches: u64,
}

impl Answers {
    /// Lets the model answer a group of rows, greedily, and compares.
    pub(super) fn measure(
        &mut self,
        params: &Evaluate,
        subject: &mut Subject,
        group: &mut [(Row, Example)],
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let first = group.first().map_or(0, |(_, example)| example.row);
        let prompts: Vec<Vec<u32>> =
            group.iter_mut().map(|(row, example)| ask(subject, row, example)).collect::<Result<_, _>>()?;
        let (mut examples, mut requests) = (Vec::new(), Vec::new());
        for ((_, example), prompt) in group.iter_mut().zip(&prompts) {
            if example.reference.is_none() || subject.respondent.misfit(prompt).is_some() {
                self.counts.skipped_rows += 1;
                continue;
            }
            requests.push(Request { prompt, row: example.row });
            examples.push(example);
        }
        let standing = Standing { unit: "rows", done: first, total: Some(subject.count), aloud: Aloud::Count };
        let answers = subject.respondent.answer(&requests, standing, context)?;
        for (example, answer) in examples.into_iter().zip(answers) {
            self.compare(params, example, answer);
        }
        Ok(())
    }

    fn compare(&mut self, params: &Evaluate, example: &mut Example, answer: Answer) {
        let text = strip(&answer.text).to_owned();
        let reference = example.reference.as_deref().unwrap_or_default();
        self.counts.rows += 1;
        self.counts.empty += u64::from(text.is_empty());
        self.counts.cut += u64::from(answer.ended == Ended::Length);
        if params.measures(Metric::Rouge) {
            let stemming = if params.use_stemmer { Stemming::Porter } else { Stemming::Off };
            let score = rouge(&text, reference, stemming);
            self.rouge.add(&score);
            example.rouge = Some(score);
        }
        if params.measures(Metric::Bleu) {
            let counts = bleu::Counts::of(&text, reference);
            self.bleu += counts;
            example.bleu = Some(counts.sentence().score);
        }
        if params.measures(Metric::ExactMatch) {
            let equal = params.normalization.equal(&text, reference);
            self.matches += u64::from(equal);
            example.exact_match = Some(equal);
        }
        (example.prediction, example.ended) = (Some(text), Some(answer.ended));
    }

    /// Warns of rows that were left out, and of answers that came to no end.
    ///
    /// # Errors
    /// Fails if no row was answered at all.
    pub(super) fn warn(&self, params: &Evaluate, context: &mut StageContext) -> Result<(), StageError> {
        let AnswerCounts { rows, skipped_rows, cut, .. } = self.counts;
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

    pub(super) fn counts(&self) -> AnswerCounts {
        self.counts.clone()
    }

    pub(super) fn rouge(&self, use_stemmer: bool) -> Rouge {
        let mut rouge = Rouge { use_stemmer, skipped_rows: self.counts.skipped_rows, ..self.rouge.clone() };
        rouge.divide();
        rouge
    }

    pub(super) fn bleu(&self) -> Bleu {
        let bleu::Bleu { score, precisions, brevity_penalty } = self.bleu.corpus();
        let bleu::Counts { hypothesis_length, reference_length, .. } = self.bleu;
        let rows = self.counts.rows;
        Bleu { score, precisions, brevity_penalty, hypothesis_length, reference_length, rows, ..Bleu::default() }
    }

    pub(super) fn exact_match(&self, normalization: Normalization) -> ExactMatch {
        let rows = self.counts.rows;
        ExactMatch::new(self.matches, rows, normalization)
    }
}

/// The prompt of a row, as tokens; its text and the row's answer are noted.
fn ask(subject: &Subject, row: &Row, example: &mut Example) -> Result<Vec<u32>, StageError> {
    let tokenizer = &subject.respondent.tokenizer;
    let question = subject.renderer.question(row, tokenizer).map_err(of_row(example.row))?;
    example.prompt = Some(question.prompt.to_text(tokenizer).map_err(of_row(example.row))?);
    example.reference = question.reference;
    let ids = question.prompt.encode(tokenizer).map_err(of_row(example.row))?.input_ids;
    subject.respondent.check_vocabulary(&ids, || format!("the prompt of row {}", example.row + 1))?;
    Ok(ids)
}
