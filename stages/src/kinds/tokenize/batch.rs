//! A batch of chunks: each taken over from an earlier result or encoded, on all threads.

use cache::Digest;
use engine::context::StageContext;
use engine::error::StageError;
use rayon::prelude::*;

use super::chunk::{Chunk, Chunks};
use super::counts::Counts;
use super::earlier::{Earlier, Taken};
use super::row::{Outcome, RowEncoder, RowError};
use crate::data::artifact::{TableError, TokenRow};

/// How much text is encoded together, and short rows of how many: memory holds two batches at a time, and a chunk of
/// each more.
const BYTES: usize = 4 << 20;
const ROWS: usize = 1 << 14;

/// Chunks that follow each other, with what earlier results have of them.
pub(super) struct Batch {
    /// The row that it begins with.
    from: u64,
    chunks: Vec<(Chunk, Option<Taken>)>,
}

/// A chunk that is tokens now.
pub(super) struct Done {
    pub identity: Digest,
    pub rows: Vec<TokenRow>,
    pub counts: Counts,
    /// Whether an earlier result had it.
    pub taken_over: bool,
    /// Rows with reasoning that the chat template does not write.
    pub without_reasoning: u64,
}

impl Batch {
    /// Reads the chunks that come next.
    ///
    /// # Errors
    /// Fails where the table of rows is damaged.
    pub(super) fn read(
        chunks: &mut Chunks<'_>,
        earlier: &mut Earlier,
        context: &StageContext,
    ) -> Result<Self, TableError> {
        let mut batch = Self { from: chunks.next_row(), chunks: Vec::new() };
        let (mut read, mut bytes) = (0, 0);
        while read < ROWS && bytes < BYTES {
            let Some(chunk) = chunks.read()? else { break };
            read += chunk.rows.len();
            bytes += chunk.text_bytes;
            let taken = earlier.take(context, &chunk.identity);
            batch.chunks.push((chunk, taken));
        }
        Ok(batch)
    }

    /// Whether there were no more rows.
    pub(super) fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Encodes what no earlier result has, on all threads of the pool that this runs in.
    ///
    /// # Errors
    /// Fails at the first row that cannot be encoded, with its number.
    pub(super) fn encode(self, encoder: &RowEncoder<'_>) -> Result<Vec<Done>, StageError> {
        let of_chunk = |(chunk, taken): (Chunk, Option<Taken>)| {
            let encode = || chunk.rows.par_iter().map(|row| encoder.encode(row)).collect::<Vec<_>>();
            let made = taken.map_or_else(|| Err(encode()), Ok);
            // Counted anew in chunks that are taken over, too: it depends on the rows and the template alone.
            let left_out = chunk.rows.iter().filter(|row| encoder.renderer.leaves_out_reasoning(row));
            (chunk.identity, left_out.count() as u64, made)
        };
        let made: Vec<_> = self.chunks.into_par_iter().map(of_chunk).collect();
        let mut row = self.from;
        let mut done = Vec::with_capacity(made.len());
        for (identity, without_reasoning, made) in made {
            let taken_over = made.is_ok();
            let (rows, counts) = made.or_else(|outcomes| count(outcomes, row))?;
            row += counts.read;
            done.push(Done { identity, rows, counts, taken_over, without_reasoning });
        }
        Ok(done)
    }
}

/// What became of encoded rows, of which the first has the number `from`.
fn count(outcomes: Vec<Result<Outcome, RowError>>, from: u64) -> Result<Taken, StageError> {
    let mut counts = Counts::default();
    let mut rows = Vec::with_capacity(outcomes.len());
    for outcome in outcomes {
        let outcome = outcome.map_err(|error| error.at_row(from + counts.read))?;
        rows.extend(counts.note(outcome));
    }
    Ok((rows, counts))
}
