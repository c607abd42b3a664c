//! Rows scored by a model in this process, some of them at a time.

use engine::context::StageContext;
use engine::error::StageError;
use model::batch::Batch;

use super::{Inference, RowScore};
use crate::data::prompt::Encoded;

/// Tokens that are scored together.
const TOKENS_PER_BATCH: usize = 2048;

/// Scores rows, each a document of its own; `told` hears how many are done.
pub(super) fn rows(
    model: &mut dyn Inference,
    rows: &[Encoded],
    told: &mut dyn FnMut(usize, &mut StageContext),
    context: &mut StageContext,
) -> Result<Vec<RowScore>, StageError> {
    let mut scores = Vec::with_capacity(rows.len());
    let mut batch = Batch::default();
    for (index, row) in rows.iter().enumerate() {
        batch.push_row(index as u64, &row.input_ids, &row.labels, &[row.input_ids.len()]);
        if batch.tokens() >= TOKENS_PER_BATCH || index + 1 == rows.len() {
            context.stop_if_cancelled()?;
            let of_batch = &rows[scores.len()..=index];
            scores.extend(of_rows(model, &batch, of_batch)?);
            batch = Batch::default();
            told(scores.len(), context);
        }
    }
    Ok(scores)
}

/// Scores a batch that holds these rows.
fn of_rows(model: &mut dyn Inference, batch: &Batch, rows: &[Encoded]) -> Result<Vec<RowScore>, StageError> {
    let scores = if batch.tokens() == 0 { Vec::new() } else { model.score(batch)? };
    let mut scores = scores.into_iter().peekable();
    let mut end = 0;
    let of_row = |row: &Encoded| {
        end += row.input_ids.len();
        let mut found = RowScore { nll: 0.0, tokens: 0, correct: 0 };
        while let Some(target) = scores.next_if(|target| target.token < end) {
            found.nll += f64::from(target.nll);
            found.tokens += 1;
            found.correct += u64::from(target.correct);
        }
        found
    };
    Ok(rows.iter().map(of_row).collect())
}
