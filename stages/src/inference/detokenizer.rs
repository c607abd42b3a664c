//! Text from tokens as they come.

use crate::tokenizer::{Tokenizer, TokenizerError};

/// What a decoder writes where bytes do not make a character yet.
const UNFINISHED: char = '\u{FFFD}';

/// The text of tokens that come one by one. A character of several tokens comes with the last of them, and a word's space as the
/// tokenizer writes it in company, not at a text's begin.
///
/// Each step decodes the last few tokens with and without the new one, as text-generation-inference does.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    /// The tokens whose text is not settled, and those before them that it is decoded with.
    ids: Vec<u32>,
    /// How many of these have given their text.
    settled: usize,
}

impl Detokenizer {
    /// The text that a token adds; empty while it is unfinished.
    ///
    /// # Errors
    /// Fails where the tokenizer does.
    pub fn push(&mut self, token: u32, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        self.ids.push(token);
        let text = tokenizer.decode(&self.ids)?;
        if text.ends_with(UNFINISHED) {
            return Ok(String::new());
        }
        self.settle(text, tokenizer)
    }

    /// What is left when no more tokens come.
    ///
    /// # Errors
    /// Fails where the tokenizer does.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        let text = tokenizer.decode(&self.ids)?;
        self.settle(text, tokenizer)
    }

    fn settle(&mut self, text: String, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        let before = tokenizer.decode(&self.ids[..self.settled])?;
        let added = text.get(before.len()..).unwrap_or_default().to_owned();
        self.ids.drain(..self.settled);
        self.settled = self.ids.len();
        Ok(added)
    }
}
