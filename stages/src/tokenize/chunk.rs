//! Rows in chunks whose borders follow from the rows themselves, so that a row put in, taken out or changed moves no border but its own.

use cache::Digest;

use crate::artifact::{Row, RowsFacts, RowsReader, TableError};

/// Fewest rows of a chunk, but for the last: after these, a border comes with the first row whose digest asks for one,
/// and one row in [`MEAN`] does.
const FEWEST: usize = 32;
const MEAN: u8 = 128;
const MOST: usize = 512;

/// A chunk of long rows ends sooner: memory holds a few chunks at a time.
const MOST_BYTES: usize = 4 << 20;

/// Consecutive rows.
pub(super) struct Chunk {
    pub rows: Vec<Row>,
    pub text_bytes: usize,
    /// The identity of the rows.
    pub identity: Digest,
}

/// Reads the chunk that begins at a row; `None` beyond the last.
///
/// # Errors
/// Fails where the table is damaged.
pub(super) fn read(rows: &mut RowsReader, from: u64) -> Result<Option<Chunk>, TableError> {
    let mut chunk = Vec::new();
    let mut text_bytes = 0;
    for index in from..rows.len() {
        let row = rows.row(index)?;
        text_bytes += row.text_bytes();
        let asks = asks_for_a_border(rows.facts(), &row);
        chunk.push(row);
        if (asks && chunk.len() >= FEWEST) || chunk.len() == MOST || text_bytes >= MOST_BYTES {
            break;
        }
    }
    let identity = rows.facts().identity_of(&chunk);
    Ok((!chunk.is_empty()).then_some(Chunk { rows: chunk, text_bytes, identity }))
}

fn asks_for_a_border(facts: &RowsFacts, row: &Row) -> bool {
    facts.identity_of(std::slice::from_ref(row)).as_bytes()[0].is_multiple_of(MEAN)
}
