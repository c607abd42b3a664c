//! Next fit: one open row, documents in their order, as torchtune's `PackedDataset` packs.

use std::collections::VecDeque;

use crate::data::artifact::{IGNORE_INDEX, TokenRow};

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
/// A row closes when the next document would overflow it; a row that is exactly full waits for that. The rest of a row
/// is padding, which [`TokenRow::document_lengths`] does not cover.
pub struct NextFit {
    max_seq_len: usize,
    splits: bool,
    padding_id: u32,
    open: Open,
}

/// What waits for a row: queues, so that a document of millions of tokens is cut without moving its rest for each row.
#[derive(Default)]
struct Open {
    input_ids: VecDeque<u32>,
    labels: VecDeque<i32>,
    document_lengths: VecDeque<u32>,
}

impl NextFit {
    /// A packer of rows of `max_seq_len` tokens; `splits` says that a document may be cut at the end of a row.
    pub fn new(max_seq_len: usize, splits: bool, padding_id: u32) -> Self {
        Self { max_seq_len, splits, padding_id, open: Open::default() }
    }

    /// Adds a document (or several, if the row holds several). Take what is full with [`NextFit::next_full`] before the
    /// next.
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
        self.open.input_ids.extend(&row.input_ids[..real]);
        self.open.labels.extend(&row.labels[..real]);
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
        while let Some(length) = self.open.document_lengths.front_mut() {
            let room = self.max_seq_len - taken;
            if *length as usize > room {
                if self.splits && room > 0 {
                    *length -= room as u32;
                    lengths.push(room as u32);
                    taken = self.max_seq_len;
                }
                break;
            }
            lengths.push(*length);
            taken += *length as usize;
            self.open.document_lengths.pop_front();
        }
        Some(self.close(taken, lengths))
    }

    /// The last row, which may be far from full.
    pub fn finish(mut self) -> Option<TokenRow> {
        let lengths = std::mem::take(&mut self.open.document_lengths).into();
        let taken = self.open.input_ids.len();
        (taken > 0).then(|| self.close(taken, lengths))
    }

    /// A row of the first `taken` tokens, padded.
    fn close(&mut self, taken: usize, document_lengths: Vec<u32>) -> TokenRow {
        let mut input_ids: Vec<u32> = self.open.input_ids.drain(..taken).collect();
        let mut labels: Vec<i32> = self.open.labels.drain(..taken).collect();
        input_ids.resize(self.max_seq_len, self.padding_id);
        labels.resize(self.max_seq_len, IGNORE_INDEX);
        TokenRow { input_ids, labels, document_lengths }
    }
}
