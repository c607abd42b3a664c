//! Next fit: one open row, documents in their order, as torchtune's `PackedDataset` packs.

use std::collections::VecDeque;
use std::ops::Range;

use crate::data::artifact::{Role, TokenRow};

/// A document longer than a row, where documents are not to be cut.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it has {tokens} tokens, and a pack has {max_seq_len}")]
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
    weights: VecDeque<f32>,
    documents: VecDeque<Document>,
}

/// A document, or what is left of one.
struct Document {
    length: usize,
    group: Option<u64>,
    role: Option<Role>,
}

/// Documents that lie in one row: those of a group that follow each other, or one.
struct Unit {
    documents: usize,
    tokens: usize,
}

impl Open {
    fn first_unit(&self) -> Option<Unit> {
        let first = self.documents.front()?;
        let of_group = |document: &&Document| document.group.is_some() && document.group == first.group;
        let others = self.documents.iter().skip(1).take_while(of_group);
        let unit = Unit { documents: 1, tokens: first.length };
        Some(
            others.fold(unit, |unit, document| Unit {
                documents: unit.documents + 1,
                tokens: unit.tokens + document.length,
            }),
        )
    }
}

/// The lengths of the units of a row.
fn unit_lengths(row: &TokenRow) -> Vec<usize> {
    units(row).into_iter().map(|documents| row.document_lengths[documents].iter().sum()).collect()
}

/// The documents of a row that stay together: those of a group that follow each other, or each by itself.
pub(super) fn units(row: &TokenRow) -> Vec<Range<usize>> {
    let mut units: Vec<Range<usize>> = Vec::new();
    for document in 0..row.document_lengths.len() {
        match units.last_mut() {
            Some(last) if !row.groups.is_empty() && row.groups[last.start] == row.groups[document] => {
                last.end = document + 1;
            }
            _ => units.push(document..document + 1),
        }
    }
    units
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
    /// Fails where it is longer than a row and documents are not to be cut, as is a group of them.
    pub fn push(&mut self, row: &TokenRow) -> Result<(), TooLong> {
        if let Some(tokens) = unit_lengths(row).into_iter().find(|length| *length > self.max_seq_len)
            && !self.splits
        {
            return Err(TooLong { tokens, max_seq_len: self.max_seq_len });
        }
        let real = row.real_tokens();
        self.open.input_ids.extend(&row.input_ids[..real]);
        self.open.labels.extend(&row.labels[..real]);
        if !row.weights.is_empty() {
            self.open.weights.extend(&row.weights[..real]);
        }
        let document = |(index, &length): (usize, &usize)| Document {
            length,
            group: row.groups.get(index).copied(),
            role: row.roles.get(index).copied(),
        };
        let documents = row.document_lengths.iter().enumerate().filter(|(_, length)| **length > 0);
        self.open.documents.extend(documents.map(document));
        Ok(())
    }

    /// The next row that has no room for what was added.
    pub fn next_full(&mut self) -> Option<TokenRow> {
        if self.open.input_ids.len() <= self.max_seq_len {
            return None;
        }
        let mut documents = Vec::new();
        let mut taken = 0;
        while let Some(unit) = self.open.first_unit() {
            let room = self.max_seq_len - taken;
            let Some(document) = self.open.documents.front_mut() else { break };
            if unit.tokens > room {
                if self.splits && room > 0 {
                    document.length -= room;
                    documents.push(Document { length: room, ..*document });
                    taken = self.max_seq_len;
                }
                break;
            }
            taken += unit.tokens;
            documents.extend(self.open.documents.drain(..unit.documents));
        }
        Some(self.close(taken, &documents))
    }

    /// The last row, which may be far from full.
    pub fn finish(mut self) -> Option<TokenRow> {
        let documents: Vec<Document> = std::mem::take(&mut self.open.documents).into();
        let taken = self.open.input_ids.len();
        (taken > 0).then(|| self.close(taken, &documents))
    }

    /// A row of the first `taken` tokens, padded.
    fn close(&mut self, taken: usize, documents: &[Document]) -> TokenRow {
        let weights = taken.min(self.open.weights.len());
        let mut row = TokenRow {
            input_ids: self.open.input_ids.drain(..taken).collect(),
            labels: self.open.labels.drain(..taken).collect(),
            weights: self.open.weights.drain(..weights).collect(),
            document_lengths: documents.iter().map(|document| document.length).collect(),
            groups: documents.iter().filter_map(|document| document.group).collect(),
            roles: documents.iter().filter_map(|document| document.role).collect(),
            ..TokenRow::default()
        };
        row.pad(self.max_seq_len, self.padding_id);
        row
    }
}
