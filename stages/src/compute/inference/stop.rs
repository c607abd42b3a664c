//! What ends an answer: tokens, and texts.

use std::path::Path;

use engine::error::{Cause, OrFail, StageError};
use engine::file::tree::{Node, Value as NodeValue};
use engine::parameter::{Json, KeyWriter, Parameter, Reader};
use serde_json::{Value, json};

use super::InferenceParams;
use crate::data::tokenizer::Tokenizer;

/// A token that ends an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopToken {
    Id(u32),
    Text(String),
}

impl Parameter for StopToken {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match &node.value {
            NodeValue::String(text) => Some(Self::Text(text.clone())),
            NodeValue::Integer(_) => u32::read(node, reader).map(Self::Id),
            _ => {
                reader.wrong_type(node, "a token's id or its text");
                None
            }
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        match self {
            Self::Id(id) => id.write_key(key),
            Self::Text(text) => text.write_key(key),
        }
    }

    fn schema() -> Json {
        json!({ "anyOf": [u32::schema(), String::schema()] })
    }
}

/// The ids that end an answer: those that the model and its tokenizer name, and those of the parameters. A stop string
/// that is the text of a special token, which no decoded text holds, is one of them.
///
/// # Errors
/// Fails if one of the files is no JSON, or the vocabulary has no such token.
pub(super) fn token_ids(params: &InferenceParams, model: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>, StageError> {
    let mut ids = token_ids_of_model(model, tokenizer)?;
    ids.extend(of_parameters(params, model, tokenizer)?);
    ids.extend(special(&params.stop_strings, tokenizer));
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// The ids that end an answer to a task, beside the texts that it names: as for the harness the end of text alone, and
/// those of the parameters. A chat's end of a turn is none unless the model's configuration says so.
///
/// # Errors
/// As for [`token_ids`].
pub(super) fn token_ids_of_tasks(
    params: &InferenceParams,
    model: &Path,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, StageError> {
    let mut ids: Vec<u32> = tokenizer.eos_token_id().into_iter().collect();
    ids.extend(configured(model)?);
    ids.extend(of_parameters(params, model, tokenizer)?);
    Ok(ids)
}

/// Of some texts those that are special tokens, which no decoded text holds.
pub(super) fn special(texts: &[String], tokenizer: &Tokenizer) -> impl Iterator<Item = u32> {
    let ids = texts.iter().filter_map(|text| tokenizer.token_id(text));
    ids.filter(|id| tokenizer.is_special(*id)).collect::<Vec<_>>().into_iter()
}

/// The penalty for tokens seen before that a model's `generation_config.json` sets.
///
/// # Errors
/// Fails if the file is no JSON.
pub(super) fn repetition_penalty(model: &Path) -> Result<Option<f64>, StageError> {
    let config = read_config(model, "generation_config.json")?;
    Ok(config
        .and_then(|config| config["repetition_penalty"].as_f64())
        .filter(|penalty| *penalty > 0.0 && *penalty != 1.0))
}

/// The ids of `stop_tokens`.
fn of_parameters(params: &InferenceParams, model: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>, StageError> {
    let mut ids = Vec::new();
    let vocab_size = read_config(model, "config.json")?.and_then(|config| config["vocab_size"].as_u64());
    for token in &params.stop_tokens {
        ids.push(match token {
            StopToken::Id(id) => match vocab_size.filter(|size| u64::from(*id) >= *size) {
                Some(size) => {
                    let message = format!("`stop_tokens` has {id}, and the model has {size} ids");
                    return Err(StageError::new(Cause::BadParameters, message).with_help(
                        "such a token is never generated: give an id of the vocabulary, or a token's text",
                    ));
                }
                None => *id,
            },
            StopToken::Text(text) => tokenizer.token_id(text).ok_or_else(|| {
                let message = format!("`stop_tokens` has `{text}`, which is not a token of this tokenizer");
                StageError::new(Cause::BadParameters, message)
                    .with_help("put a string of several tokens into `stop_strings`")
            })?,
        });
    }
    Ok(ids)
}

/// The ids that a model's `generation_config.json` and `config.json` and its tokenizer say end an answer, ascending.
///
/// # Errors
/// Fails if one of the files is no JSON.
pub fn token_ids_of_model(model: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>, StageError> {
    let mut ids = tokenizer.stop_token_ids();
    ids.extend(configured(model)?);
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// The ids that the files of a model name.
fn configured(model: &Path) -> Result<Vec<u32>, StageError> {
    let mut ids = Vec::new();
    for name in ["generation_config.json", "config.json"] {
        match read_config(model, name)?.and_then(|config| config.get("eos_token_id").cloned()) {
            Some(Value::Array(several)) => ids.extend(several.iter().filter_map(as_id)),
            Some(one) => ids.extend(as_id(&one)),
            None => {}
        }
    }
    Ok(ids)
}

/// A file of a model, if it is there.
fn read_config(model: &Path, name: &str) -> Result<Option<Value>, StageError> {
    let path = model.join(name);
    let text = match std::fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.or_fail(Cause::Machine, || format!("cannot read `{}`", path.display()))?,
    };
    serde_json::from_slice(&text).map(Some).or_fail(Cause::BadData, || format!("the model's `{name}` is not JSON"))
}

fn as_id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// Texts that end an answer.
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    texts: Vec<String>,
    longest: usize,
}

impl StopStrings {
    /// These texts, none of them empty.
    pub fn new(texts: &[String]) -> Self {
        let texts: Vec<String> = texts.iter().filter(|text| !text.is_empty()).cloned().collect();
        let longest = texts.iter().map(String::len).max().unwrap_or(0);
        Self { texts, longest }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Where in a text the first of them begins, of which none was there when it had only `before` bytes.
    pub fn find(&self, text: &str, before: usize) -> Option<usize> {
        let mut from = before.saturating_sub(self.longest.saturating_sub(1)).min(text.len());
        while !text.is_char_boundary(from) {
            from -= 1;
        }
        self.texts.iter().filter_map(|stop| text[from..].find(stop.as_str())).min().map(|at| from + at)
    }

    /// How many bytes at a text's end may be the beginning of one of them.
    pub fn pending(&self, text: &str) -> usize {
        let from = text.len().saturating_sub(self.longest.saturating_sub(1));
        let begins =
            |at: &usize| text.is_char_boundary(*at) && self.texts.iter().any(|stop| stop.starts_with(&text[*at..]));
        (from..text.len()).find(begins).map_or(0, |at| text.len() - at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops(texts: &[&str]) -> StopStrings {
        StopStrings::new(&texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn the_first_of_several_is_found_wherever_the_text_grew() {
        let stops = stops(&["\n\n", "stop", "是"]);
        assert_eq!(stops.find("a stopper\n\n", 4), Some(2));
        assert_eq!(stops.find("a st", 3), None);
        assert_eq!(stops.find("你是谁", 3), Some(3));
        assert_eq!(stops.find("no", 0), None);
        // A match that began before what was there can end in what came.
        let grown = "xyz\n\nstop";
        assert_eq!((1..=4).map(|before| stops.find(grown, before)).collect::<Vec<_>>(), [Some(3); 4]);
    }

    #[test]
    fn what_may_become_a_stop_is_held_back() {
        let stops = stops(&["\n\nUser:", "谁谁"]);
        for (text, pending) in
            [("a", 0), ("a\n", 1), ("a\n\n", 2), ("a\n\nUs", 4), ("a\n\nAs", 0), ("你是谁", 3), ("", 0)]
        {
            assert_eq!(stops.pending(text), pending, "{text:?}");
        }
        assert_eq!(StopStrings::default().pending("anything"), 0);
    }
}
