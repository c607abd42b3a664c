//! How long the documents of an artefact of tokens are, and what was cut and left out to make them so.

use std::path::Path;

use engine::artifact::Facts;
use engine::error::StageError;
use serde::Serialize;

use crate::data::artifact::TokensReader;

/// Bars of the histogram.
const BARS: u64 = 40;

/// Tokens that are read at most: of a large artefact the first rows stand for all.
const MOST_TOKENS: u64 = 20_000_000;

/// The lengths of documents, in tokens.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Lengths {
    /// Tokens from one bar to the next: bar `i` counts lengths over `i · width` up to `(i + 1) · width`.
    pub width: u64,
    /// How many documents there are in each bar.
    pub documents: Vec<u64>,
    /// The rows that were counted, from the first.
    pub rows: u64,
    /// How many there are.
    pub of: u64,
    /// The length that was asked for.
    pub max_seq_len: Option<u64>,
    /// Rows that were cut to it.
    pub truncated: u64,
    /// Rows that were left out.
    pub dropped: u64,
    /// Rows of which nothing is learned, left out or not.
    pub fully_masked: u64,
}

/// Counts the documents of tokens or packs.
///
/// # Errors
/// Fails where the artefact is of another kind, or cannot be read.
pub fn lengths(folder: &Path, kind: &str, facts: &Facts) -> Result<Lengths, StageError> {
    let mut reader = TokensReader::open_with(folder, kind, facts)?;
    let (of, known) = (reader.len(), reader.facts().clone());
    let width = known.longest_document.max(1).div_ceil(BARS);
    let mut documents = vec![0; usize::try_from(known.longest_document.max(1).div_ceil(width)).unwrap_or(1)];
    let (mut rows, mut tokens) = (0, 0);
    for row in reader.iter() {
        for length in row?.document_lengths {
            let length = length as u64;
            tokens += length;
            let bar = usize::try_from(length.saturating_sub(1) / width).unwrap_or(usize::MAX);
            if let Some(count) = documents.get_mut(bar) {
                *count += 1;
            }
        }
        rows += 1;
        if tokens > MOST_TOKENS {
            break;
        }
    }
    Ok(Lengths {
        width,
        documents,
        rows,
        of,
        max_seq_len: known.max_seq_len,
        truncated: known.truncated,
        dropped: known.dropped,
        fully_masked: known.fully_masked,
    })
}
