//! Best-fit decreasing, in windows: the longest document first, each into the fullest row that still has room for it.
//!
//! A window is a stretch of documents that is packed by itself, so that memory is bounded, the tokens are read once and
//! in order, and documents stay near their place in the data. 2¹⁵ documents are enough for hardly any padding.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

use super::next_fit::{TooLong, units};
use crate::data::artifact::TokenRow;

/// So many documents are packed together.
pub(super) const WINDOW_DOCUMENTS: usize = 1 << 15;

/// Fewer documents are, if they have so many tokens, of 8 bytes each.
pub(super) const WINDOW_TOKENS: usize = 1 << 24;

/// Packs documents by their lengths.
///
/// Within a row documents stand in the order of the data, and rows in the order of their first documents.
pub struct BestFit {
    max_seq_len: usize,
    splits: bool,
    padding_id: u32,
    /// What is still to be packed: documents, or pieces of those that are longer than a row.
    window: Vec<TokenRow>,
    window_tokens: usize,
    /// A window that is packed, and which of its documents each row takes.
    packed: Vec<TokenRow>,
    rows: VecDeque<Vec<usize>>,
}

impl BestFit {
    /// A packer of rows of `max_seq_len` tokens; `splits` says that a document longer than a row may be cut.
    pub fn new(max_seq_len: usize, splits: bool, padding_id: u32) -> Self {
        let (window, packed, rows) = (Vec::new(), Vec::new(), VecDeque::new());
        Self { max_seq_len, splits, padding_id, window, window_tokens: 0, packed, rows }
    }

    /// Adds a document (or several, if the row holds several). Take what is full with [`BestFit::next_full`] before the
    /// next.
    ///
    /// # Errors
    /// Fails where one is longer than a row and documents are not to be cut.
    pub fn push(&mut self, row: &TokenRow) -> Result<(), TooLong> {
        let mut start = 0;
        for unit in units(row) {
            let length: usize = row.document_lengths[unit.clone()].iter().sum();
            if length > self.max_seq_len && !self.splits {
                return Err(TooLong { tokens: length, max_seq_len: self.max_seq_len });
            }
            if length <= self.max_seq_len {
                let mut whole = TokenRow::default();
                for document in unit {
                    let end = start + row.document_lengths[document];
                    whole.extend(&row.piece(document, start..end));
                    start = end;
                }
                self.add(whole);
                continue;
            }
            for document in unit {
                let end = start + row.document_lengths[document];
                for first in (start..end).step_by(self.max_seq_len) {
                    self.add(row.piece(document, first..end.min(first + self.max_seq_len)));
                }
                start = end;
            }
        }
        if self.window.len() >= WINDOW_DOCUMENTS || self.window_tokens >= WINDOW_TOKENS {
            self.pack_window();
        }
        Ok(())
    }

    fn add(&mut self, piece: TokenRow) {
        self.window_tokens += piece.input_ids.len();
        self.window.push(piece);
    }

    /// The next row of a window that is packed.
    pub fn next_full(&mut self) -> Option<TokenRow> {
        let mut row = TokenRow::default();
        for document in self.rows.pop_front()? {
            row.extend(&std::mem::take(&mut self.packed[document]));
        }
        row.pad(self.max_seq_len, self.padding_id);
        Some(row)
    }

    /// Packs what is left.
    pub fn finish(mut self) -> impl Iterator<Item = TokenRow> {
        self.pack_window();
        std::iter::from_fn(move || self.next_full())
    }

    fn pack_window(&mut self) {
        assert!(self.rows.is_empty(), "full rows are taken before the next window");
        self.packed = std::mem::take(&mut self.window);
        self.window_tokens = 0;
        let lengths: Vec<usize> = self.packed.iter().map(|document| document.input_ids.len()).collect();
        self.rows = best_fit(&lengths, self.max_seq_len).into();
    }
}

/// Lays documents of these lengths, each at most `max_seq_len`, into rows: for each row the indexes of its documents,
/// ascending, and the rows by their first document. Time is of order n log n.
fn best_fit(lengths: &[usize], max_seq_len: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    // Stable: of equally long documents the earlier one comes first.
    order.sort_by_key(|document| Reverse(lengths[*document]));

    let mut rows: Vec<Vec<usize>> = Vec::new();
    // Rows by the room they have left; of those with equal room the one that got it last is taken.
    let mut with_room: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for document in order {
        let length = lengths[document];
        let (row, room) = take_tightest(&mut with_room, length).unwrap_or_else(|| {
            rows.push(Vec::new());
            (rows.len() - 1, max_seq_len)
        });
        rows[row].push(document);
        if room > length {
            with_room.entry(room - length).or_default().push(row);
        }
    }
    rows.iter_mut().for_each(|row| row.sort_unstable());
    rows.sort_unstable_by_key(|row| row[0]);
    rows
}

/// Takes the row with the least room that is enough for `length`, and says how much room that is.
fn take_tightest(with_room: &mut BTreeMap<usize, Vec<usize>>, length: usize) -> Option<(usize, usize)> {
    let (&room, rows) = with_room.range_mut(length..).next()?;
    let row = rows.pop().expect("a room without rows is removed");
    if rows.is_empty() {
        with_room.remove(&room);
    }
    Some((row, room))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_document_goes_where_least_room_is_left() {
        // 6 opens a row, 4 the next, 3 goes to 4, 2 to 6, 1 to 4 and 3.
        assert_eq!(best_fit(&[3, 4, 2, 6, 1], 8), [vec![0, 1, 4], vec![2, 3]]);
        assert_eq!(best_fit(&[8, 8], 8), [[0], [1]]);
        assert_eq!(best_fit(&[5, 5, 3, 3], 8), [[0, 3], [1, 2]], "of equally full rows the one filled last");
        assert!(best_fit(&[], 8).is_empty());
    }

    #[test]
    fn a_long_window_is_packed_before_it_grows_further() {
        let mut packer = BestFit::new(4, false, 0);
        let mut rows = 0;
        for _ in 0..=WINDOW_DOCUMENTS {
            // The last one begins a window of its own.
            packer.push(&TokenRow::document(vec![7; 2], vec![7; 2])).expect("it fits");
            rows += std::iter::from_fn(|| packer.next_full()).count();
        }
        assert_eq!(rows, WINDOW_DOCUMENTS / 2);
        assert_eq!(packer.finish().count(), 1);
    }
}
