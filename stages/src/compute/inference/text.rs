//! The text of a completion while its tokens come, up to a stop string.

use super::{Detokenizer, StopStrings};
use crate::data::tokenizer::{Tokenizer, TokenizerError};

/// The text of a completion so far. Every call is given the same tokenizer and the same stop strings.
#[derive(Debug, Clone, Default)]
pub struct CompletionText {
    detokenizer: Detokenizer,
    text: String,
    /// Bytes of the text that have been taken.
    taken: usize,
    /// Where the stop string begins that ended it.
    stopped_at: Option<usize>,
}

impl CompletionText {
    /// For a completion that goes on with the text of its prompt.
    pub fn behind(prompt: &[u32]) -> Self {
        Self { detokenizer: Detokenizer::behind(prompt), ..Self::default() }
    }

    /// Adds a token.
    ///
    /// # Errors
    /// Fails where the tokenizer does.
    pub fn push(&mut self, token: u32, tokenizer: &Tokenizer, stops: &StopStrings) -> Result<(), TokenizerError> {
        let added = self.detokenizer.push(token, tokenizer)?;
        self.add(&added, stops);
        Ok(())
    }

    /// Adds what is left when no more tokens come.
    ///
    /// # Errors
    /// Fails where the tokenizer does.
    pub fn finish(&mut self, tokenizer: &Tokenizer, stops: &StopStrings) -> Result<(), TokenizerError> {
        if self.stopped_at.is_none() {
            let added = self.detokenizer.finish(tokenizer)?;
            self.add(&added, stops);
        }
        Ok(())
    }

    fn add(&mut self, added: &str, stops: &StopStrings) {
        let before = self.text.len();
        self.text.push_str(added);
        self.stopped_at = stops.find(&self.text, before);
    }

    /// The text before the stop string that ended it, if one did.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped_at.map(|end| &self.text[..end])
    }

    /// All of it, up to the stop string that ended it.
    pub fn whole(&self) -> &str {
        self.stopped().unwrap_or(&self.text)
    }

    /// What was not taken before and cannot become part of a stop string any more.
    pub fn take_settled(&mut self, stops: &StopStrings) -> &str {
        self.take(self.stopped_at.unwrap_or(self.text.len() - stops.pending(&self.text)))
    }

    /// What was not taken before, where no more tokens come.
    pub fn take_rest(&mut self) -> &str {
        self.take(self.stopped_at.unwrap_or(self.text.len()))
    }

    fn take(&mut self, end: usize) -> &str {
        let begin = self.taken;
        self.taken = end.max(begin);
        &self.text[begin..self.taken]
    }
}
