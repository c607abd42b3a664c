//! The rows that a merge is proved on.

use std::path::Path;

use engine::context::StageContext;
use engine::error::StageError;
use model::batch::Batch;
use model::config::Config;
use model::merge::{GROUP_TOKENS, HEAD_BYTES};
use model::random::{Address, Purpose, Stream};
use serde_json::Value;

use super::Merge;
use crate::compute::checkpoint;
use crate::data::artifact::TokensReader;

/// Tokens of a row that are compared at most.
const TOKENS_PER_ROW: usize = 128;
/// Tokens of a row that is drawn where no rows are given.
const TOKENS_PER_DRAWN_ROW: usize = 32;
/// Tokens that are computed at once.
const TOKENS_PER_BATCH: usize = 256;

/// What a proof holds beside a decoder layer, in bytes: three residual streams, what a batch takes in a layer, and two
/// blocks of the head.
pub(super) fn proof_bytes(rows: usize, config: &Config) -> u64 {
    let tokens = rows.saturating_mul(TOKENS_PER_ROW).min(GROUP_TOKENS);
    let streams = 3 * tokens * config.hidden_size;
    let batch = tokens.min(TOKENS_PER_BATCH) * (6 * config.hidden_size + 4 * config.intermediate_size);
    (4 * (streams + batch) + 2 * HEAD_BYTES) as u64
}

/// The rows to compare on: of each of those given its first document, else random ones, the same for each model of this
/// vocabulary.
pub(super) fn batches(params: &Merge, base: &Path, context: &mut StageContext) -> Result<Vec<Batch>, StageError> {
    let config = checkpoint::config(base)?;
    let size = |name: &str| config.get(name).and_then(Value::as_u64);
    let positions = size("max_position_embeddings").and_then(|positions| usize::try_from(positions).ok());
    let most_tokens = |wanted: usize| positions.map_or(wanted, |positions| wanted.min(positions));
    let mut batches = Batches::default();
    match &params.data {
        Some(data) => {
            let mut reader = TokensReader::open(&context.open(data)?)?;
            let rows = reader.len().min(params.proof_rows as u64);
            for index in 0..rows {
                let row = reader.row(index)?;
                let first = row.document_lengths.first().copied().unwrap_or(0);
                batches.add(&row.input_ids[..first.min(most_tokens(TOKENS_PER_ROW))]);
            }
        }
        None => {
            let vocab_size = size("vocab_size").unwrap_or(1);
            for row in 0..params.proof_rows as u64 {
                let mut stream = Stream::new(0, Address::new(Purpose::Sampling).row(row));
                let ids = (0..most_tokens(TOKENS_PER_DRAWN_ROW)).map(|_| stream.below(vocab_size) as u32);
                batches.add(&ids.collect::<Vec<_>>());
            }
        }
    }
    Ok(batches.full)
}

/// Documents, gathered to batches.
#[derive(Default)]
struct Batches {
    full: Vec<Batch>,
}

impl Batches {
    fn add(&mut self, ids: &[u32]) {
        if ids.is_empty() {
            return;
        }
        let document = Batch::text(ids.to_vec());
        match self.full.last_mut() {
            Some(batch) if batch.tokens() + ids.len() <= TOKENS_PER_BATCH => {
                batch.extend(&document);
            }
            _ => self.full.push(document),
        }
    }
}
