//! Contexts and continuations as tokens, and the windows of a long text.

use crate::data::prompt::python::is_space;
use crate::data::tokenizer::{Tokenizer, TokenizerError};

/// A context and a continuation as tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    pub context_ids: Vec<u32>,
    pub continuation_ids: Vec<u32>,
}

/// The token before a text that has no context: the beginning of text, else its end.
pub fn prefix_token(tokenizer: &Tokenizer) -> Option<u32> {
    tokenizer.bos_token_id().or_else(|| tokenizer.eos_token_id())
}

/// A text with the special tokens that the tokenizer adds; none if it begins with the beginning of text.
///
/// # Errors
/// Fails where the vocabulary has no way to write it.
pub fn text(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, TokenizerError> {
    let tokens = tokenizer.special_tokens();
    let has_bos = tokens.get("bos_token").is_some_and(|bos| !bos.is_empty() && text.starts_with(bos.as_str()));
    if has_bos { tokenizer.encode(text) } else { tokenizer.encode_with_added(text) }
}

/// A context and its continuation. White space at the end of the context belongs to the continuation; both are encoded
/// together and parted by the number of the context's own tokens. `None` where there is no context, and no token to
/// stand for it.
///
/// # Errors
/// As for [`text`].
pub fn pair(tokenizer: &Tokenizer, context: &str, continuation: &str) -> Result<Option<Pair>, TokenizerError> {
    if context.is_empty() {
        let Some(prefix) = prefix_token(tokenizer) else { return Ok(None) };
        let mut continuation_ids = tokenizer.encode(continuation)?;
        if continuation_ids.first() == Some(&prefix) {
            continuation_ids.remove(0);
        }
        return Ok(Some(Pair { context_ids: vec![prefix], continuation_ids }));
    }
    let kept = context.trim_end_matches(is_space);
    let whole = text(tokenizer, &format!("{context}{continuation}"))?;
    let context_ids = text(tokenizer, kept)?;
    let continuation_ids = whole.get(context_ids.len()..).unwrap_or_default().to_vec();
    Ok(Some(Pair { context_ids, continuation_ids }))
}

/// The windows in which a text is scored: each token once, with a context of a token at least; an input has at most
/// `max_length` tokens.
pub fn windows(ids: &[u32], prefix: u32, max_length: usize) -> Vec<Pair> {
    let first = max_length.min(ids.len());
    let mut windows = Vec::new();
    if first > 0 {
        windows.push(Pair { context_ids: vec![prefix], continuation_ids: ids[..first].to_vec() });
    }
    let mut predicted = first;
    while predicted < ids.len() {
        let end = (predicted + max_length).min(ids.len());
        windows.push(Pair {
            context_ids: ids[end - max_length - 1..predicted].to_vec(),
            continuation_ids: ids[predicted..end].to_vec(),
        });
        predicted = end;
    }
    windows
}
