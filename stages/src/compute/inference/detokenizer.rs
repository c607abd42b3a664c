//! Text from tokens as they come.

use crate::data::tokenizer::{Tokenizer, TokenizerError};

/// What a decoder writes where bytes do not make a character yet.
const UNFINISHED: char = '\u{FFFD}';

/// The text of tokens that come one by one. A character of several tokens comes with the last of them, and a word's
/// space as the tokenizer writes it in company, not at a text's begin.
///
/// Each step decodes the last few tokens with and without the new one, as text-generation-inference does.
#[derive(Debug, Clone, Default)]
pub struct Detokenizer {
    /// The tokens whose text is not settled, and those before them that it is decoded with.
    ids: Vec<u32>,
    /// How many of these have given their text.
    settled: usize,
    /// Whether special tokens are written out.
    with_special: bool,
}

/// Tokens of a prompt that decide how what follows is written: a character has four bytes at most.
const CONTEXT: usize = 8;

impl Detokenizer {
    /// For tokens behind a prompt, which go on with its text: where a word follows, its space is written.
    pub fn behind(prompt: &[u32]) -> Self {
        let ids = prompt[prompt.len().saturating_sub(CONTEXT)..].to_vec();
        Self { settled: ids.len(), ids, with_special: false }
    }

    /// One that writes special tokens out.
    pub fn with_special() -> Self {
        Self { with_special: true, ..Self::default() }
    }

    fn decode(&self, ids: &[u32], tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        if self.with_special { tokenizer.decode_with_special(ids) } else { tokenizer.decode(ids) }
    }

    /// The text that a token adds; empty while it is unfinished.
    ///
    /// # Errors
    /// Fails where the tokenizer does.
    pub fn push(&mut self, token: u32, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        // One that is left out is no context: behind it alone a word would be at a text's begin, and lose its space.
        if !self.with_special && tokenizer.is_special(token) {
            return Ok(String::new());
        }
        self.ids.push(token);
        let text = self.decode(&self.ids, tokenizer)?;
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
        let text = self.decode(&self.ids, tokenizer)?;
        self.settle(text, tokenizer)
    }

    fn settle(&mut self, text: String, tokenizer: &Tokenizer) -> Result<String, TokenizerError> {
        let (context, fresh) = self.ids.split_at(self.settled);
        let added = match text.strip_prefix(self.decode(context, tokenizer)?.as_str()) {
            Some(added) => added.to_owned(),
            // Tokens that are bytes are decoded as far as they follow each other: one that makes no character takes
            // those before it along, which were characters without it.
            None => tokenizer.decode_inside(fresh)?,
        };
        self.ids.drain(..self.settled);
        self.settled = self.ids.len();
        Ok(added)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::Value;

    use super::*;

    /// The golden vocabulary of pieces, whose bytes are tokens for what no other token writes, as Llama 2 has them.
    fn with_bytes() -> Tokenizer {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers/metaspace/tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(Path::new(golden)).unwrap()).unwrap();
        json["added_tokens"].as_array_mut().unwrap().truncate(3);
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::from_folder(folder.path()).unwrap()
    }

    /// The text of tokens, one after the other.
    fn grown(tokens: &[&str], tokenizer: &Tokenizer) -> String {
        let mut detokenizer = Detokenizer::default();
        let mut text = String::new();
        for token in tokens {
            text += &detokenizer.push(tokenizer.token_id(token).unwrap(), tokenizer).unwrap();
        }
        text + &detokenizer.finish(tokenizer).unwrap()
    }

    #[test]
    fn what_comes_behind_bytes_that_are_no_character_is_not_lost() {
        let tokenizer = with_bytes();
        for (tokens, text) in [
            (&["▁o", "r", "<0x3C>", "<0xFF>", "a", "n", "y"][..], "or<\u{fffd}any"),
            (
                &["a", "<0x3C>", "<0xFF>", "<0xFE>", "▁o", "r", "<0x3C>", "<0xC3>", "a"],
                "a<\u{fffd}\u{fffd} or<\u{fffd}a",
            ),
            (&["<0xFF>", "a", "<0xFF>", "<0x3C>", "n", "<0xE4>"], "\u{fffd}a\u{fffd}\u{fffd}n\u{fffd}"),
            // A character of several bytes comes with the last, behind a byte that is a character by itself too.
            (&["a", "<0x3C>", "<0xE4>", "<0xBD>", "<0xA0>", "n"], "a<你n"),
            (&["▁o", "r", "▁o", "n"], "or on"),
        ] {
            assert_eq!(grown(tokens, &tokenizer), text, "{tokens:?}");
        }
    }

    #[test]
    fn behind_a_prompt_a_word_keeps_its_space() {
        let tokenizer = with_bytes();
        let prompt = tokenizer.encode("Rain fell on").unwrap();
        let mut behind = Detokenizer::behind(&prompt);
        let mut text = String::new();
        for token in ["▁o", "r", "▁o", "n", "<0xC3>"] {
            text += &behind.push(tokenizer.token_id(token).unwrap(), &tokenizer).unwrap();
        }
        assert_eq!(text + &behind.finish(&tokenizer).unwrap(), " or on\u{fffd}");
        let mut alone = Detokenizer::behind(&[]);
        assert_eq!(alone.push(tokenizer.token_id("▁o").unwrap(), &tokenizer).unwrap(), "o");
    }

    #[test]
    fn special_tokens_between_others_change_nothing() {
        let pieces = with_bytes();
        let text = grown(&["<s>", "▁o", "r", "<unk>", "▁o", "n", "</s>", "<s>", "▁o", "n"], &pieces);
        assert_eq!(text, "or on on");
        let golden = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/data/tokenizers/bytelevel"));
        let byte_level = Tokenizer::from_folder(golden).unwrap();
        // Tokens that are bytes come as whole characters: others are decoded as far as they came.
        let characters = ["你", "<", "🦀"].map(|character| {
            let token = |byte: u8| pieces.token_id(&format!("<0x{byte:02X}>")).unwrap();
            character.bytes().map(token).collect::<Vec<u32>>()
        });
        let singles = (pieces.token_id("<0xFF>").unwrap() + 1..pieces.vocab_size() as u32).map(|id| vec![id]);
        let words: Vec<Vec<u32>> = singles.chain(std::iter::repeat_n(characters, 100).flatten()).collect();
        let bytes: Vec<Vec<u32>> = (5..byte_level.vocab_size() as u32).map(|id| vec![id]).collect();
        let mut state = 1_u64;
        let mut draw = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 33) as usize % below
        };
        for (tokenizer, words, specials) in [(&pieces, &words, 3), (&byte_level, &bytes, 5)] {
            for _ in 0..500 {
                let mut ids = Vec::new();
                for id in (0..8).flat_map(|_| words[draw(words.len())].clone()).collect::<Vec<_>>() {
                    ids.extend((0..draw(3)).map(|_| draw(specials) as u32).collect::<Vec<_>>());
                    ids.push(id);
                }
                assert!((0..specials as u32).all(|id| tokenizer.is_special(id)));
                let mut detokenizer = Detokenizer::default();
                let parts = ids.iter().map(|id| detokenizer.push(*id, tokenizer).unwrap()).collect::<String>();
                let text = parts + &detokenizer.finish(tokenizer).unwrap();
                assert_eq!(text, tokenizer.decode(&ids).unwrap(), "{ids:?}");
            }
        }
    }

    #[test]
    fn texts_grow_to_what_their_tokens_decode_to() {
        let tokenizer = with_bytes();
        for text in ["Rain fell on the hills.", "你好 <b> 🦀 naïve\n\n  x", "\u{fffd} a \u{fffd}"] {
            let mut detokenizer = Detokenizer::default();
            let ids = tokenizer.encode(text).unwrap();
            let parts = ids.iter().map(|id| detokenizer.push(*id, &tokenizer).unwrap()).collect::<String>();
            assert_eq!(parts + &detokenizer.finish(&tokenizer).unwrap(), text);
        }
    }
}
