//! Rows in chunks whose borders follow from the rows themselves, so that a row put in, taken out or changed moves no
//! border but its own.

use cache::Digest;

use crate::data::artifact::{Row, RowIdentities, RowsFacts, RowsReader, TableError};

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

/// Reads chunks one after the other.
pub(super) struct Chunks<'a> {
    rows: &'a mut RowsReader,
    identities: RowIdentities<'a>,
    /// The row that the next chunk begins with.
    next: u64,
}

impl<'a> Chunks<'a> {
    /// The chunks of all rows, of which these are the facts.
    pub(super) fn new(rows: &'a mut RowsReader, facts: &'a RowsFacts) -> Self {
        Self { rows, identities: facts.identities(), next: 0 }
    }

    /// The row that the next chunk begins with.
    pub(super) fn next_row(&self) -> u64 {
        self.next
    }

    /// The next chunk; `None` beyond the last row.
    ///
    /// # Errors
    /// Fails where the table is damaged.
    pub(super) fn read(&mut self) -> Result<Option<Chunk>, TableError> {
        let mut chunk = Vec::new();
        let mut text_bytes = 0;
        while self.next < self.rows.len() {
            let row = self.rows.row(self.next)?;
            self.next += 1;
            text_bytes += row.text_bytes();
            let asks = self.asks_for_a_border(&row);
            chunk.push(row);
            if (asks && chunk.len() >= FEWEST) || chunk.len() == MOST || text_bytes >= MOST_BYTES {
                break;
            }
        }
        let identity = self.identities.of(&chunk);
        Ok((!chunk.is_empty()).then_some(Chunk { rows: chunk, text_bytes, identity }))
    }

    fn asks_for_a_border(&self, row: &Row) -> bool {
        self.identities.of(std::slice::from_ref(row)).as_bytes()[0].is_multiple_of(MEAN)
    }
}
