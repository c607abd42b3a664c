//! ROUGE of the model's own answers against those of the rows.

use engine::context::StageContext;
use engine::error::StageError;
use model::sampling::Sampling;

use super::examples::Example;
use super::figures::Rouge;
use super::{EvaluateParams, Subject};
use crate::inference::{Limits, Request};
use crate::rouge::{Stemming, rouge};

/// Rows that are answered together.
const ROWS_PER_BATCH: usize = 8;

/// Lets the model answer each row, greedily, and compares.
pub(super) fn measure(
    params: &EvaluateParams,
    subject: &mut Subject,
    examples: &mut [Example],
    context: &mut StageContext,
) -> Result<Rouge, StageError> {
    let stemming = if params.use_stemmer { Stemming::Porter } else { Stemming::Off };
    let mut total = Rouge { use_stemmer: params.use_stemmer, ..Rouge::default() };
    let count = examples.len() as u64;
    for group in examples.chunks_mut(ROWS_PER_BATCH) {
        context.progress("rows", group[0].row, Some(count), Some("answers".to_owned()));
        let prompts: Vec<Vec<u32>> = group.iter_mut().map(|example| ask(subject, example)).collect::<Result<_, _>>()?;
        let positions = subject.model.max_position_embeddings();
        let mut answered: Vec<(&mut Example, &[u32])> = group
            .iter_mut()
            .zip(prompts.iter().map(Vec::as_slice))
            .filter(|(example, prompt)| example.reference.is_some() && (1..positions).contains(&prompt.len()))
            .collect();
        let requests: Vec<Request<'_>> =
            answered.iter().map(|(example, prompt)| Request { prompt, row: example.row }).collect();
        let limits = Limits { max_new_tokens: params.max_new_tokens, stop_token_ids: &subject.stop_token_ids };
        let completions = subject.model.complete(&requests, limits, Sampling::GREEDY, &|| context.cancelled())?;
        for ((example, _), completion) in answered.iter_mut().zip(completions) {
            let answer = subject.tokenizer.decode(&completion.ids)?.trim().to_owned();
            let score = rouge(&answer, example.reference.as_deref().unwrap_or_default(), stemming);
            total.add(&score);
            (example.prediction, example.rouge) = (Some(answer), Some(score));
        }
    }
    context.progress("rows", count, Some(count), None);
    if total.rows == 0 {
        return Err(StageError::bad_data("no row has both a prompt that fits the model and a reference answer"));
    }
    total.skipped_rows = count - total.rows;
    if total.skipped_rows > 0 {
        context.warn(format!(
            "ROUGE leaves {} of {count} rows out: they have no reference answer, or a prompt that fills the model's positions",
            total.skipped_rows
        ));
    }
    total.divide();
    Ok(total)
}

/// The prompt of an example's row, as tokens; its text and the row's answer are noted.
fn ask(subject: &mut Subject, example: &mut Example) -> Result<Vec<u32>, StageError> {
    let row = subject.rows.row(example.row)?;
    let question = subject.renderer.question(&row, &subject.tokenizer)?;
    example.prompt = Some(question.prompt.to_text(&subject.tokenizer)?);
    example.reference = question.reference;
    Ok(question.prompt.encode(&subject.tokenizer)?.input_ids)
}
