//! Perplexity: the exponential of the mean negative log-likelihood per response token.

use engine::context::StageContext;
use engine::error::{Cause, StageError};
use model::batch::Batch;

use super::examples::Example;
use super::figures::Perplexity;
use super::{EvaluateParams, Subject};
use crate::tokenize::stop_if_cancelled;

/// Tokens that are scored together.
const TOKENS_PER_BATCH: usize = 2048;

/// Scores the responses of the rows, and notes each row's share with its example.
pub(super) fn measure(
    params: &EvaluateParams,
    subject: &mut Subject,
    examples: &mut [Example],
    context: &mut StageContext,
) -> Result<Perplexity, StageError> {
    let positions = subject.model.max_position_embeddings();
    let max_seq_len = params.max_seq_len.unwrap_or(positions).min(positions);
    let mut total = Perplexity::default();
    let mut batch = Batch::default();
    let mut lengths = Vec::new();
    let mut first = 0;
    for index in 0..examples.len() {
        let row = subject.rows.row(index as u64)?;
        let mut lesson = subject.renderer.lesson(&row, &subject.tokenizer)?.encode(&subject.tokenizer)?;
        if lesson.input_ids.len() > max_seq_len {
            total.truncated_rows += 1;
            lesson.input_ids.truncate(max_seq_len);
            lesson.labels.truncate(max_seq_len);
        }
        lengths.push(lesson.input_ids.len());
        batch.push_row(index as u64, &lesson.input_ids, &lesson.labels, &[lesson.input_ids.len()]);
        if batch.tokens() >= TOKENS_PER_BATCH || index + 1 == examples.len() {
            stop_if_cancelled(context)?;
            score(subject, &batch, &lengths, &mut examples[first..=index])?;
            batch = Batch::default();
            lengths.clear();
            first = index + 1;
            context.progress("rows", first as u64, Some(examples.len() as u64), Some("perplexity".to_owned()));
        }
    }
    for example in examples.iter() {
        total.nll += example.nll.unwrap_or(0.0);
        total.tokens += example.tokens.unwrap_or(0);
        total.rows_without_tokens += u64::from(example.tokens == Some(0));
    }
    if total.tokens == 0 {
        return Err(StageError::bad_data("no row has a response token that perplexity could be taken over"));
    }
    if total.truncated_rows > 0 {
        context.warn(format!("{} rows are cut to {max_seq_len} tokens for perplexity", total.truncated_rows));
    }
    total.value = (total.nll / total.tokens as f64).exp();
    if !total.value.is_finite() {
        let mean = total.nll / total.tokens as f64;
        let message = format!("the mean negative log-likelihood is {mean:.3e}: its perplexity is no number");
        return Err(StageError::new(Cause::Numeric, message).with_help("is this model trained, and on this tokenizer?"));
    }
    Ok(total)
}

/// Scores a batch that holds so many tokens of each of these examples.
fn score(subject: &mut Subject, batch: &Batch, lengths: &[usize], examples: &mut [Example]) -> Result<(), StageError> {
    let scores = if batch.tokens() == 0 { Vec::new() } else { subject.model.score(batch)? };
    let mut scores = scores.into_iter().peekable();
    let mut end = 0;
    for (example, length) in examples.iter_mut().zip(lengths) {
        end += length;
        let (mut nll, mut tokens) = (0.0, 0);
        while let Some(target) = scores.next_if(|target| target.token < end) {
            nll += f64::from(target.nll);
            tokens += 1;
        }
        if !nll.is_finite() {
            let message = format!("the negative log-likelihood of row {} is {nll}", example.row);
            return Err(StageError::new(Cause::Numeric, message));
        }
        (example.nll, example.tokens) = (Some(nll), Some(tokens));
    }
    Ok(())
}
