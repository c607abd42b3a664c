//! The answers of a model to the rows of tasks.

use engine::context::StageContext;
use engine::error::{Cause, StageError};
use model::generation::Request as Prompt;
use model::scoring::Context;

use super::row_requests::{RowRequests, Tokens};
use crate::compute::inference::{BatchProgress, InferenceSession, RowScore, StreamMode};
use crate::tasks::encode::Pair;
use crate::tasks::results::Answer;
use crate::tasks::score;

/// Asks the model for the answers to some rows, in their order. `max_length`: the tokens that it reads.
///
/// # Errors
/// Fails where a token is not in the model's vocabulary, a log-likelihood is no number, the device fails, or the user
/// ends it.
pub(super) fn ask(
    rows: &[&RowRequests],
    max_length: usize,
    session: &mut InferenceSession,
    context: &mut StageContext,
) -> Result<Vec<Vec<Answer>>, StageError> {
    for row in rows {
        let check = |ids: &[u32]| session.check_vocabulary(ids, || "a prompt of a task".to_owned());
        match &row.tokens {
            Tokens::Continuations(pairs) => {
                pairs.iter().try_for_each(|(_, Pair { context_ids, continuation_ids })| {
                    check(context_ids).and_then(|()| check(continuation_ids))
                })?
            }
            Tokens::Prompt(ids) => check(ids)?,
        }
    }
    let total = rows.iter().map(|row| if let Tokens::Continuations(pairs) = &row.tokens { pairs.len() } else { 0 });
    let total = total.sum::<usize>() as u64;
    let mut answers = loglikelihoods(rows, max_length, |contexts| {
        session.score_continuations(
            contexts,
            &mut |done, context| context.progress("requests", done as u64, Some(total), None),
            context,
        )
    })?;
    complete(rows, &mut answers, session, context)?;
    Ok(answers)
}

/// The log-likelihoods that answer rows, scored by `score`; rows that are to be completed have none yet.
///
/// # Errors
/// Fails where `score` does, or a log-likelihood is no number.
pub(in crate::kinds) fn loglikelihoods(
    rows: &[&RowRequests],
    max_length: usize,
    score: impl FnOnce(&[Context<'_>]) -> Result<Vec<Vec<RowScore>>, StageError>,
) -> Result<Vec<Vec<Answer>>, StageError> {
    let (mut pairs, mut places) = (Vec::new(), Vec::new());
    for (at, row) in rows.iter().enumerate() {
        let Tokens::Continuations(of_row) = &row.tokens else { continue };
        for (number, pair) in of_row {
            pairs.push(pair);
            places.push((at, *number));
        }
    }
    // A text without tokens has no windows, and is certain.
    let mut sums: Vec<Vec<(f64, bool)>> = rows.iter().map(|row| vec![(0.0, true); row.answers]).collect();
    for ((at, number), found) in places.into_iter().zip(score::loglikelihoods(pairs, max_length, score)?) {
        if found.sum.is_nan() {
            let (row, task) = (rows[at].row + 1, &rows[at].task.name);
            let message = format!("a log-likelihood of row {row} of `{task}` is no number");
            let help = "is this model trained, and on this tokenizer?";
            return Err(StageError::new(Cause::Numeric, message).with_help(help));
        }
        let (sum, is_greedy) = &mut sums[at][number];
        *sum += found.sum;
        *is_greedy &= found.is_greedy;
    }
    let answer = |(sum, is_greedy)| Answer::Loglikelihood { sum, is_greedy };
    Ok(sums.into_iter().map(|of_row| of_row.into_iter().map(answer).collect()).collect())
}

/// Lets the model complete the prompts, those of a task at once.
fn complete(
    rows: &[&RowRequests],
    answers: &mut [Vec<Answer>],
    session: &mut InferenceSession,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let mut first = 0;
    for of_task in rows.chunk_by(|one, other| one.task.name == other.task.name) {
        let prompt = |(at, row): (usize, &&RowRequests)| match &row.tokens {
            Tokens::Prompt(prompt) => Some((first + at, prompt.clone(), row.row as u64)),
            Tokens::Continuations(_) => None,
        };
        let asked: Vec<(usize, Vec<u32>, u64)> = of_task.iter().enumerate().filter_map(prompt).collect();
        first += of_task.len();
        let task = &of_task[0].task;
        let times = task.responses() as u64;
        // Each response has a number of its own, which its draws are addressed by.
        let prompts = |(_, prompt, row): &'_ (usize, Vec<u32>, u64)| {
            (0..times).map(|time| (prompt.clone(), row * times + time)).collect::<Vec<_>>()
        };
        let prompts: Vec<(Vec<u32>, u64)> = asked.iter().flat_map(prompts).collect();
        let prompts: Vec<Prompt<'_>> = prompts.iter().map(|(prompt, row)| Prompt { prompt, row: *row }).collect();
        if prompts.is_empty() {
            continue;
        }
        session.answer_task_as(task.generation.max_new_tokens, &task.generation.until, task.generation.sampling);
        let progress =
            BatchProgress { unit: "prompts", done: 0, total: Some(prompts.len() as u64), mode: StreamMode::Count };
        let mut said = session.answer(&prompts, progress, context)?.into_iter();
        for (at, ..) in &asked {
            answers[*at] = said.by_ref().take(times as usize).map(|said| Answer::Text(said.text)).collect();
        }
    }
    Ok(())
}
