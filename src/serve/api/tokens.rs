//! `POST /tokenize` and `POST /detokenize`.

use serde_json::{Value, json};

use super::error::ApiError;
use super::fields::Fields;
use crate::inference::Vocabulary;

/// The ids of a text, special tokens in it recognised, and none added.
pub(super) fn tokenize(body: &[u8], vocabulary: &Vocabulary) -> Result<Value, ApiError> {
    let mut fields = Fields::of(body)?;
    // The tokenizer is that of all models here.
    fields.string("model")?;
    let text = fields.string("content")?.ok_or_else(|| ApiError::field("content", "`content` is missing"))?;
    fields.finish()?;
    let ids = vocabulary.tokenizer.encode(&text);
    let ids =
        ids.map_err(|error| ApiError::unprocessable("content", format!("the text cannot be encoded: {error}")))?;
    Ok(json!({ "tokens": ids }))
}

/// The text of ids, special tokens written out.
pub(super) fn detokenize(body: &[u8], vocabulary: &Vocabulary) -> Result<Value, ApiError> {
    let mut fields = Fields::of(body)?;
    fields.string("model")?;
    let tokens = fields.take("tokens").ok_or_else(|| ApiError::field("tokens", "`tokens` is missing"))?;
    fields.finish()?;
    let wrong = || ApiError::field("tokens", "`tokens` is not a list of ids of the vocabulary");
    let ids: Option<Vec<u32>> = tokens.as_array().and_then(|tokens| {
        let id = |token: &Value| token.as_u64().filter(|id| *id < vocabulary.vocab_size as u64).map(|id| id as u32);
        tokens.iter().map(id).collect()
    });
    let text = vocabulary.tokenizer.decode_with_special(&ids.ok_or_else(wrong)?);
    let text = text.map_err(|error| ApiError::unprocessable("tokens", format!("they cannot be decoded: {error}")))?;
    Ok(json!({ "content": text }))
}
