//! What the model is asked for the rows of tasks, as tokens.

use std::sync::Arc;

use cache::{Digest, Hasher};
use engine::error::StageError;

use super::prepared::Prepared;
use crate::data::tokenizer::Tokenizer;
use crate::tasks::encode::{self, Pair};
use crate::tasks::file::Task;
use crate::tasks::request::Request;
use crate::tasks::{TaskError, results::Answer};

/// The tokens of a row's requests.
pub(in crate::kinds) enum Tokens {
    /// Continuations of contexts, each with the number of its request: the windows of a long text are one.
    Continuations(Vec<(usize, Pair)>),
    /// A prompt to complete, once or several times: the only request of its row.
    Prompt(Vec<u32>),
}

/// A row of a task, and what the model is asked for it.
pub(in crate::kinds) struct RowRequests {
    pub task: Arc<Task>,
    /// From 0.
    pub row: usize,
    /// How many answers there will be.
    pub answers: usize,
    pub tokens: Tokens,
    /// Digest of all that its answers depend on, beside the model and how it is computed: equal ones are answered
    /// equally, in whatever task.
    pub identity: Digest,
}

/// All rows of all tasks, one after the other.
///
/// # Errors
/// Fails with the first row that cannot be asked of a model that reads `max_length` tokens.
pub(in crate::kinds) fn rows(
    prepared: &[Prepared],
    tokenizer: &Tokenizer,
    max_length: usize,
) -> Result<Vec<RowRequests>, StageError> {
    let of_row = |task: &Arc<Task>, row: usize, requests: &[Request]| {
        let tokens = tokens(task, row, requests, tokenizer, max_length)?;
        let answers = if matches!(tokens, Tokens::Prompt(_)) { task.responses() } else { requests.len() };
        let identity = identity(task, row, answers, &tokens, max_length);
        Ok(RowRequests { task: Arc::clone(task), row, answers, tokens, identity })
    };
    let rows = prepared.iter().flat_map(|of| of.samples.iter().enumerate().map(move |sample| (&of.task, sample)));
    rows.map(|(task, (row, sample))| of_row(task, row, &sample.requests)).collect()
}

impl RowRequests {
    /// Whether these could be its answers.
    pub(super) fn fits(&self, answers: &[Answer]) -> bool {
        let is_prompt = matches!(self.tokens, Tokens::Prompt(_));
        answers.len() == self.answers && answers.iter().all(|answer| matches!(answer, Answer::Text(_)) == is_prompt)
    }
}

fn tokens(
    task: &Task,
    row: usize,
    requests: &[Request],
    tokenizer: &Tokenizer,
    max_length: usize,
) -> Result<Tokens, StageError> {
    let wrong = |key: &str, message: String| StageError::from(TaskError::in_row_of(&task.file, row, key, message));
    let nothing_before = |what: &str| {
        format!(
            "{what}: the tokenizer has neither a BOS nor an EOS token for the first \
        position"
        )
    };
    let mut pairs = Vec::new();
    for (number, request) in requests.iter().enumerate() {
        match request {
            Request::Continuation { context, continuation } => {
                let pair = encode::pair(tokenizer, context, continuation)?
                    .ok_or_else(|| wrong("doc_to_text", nothing_before("there is no context")))?;
                let tokens = pair.continuation_ids.len();
                if tokens == 0 {
                    let message = format!("`{continuation}` has no own tokens after its context");
                    return Err(wrong("doc_to_choice", message));
                }
                if tokens > max_length {
                    let message = format!("a continuation has {tokens} tokens, and the model reads {max_length}");
                    return Err(wrong("doc_to_choice", message));
                }
                pairs.push((number, pair));
            }
            Request::Rolling { text } => {
                let prefix = encode::prefix_token(tokenizer)
                    .ok_or_else(|| wrong("doc_to_target", nothing_before("a text is scored from its beginning")))?;
                let windows = encode::windows(&encode::text(tokenizer, text)?, prefix, max_length);
                pairs.extend(windows.into_iter().map(|window| (number, window)));
            }
            Request::Generation { context } => {
                let mut ids = encode::text(tokenizer, context)?;
                let most = max_length.saturating_sub(task.generation.max_new_tokens);
                if most == 0 {
                    let message =
                        format!("`max_gen_toks` leaves no room for a prompt: the model has {max_length} positions");
                    return Err(TaskError::of(&task.file, "generation_kwargs", message).into());
                }
                ids.drain(..ids.len().saturating_sub(most));
                return Ok(Tokens::Prompt(ids));
            }
        }
    }
    Ok(Tokens::Continuations(pairs))
}

fn identity(task: &Task, row: usize, answers: usize, tokens: &Tokens, max_length: usize) -> Digest {
    let mut hasher = Hasher::new();
    let count = |hasher: &mut Hasher, count: usize| {
        hasher.value(&(count as u64).to_le_bytes());
    };
    count(&mut hasher, max_length);
    count(&mut hasher, answers);
    match tokens {
        Tokens::Continuations(pairs) => {
            hasher.value(b"continuations");
            for (number, Pair { context_ids, continuation_ids }) in pairs {
                count(&mut hasher, *number);
                hasher.words(context_ids, u32::to_le_bytes).words(continuation_ids, u32::to_le_bytes);
            }
        }
        Tokens::Prompt(ids) => {
            hasher.value(b"prompt").words(ids, u32::to_le_bytes);
            count(&mut hasher, task.generation.max_new_tokens);
            for text in &task.generation.until {
                hasher.value(text.as_bytes());
            }
            if task.generation.draws() {
                // What is drawn depends on where a row stands, too.
                hasher.value(format!("{row} {:?}", task.generation.sampling).as_bytes());
            }
        }
    }
    hasher.finish()
}
