//! Log-likelihoods by a model: what is asked, as continuations of contexts.

use engine::error::StageError;
use model::scoring::Context;

use super::encode::Pair;
use crate::compute::inference::RowScore;

/// How likely a continuation is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Loglikelihood {
    /// Sum of its tokens' log-probabilities.
    pub sum: f64,
    /// Whether each of them is the most likely.
    pub is_greedy: bool,
}

/// Pairs scored by `score`, which sees a context once for all that follows it in a row. What is longer than
/// `max_length` loses the beginning of its context; of the continuation the last token is only predicted, so a pair may
/// have a token more.
///
/// # Errors
/// Fails where `score` does.
pub fn loglikelihoods<'p>(
    pairs: impl IntoIterator<Item = &'p Pair>,
    max_length: usize,
    score: impl FnOnce(&[Context<'p>]) -> Result<Vec<Vec<RowScore>>, StageError>,
) -> Result<Vec<Loglikelihood>, StageError> {
    let mut contexts: Vec<Context<'p>> = Vec::new();
    for Pair { context_ids, continuation_ids } in pairs {
        let cut = (context_ids.len() + continuation_ids.len()).saturating_sub(max_length + 1);
        let ids = &context_ids[cut..];
        match contexts.last_mut().filter(|last| last.ids == ids) {
            Some(last) => last.continuations.push(continuation_ids),
            None => contexts.push(Context { ids, continuations: vec![continuation_ids] }),
        }
    }
    let likelihood = |scored: RowScore| Loglikelihood { sum: -scored.nll, is_greedy: scored.correct == scored.tokens };
    Ok(score(&contexts)?.into_iter().flatten().map(likelihood).collect())
}
