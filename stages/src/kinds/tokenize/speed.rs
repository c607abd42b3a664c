//! Whether the fast encoder is used: where there is much to encode, and it has the same ids over the first rows.

use std::path::Path;

use engine::context::StageContext;

use crate::data::artifact::{Row, RowsReader, TableError};
use crate::data::prompt::PromptRenderer;
use crate::data::tokenizer::{Candidate, Tokenizer, TokenizerError, Unfit};

/// From so much text on, what the fast encoder saves is more than what it takes to compare it with the other.
const MUCH_TEXT: u64 = 1 << 20;

/// How much of the first rows the two are compared over, and of one text in letters.
const SAMPLED_BYTES: usize = 128 << 10;
const SAMPLED_LETTERS: usize = 16 << 10;

/// A tokenizer, and its faster encoder where there is so much text that it pays.
pub(super) struct Opened {
    pub tokenizer: Tokenizer,
    fast: Option<Result<Candidate, Unfit>>,
    first: Vec<Row>,
}

impl Opened {
    /// Opens both side by side, on two threads of the pool that this runs in: each is a good part of a short run.
    ///
    /// # Errors
    /// Fails where a file of the tokenizer is missing or not what it should be.
    pub(super) fn from_folder(folder: &Path, first: FirstRows) -> Result<Self, TokenizerError> {
        let fast = || first.are_of_much_text.then(|| Candidate::load(folder));
        let (tokenizer, fast) = rayon::join(|| Tokenizer::from_folder(folder), fast);
        Ok(Self { tokenizer: tokenizer?, fast, first: first.rows })
    }

    /// The tokenizer, made fast where that can be done. Ids are the same in either case.
    pub(super) fn speed_up(self, renderer: &PromptRenderer, context: &mut StageContext) -> Tokenizer {
        let Self { mut tokenizer, fast, first } = self;
        let Some(fast) = fast else { return tokenizer };
        let samples = samples(&first, renderer, &tokenizer);
        let encoder = match fast.and_then(|fast| tokenizer.speed_up(fast, &samples)) {
            Ok(()) => "tokenizers 1.0",
            Err(unfit) => {
                context.log(&format!("texts are encoded by tokenizers 0.23, which is slower: {unfit}"));
                "tokenizers 0.23"
            }
        };
        context.record("encoder", encoder);
        tokenizer
    }
}

/// The first rows of many or few.
pub(super) struct FirstRows {
    rows: Vec<Row>,
    /// Whether all of them, should the others be as long, hold much text.
    are_of_much_text: bool,
}

impl FirstRows {
    /// Reads them.
    ///
    /// # Errors
    /// Fails where the table is damaged.
    pub(super) fn read(rows: &mut RowsReader) -> Result<Self, TableError> {
        let (mut first, mut bytes) = (Vec::new(), 0);
        while (first.len() as u64) < rows.len() && bytes < SAMPLED_BYTES {
            let row = rows.row(first.len() as u64)?;
            bytes += row.text_bytes();
            first.push(row);
        }
        let expected = bytes as u64 * rows.len() / first.len().max(1) as u64;
        Ok(Self { rows: first, are_of_much_text: expected >= MUCH_TEXT })
    }
}

/// The texts that are encoded of some rows.
fn samples(rows: &[Row], renderer: &PromptRenderer, tokenizer: &Tokenizer) -> Vec<String> {
    // Of a row that cannot be rendered its number has to be told, when its turn comes.
    let lessons = rows.iter().filter_map(|row| renderer.lesson(row, tokenizer).ok());
    let texts = lessons.flat_map(|lesson| lesson.encoded_texts(tokenizer));
    texts.map(|text| text.chars().take(SAMPLED_LETTERS).collect()).collect()
}
