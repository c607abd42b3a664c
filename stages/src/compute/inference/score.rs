//! Rows and continuations scored by a model in this process, some of them at a time.

use engine::context::StageContext;
use engine::error::StageError;
use model::batch::{Batch, IGNORE_INDEX};
use model::ops::TokenScore;
use model::scoring::{Context, common_tokens};

use super::RowScore;
use super::native::Evaluator;
use super::pieces::Pieces;
use crate::data::prompt::Encoded;

/// Tokens that are scored together.
const TOKENS_PER_BATCH: usize = 2048;

/// What contexts share is worth keeping apart from what others share, from so many tokens on.
const SHARED_TOKENS: usize = 64;

/// Scores rows, each a document of its own; `told` hears how many are done.
pub(super) fn rows(
    model: &mut dyn Evaluator,
    rows: &[Encoded],
    told: &mut dyn FnMut(usize, &mut StageContext),
    pieces: &mut Pieces,
    context: &mut StageContext,
) -> Result<Vec<RowScore>, StageError> {
    let mut scores: Vec<Option<RowScore>> = rows.iter().map(|row| pieces.score_of(row)).collect();
    let missing: Vec<usize> = (0..rows.len()).filter(|row| scores[*row].is_none()).collect();
    let mut done = rows.len() - missing.len();
    let (mut batch, mut of_batch) = (Batch::default(), Vec::new());
    for (number, row) in missing.iter().enumerate() {
        let encoded = &rows[*row];
        batch.push_row(*row as u64, &encoded.input_ids, &encoded.labels, &[encoded.input_ids.len()]);
        of_batch.push(*row);
        if batch.tokens() >= TOKENS_PER_BATCH || number + 1 == missing.len() {
            context.stop_if_cancelled()?;
            let found = of_rows(model, &batch, of_batch.iter().map(|row| &rows[*row]))?;
            done += found.len();
            for (row, score) in of_batch.drain(..).zip(found) {
                pieces.add_score(&rows[row], score);
                scores[row] = Some(score);
            }
            batch = Batch::default();
            told(done, context);
        }
    }
    Ok(scores.into_iter().map(|score| score.expect("each row is scored")).collect())
}

/// Scores a batch that holds these rows.
fn of_rows<'a>(
    model: &mut dyn Evaluator,
    batch: &Batch,
    rows: impl Iterator<Item = &'a Encoded>,
) -> Result<Vec<RowScore>, StageError> {
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
    Ok(rows.map(of_row).collect())
}

/// The scores of the tokens of continuations of contexts: `[context][continuation][token]`.
pub type ContinuationScores = Vec<Vec<Vec<TokenScore>>>;

/// Scores the continuations of each context by `score`, which is handed some contexts at a time, those that begin alike
/// together; `told` hears how many are done.
///
/// # Errors
/// Fails where `score` does, or the user ends it.
pub fn continuations(
    score: &mut dyn FnMut(&[Context<'_>]) -> Result<ContinuationScores, StageError>,
    contexts: &[Context<'_>],
    told: &mut dyn FnMut(usize, &mut StageContext),
    context: &mut StageContext,
) -> Result<Vec<Vec<RowScore>>, StageError> {
    // What begins alike stands together.
    let mut order: Vec<usize> = (0..contexts.len()).collect();
    order.sort_by(|one, other| contexts[*one].ids.cmp(contexts[*other].ids));
    let mut scores = vec![Vec::new(); contexts.len()];
    let (mut rest, mut done) = (order.as_slice(), 0);
    while !rest.is_empty() {
        context.stop_if_cancelled()?;
        let (now, later) = rest.split_at(fitting(contexts, rest));
        let together: Vec<Context<'_>> = now.iter().map(|at| contexts[*at].clone()).collect();
        for (at, found) in now.iter().zip(score(&together)?) {
            done += found.len();
            scores[*at] = found.iter().map(|tokens| of_tokens(tokens)).collect();
        }
        told(done, context);
        rest = later;
    }
    Ok(scores)
}

/// How many of these contexts are scored together: as many as there is room for, and no others than those that share
/// a long beginning, where the first ones do.
fn fitting(contexts: &[Context<'_>], order: &[usize]) -> usize {
    let of = |at: usize| &contexts[order[at]];
    let (mut tokens, mut shared) = (of(0).positions(), usize::MAX);
    for at in 1..order.len() {
        let common = common_tokens(of(0).ids, of(at).ids).min(shared);
        tokens += of(at).positions();
        let is_apart = (SHARED_TOKENS..usize::MAX).contains(&shared) && common < shared / 2;
        if tokens > TOKENS_PER_BATCH || is_apart {
            return at;
        }
        shared = common;
    }
    order.len()
}

/// What the tokens of a continuation score together.
pub(super) fn of_tokens(scores: &[TokenScore]) -> RowScore {
    RowScore {
        nll: scores.iter().map(|score| f64::from(score.nll)).sum(),
        tokens: scores.len() as u64,
        correct: scores.iter().filter(|score| score.correct).count() as u64,
    }
}

/// A context and one of its continuations as a row, whose labels are the continuation.
pub(super) fn row(context: &[u32], continuation: &[u32]) -> Encoded {
    let mut labels = vec![IGNORE_INDEX; context.len()];
    labels.extend(continuation.iter().map(|id| *id as i32));
    Encoded { input_ids: [context, continuation].concat(), labels, weights: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_shares_a_long_beginning_is_scored_apart_from_what_does_not() {
        let shots = |subject: u32| vec![subject; 100];
        let asked: Vec<Vec<u32>> =
            [1, 1, 1, 2, 2].into_iter().zip(10..).map(|(of, end)| [shots(of), vec![end]].concat()).collect();
        let answer = [3];
        let contexts: Vec<Context<'_>> =
            asked.iter().map(|ids| Context { ids, continuations: vec![&answer] }).collect();
        assert_eq!(fitting(&contexts, &[0, 1, 2, 3, 4]), 3);
        assert_eq!(fitting(&contexts, &[3, 4]), 2);
        let many: Vec<usize> = (0..60).map(|at| at % 3).collect();
        assert_eq!(fitting(&contexts, &many), TOKENS_PER_BATCH / 101);
        // The first is scored alone where there is no room for more.
        let long = vec![7; 3000];
        let contexts = vec![Context { ids: &long, continuations: vec![&answer] }; 2];
        assert_eq!(fitting(&contexts, &[0, 1]), 1);
    }
}
