//! A tokenizer's files with further tokens, in the form in which transformers saves those of `add_tokens`.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Tokenizer, TokenizerError, read_object};

/// Why tokens cannot be added.
#[derive(Debug, thiserror::Error)]
pub enum AddTokensError {
    /// The tokenizer cannot be read, or not with the new tokens.
    #[error("the tokenizer cannot be used")]
    Tokenizer(#[from] TokenizerError),
    /// One is there already.
    #[error("`{token}` is in the vocabulary already: its id is {id}")]
    There {
        /// The token.
        token: String,
        /// Its id.
        id: u32,
    },
    /// A file cannot be written.
    #[error("cannot write `{file}`")]
    Write {
        /// The file.
        file: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The tokenizer did not become what it should.
    #[error("`{token}` is encoded as {ids:?} and not as one token")]
    NotOne {
        /// The token.
        token: String,
        /// What it is encoded as.
        ids: Vec<u32>,
    },
}

/// A token to add.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewToken {
    /// Its text, which is found in a text as it stands, before anything is normalised.
    pub content: String,
    /// Whether it is special, as an end of turn is: left out of decoded text, and not recognised in data.
    pub special: bool,
}

/// How many ids a tokenizer has: one more than the greatest.
pub(crate) fn ids(tokenizer: &Tokenizer) -> u32 {
    tokenizer.inner.get_vocab(true).into_values().max().map_or(0, |id| id + 1)
}

/// Adds tokens to the tokenizer whose files are in a folder, under the ids after the greatest, in their order. Returns
/// the number of ids before.
///
/// # Errors
/// Fails if one is there already, or a file cannot be read or written.
pub fn add_tokens(folder: &Path, tokens: &[NewToken]) -> Result<u32, AddTokensError> {
    let tokenizer = Tokenizer::from_folder(folder)?;
    if let Some((token, id)) = tokens.iter().find_map(|token| Some((token, tokenizer.token_id(&token.content)?))) {
        return Err(AddTokensError::There { token: token.content.clone(), id });
    }
    let first = ids(&tokenizer);
    let flags = |token: &NewToken| {
        json!({"content": token.content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": token.special})
    };
    let numbered = || (first..).zip(tokens);
    change(folder, "tokenizer.json", |file| {
        let added = file.entry("added_tokens").or_insert_with(|| json!([]));
        added.as_array_mut().into_iter().for_each(|added| {
            added.extend(numbered().map(|(id, token)| {
                let mut entry = flags(token);
                entry["id"] = id.into();
                entry
            }));
        });
    })?;
    change(folder, "tokenizer_config.json", |file| {
        // Where it is not there, `tokenizer.json` alone says it.
        if let Some(Value::Object(added)) = file.get_mut("added_tokens_decoder") {
            added.extend(numbered().map(|(id, token)| (id.to_string(), flags(token))));
        }
    })?;
    change(folder, "added_tokens.json", |file| {
        file.extend(numbered().map(|(id, token)| (token.content.clone(), id.into())));
    })?;
    let extended = Tokenizer::from_folder(folder)?;
    for (id, token) in numbered() {
        let ids = extended.encode(&token.content)?;
        if ids != [id] {
            return Err(AddTokensError::NotOne { token: token.content.clone(), ids });
        }
    }
    Ok(first)
}

/// Changes a file that holds an object, if it is there.
fn change(
    folder: &Path,
    file: &'static str,
    change: impl FnOnce(&mut Map<String, Value>),
) -> Result<(), AddTokensError> {
    let path = folder.join(file);
    if !path.exists() {
        return Ok(());
    }
    let mut object = read_object(&path)?;
    change(&mut object);
    let text = format!("{:#}\n", Value::Object(object));
    std::fs::write(path, text).map_err(|source| AddTokensError::Write { file, source })
}
