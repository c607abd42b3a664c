//! Next fit: one open row, documents in their order, as torchtune's `PackedDataset` packs.

use crate::artifact::{IGNORE_INDEX, TokenRow};

/// A document longer than a row, where documents are not to be cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it has {tokens} tokens, and a pack holds {max_seq_len}")]
pub struct TooLong {
    /// Its length.
    pub tokens: usize,
    /// The length of a row.
    pub max_seq_len: usize,
}

/// Packs documents one after the other.
///
/// A row closes when the next document would overflow it; a row that is exactly full waits for that. The rest of a row is
/// padding, which [`TokenRow::document_lengths`] does not cover.
pub struct NextFit {
    max_seq_len: usize,
    splits: bool,
    padding_id: u32,
    open: TokenRow,
}

impl NextFit {
    /// A packer of rows of `max_seq_len` tokens; `splits` says that a document may be cut at the end of a row.
    pub fn new(max_seq_len: usize, splits: bool, padding_id: u32) -> Self {
        Self { max_seq_len, splits, padding_id, open: TokenRow::default() }
    }

    /// Adds a document (or several, if the row holds several). Take what is full with [`NextFit::next_full`] before the next.
    ///
    /// # Errors
    /// Fails where it is longer than a row and documents are not to be cut.
    pub fn push(&mut self, row: &TokenRow) -> Result<(), TooLong> {
        if let Some(length) = row.document_lengths.iter().find(|length| **length as usize > self.max_seq_len)
            && !self.splits
        {
            return Err(TooLong { tokens: *length as usize, max_seq_len: self.max_seq_len });
        }
        let real = row.real_tokens();
        self.open.input_ids.extend_from_slice(&row.input_ids[..real]);
        self.open.labels.extend_from_slice(&row.labels[..real]);
        self.open.document_lengths.extend(row.document_lengths.iter().filter(|length| **length > 0));
        Ok(())
    }

    /// The next row that has no room for what was added.
    pub fn next_full(&mut self) -> Option<TokenRow> {
        if self.open.input_ids.len() <= self.max_seq_len {
            return None;
        }
        let mut lengths = Vec::new();
        let mut taken = 0;
        let mut rest = std::mem::take(&mut self.open.document_lengths).into_iter();
        let mut cut = None;
        for length in rest.by_ref() {
            let room = self.max_seq_len - taken;
            if length as usize > room {
                cut = Some((length, room as u32));
                break;
            }
            lengths.push(length);
            taken += length as usize;
        }
        let mut left = Vec::new();
        if let Some((length, room)) = cut {
            let here = if self.splits { room } else { 0 };
            if here > 0 {
                lengths.push(here);
                taken += here as usize;
            }
            left.push(length - here);
        }
        left.extend(rest);
        let input_ids = self.open.input_ids.split_off(taken);
        let labels = self.open.labels.split_off(taken);
        let left = TokenRow { input_ids, labels, document_lengths: left };
        let full = std::mem::replace(&mut self.open, left);
        Some(self.padded(TokenRow { document_lengths: lengths, ..full }))
    }

    /// The last row, which may be far from full.
    pub fn finish(mut self) -> Option<TokenRow> {
        let last = std::mem::take(&mut self.open);
        (!last.input_ids.is_empty()).then(|| self.padded(last))
    }

    fn padded(&self, mut row: TokenRow) -> TokenRow {
        row.input_ids.resize(self.max_seq_len, self.padding_id);
        row.labels.resize(self.max_seq_len, IGNORE_INDEX);
        row
    }
}
