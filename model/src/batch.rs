//! Token rows as the decoder takes them: ragged, one document after the other, without padding.

use std::ops::Range;

/// The label of a token that nothing has to predict.
pub const IGNORED: i32 = -100;

/// Documents to train on or to score, one after the other. Several rows of a data set are simply more documents.
///
/// Labels are *not* shifted: `labels[i]` belongs to the token `input_ids[i]` and is predicted from the token before it
/// in the same document. So the label of a document's first token counts for nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token ids.
    pub input_ids: Vec<u32>,
    /// What each token should have been, or [`IGNORED`].
    pub labels: Vec<i32>,
    /// Tokens per document; they add up to the tokens.
    pub document_lengths: Vec<usize>,
    /// The row of the data that each document belongs to, for the addresses of dropout's draws; documents of a row
    /// follow each other. Empty: 0, 1, 2 and so on.
    pub rows: Vec<u64>,
}

/// Why a batch cannot be run.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// The batch has no tokens.
    #[error("the batch is empty")]
    Empty,
    /// There is not one label for each token.
    #[error("{tokens} tokens have {labels} labels")]
    Labels {
        /// Tokens in the batch.
        tokens: usize,
        /// Labels in the batch.
        labels: usize,
    },
    /// The documents do not cover the tokens exactly.
    #[error("documents of {documents} tokens in all, but {tokens} tokens")]
    Lengths {
        /// Tokens in the batch.
        tokens: usize,
        /// Sum of the document lengths.
        documents: usize,
    },
    /// Not every document has a row.
    #[error("{documents} documents belong to {rows} rows")]
    Rows {
        /// Documents in the batch.
        documents: usize,
        /// Entries of [`Batch::rows`].
        rows: usize,
    },
    /// A token or a label lies outside the vocabulary.
    #[error("token {index} is or predicts id {id}, beyond the model's vocabulary of {vocab_size}")]
    Vocabulary {
        /// Index of the token in the batch.
        index: usize,
        /// The id.
        id: i64,
        /// Size of the vocabulary.
        vocab_size: usize,
    },
    /// A document is longer than the model's table of positions.
    #[error("a document of {tokens} tokens is longer than the model's {max_position_embeddings} positions")]
    TooLong {
        /// Tokens up to the document's end.
        tokens: usize,
        /// Positions the model has.
        max_position_embeddings: usize,
    },
}

impl Batch {
    /// One document with its labels.
    pub fn document(input_ids: Vec<u32>, labels: Vec<i32>) -> Self {
        let document_lengths = vec![input_ids.len()];
        Self { input_ids, labels, document_lengths, rows: Vec::new() }
    }

    /// One document in which each token is a target.
    pub fn text(input_ids: Vec<u32>) -> Self {
        let labels = input_ids.iter().map(|&id| i32::try_from(id).unwrap_or(IGNORED)).collect();
        Self::document(input_ids, labels)
    }

    /// Adds the tokens of the packed row of this number in the data: its first `Σ document_lengths` tokens, leaving out
    /// the padding behind them.
    pub fn push_row(&mut self, row: u64, input_ids: &[u32], labels: &[i32], document_lengths: &[usize]) {
        let tokens: usize = document_lengths.iter().sum();
        for document in self.rows.len()..self.document_lengths.len() {
            self.rows.push(document as u64);
        }
        self.input_ids.extend_from_slice(&input_ids[..tokens]);
        self.labels.extend_from_slice(&labels[..tokens]);
        self.document_lengths.extend(document_lengths.iter().filter(|&&length| length > 0));
        self.rows.resize(self.document_lengths.len(), row);
    }

    /// The row of the data that a document belongs to.
    fn row_of(&self, document: usize) -> u64 {
        self.rows.get(document).copied().unwrap_or(document as u64)
    }

    /// Each token's place in the data: its row, and its number among the row's tokens in this batch.
    pub fn token_places(&self) -> Vec<TokenPlace> {
        let mut places: Vec<TokenPlace> = Vec::with_capacity(self.tokens());
        for (document, &length) in self.document_lengths.iter().enumerate() {
            let row = self.row_of(document);
            let first = places.last().filter(|last| last.row == row).map_or(0, |last| last.token + 1);
            places.extend((first..).take(length).map(|token| TokenPlace { row, token }));
        }
        places
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.input_ids.len()
    }

    /// The rows that have something to predict, and what: the labels, shifted within each document.
    pub fn targets(&self) -> Targets {
        let mut targets = Targets::default();
        let mut first = 0;
        for &length in &self.document_lengths {
            for row in first..(first + length).saturating_sub(1) {
                // A negative label is the ignored one.
                if let Ok(id) = u32::try_from(self.labels[row + 1]) {
                    targets.rows.push(row as u32);
                    targets.ids.push(id);
                }
            }
            first += length;
        }
        targets
    }

    /// Checks the batch against itself and against a model.
    ///
    /// # Errors
    /// Any [`BatchError`].
    pub fn check(&self, vocab_size: usize, max_position_embeddings: usize) -> Result<(), BatchError> {
        let tokens = self.tokens();
        let documents = self.document_lengths.iter().sum();
        if tokens == 0 {
            return Err(BatchError::Empty);
        }
        if self.labels.len() != tokens {
            return Err(BatchError::Labels { tokens, labels: self.labels.len() });
        }
        if documents != tokens {
            return Err(BatchError::Lengths { tokens, documents });
        }
        if !self.rows.is_empty() && self.rows.len() != self.document_lengths.len() {
            return Err(BatchError::Rows { documents: self.document_lengths.len(), rows: self.rows.len() });
        }
        if let Some(&longest) = self.document_lengths.iter().max()
            && longest > max_position_embeddings
        {
            return Err(BatchError::TooLong { tokens: longest, max_position_embeddings });
        }
        let outside = |id: i64| id >= vocab_size as i64 || (id < 0 && id != i64::from(IGNORED));
        for (index, (&id, &label)) in self.input_ids.iter().zip(&self.labels).enumerate() {
            if let Some(id) = [i64::from(id), i64::from(label)].into_iter().find(|&id| outside(id)) {
                return Err(BatchError::Vocabulary { index, id, vocab_size });
            }
        }
        Ok(())
    }
}

/// Where a token lies in the data, whatever batch it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenPlace {
    /// Number of its row.
    pub row: u64,
    /// Number of the token within the row, from 0.
    pub token: u64,
}

/// The rows of a batch that carry a target, ascending, and the targets themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// Rows whose logits are needed.
    pub rows: Vec<u32>,
    /// The id each of them should predict.
    pub ids: Vec<u32>,
}

impl Targets {
    /// Number of targets.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is nothing to predict.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// Where one document lies among the rows of an activation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its rows.
    pub rows: Range<usize>,
    /// Position of its first row: 0, or the number of its tokens a cache holds already.
    pub start: usize,
    /// Its sequence in a cache; of no meaning without one.
    pub slot: usize,
}

/// The documents among the rows of an activation, and each row's position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Documents {
    spans: Vec<Span>,
    positions: Vec<u32>,
}

impl Documents {
    /// Documents of these lengths, one after the other, each from position 0. The slot is the document's index.
    pub fn new(lengths: &[usize]) -> Self {
        Self::continued(lengths.iter().enumerate().map(|(slot, &length)| (slot, 0, length)))
    }

    /// Documents of which a cache holds a part: `(slot, start, new tokens)` of each.
    pub fn continued(documents: impl IntoIterator<Item = (usize, usize, usize)>) -> Self {
        let (mut spans, mut positions) = (Vec::new(), Vec::new());
        for (slot, start, length) in documents {
            spans.push(Span { rows: positions.len()..positions.len() + length, start, slot });
            positions.extend((start..start + length).map(|position| position as u32));
        }
        Self { spans, positions }
    }

    /// The documents, in the order of their rows.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Each row's position in its document.
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.positions.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_shift_within_a_document_only() {
        let mut batch = Batch::default();
        batch.push_row(0, &[1, 2, 3, 4, 5, 0, 0], &[1, IGNORED, 3, 4, 5, -100, -100], &[3, 2]);
        let targets = batch.targets();
        assert_eq!(batch.tokens(), 5);
        // The label 4 of the second document's first token is predicted by nothing.
        assert_eq!((targets.rows, targets.ids), (vec![1, 3], vec![3, 5]));
        assert_eq!(Documents::new(&batch.document_lengths).positions(), [0, 1, 2, 0, 1]);
    }

    #[test]
    fn a_token_keeps_its_place_in_whatever_batch_it_is() {
        let mut batch = Batch::text(vec![1, 2]);
        batch.push_row(7, &[3, 4, 5], &[3, 4, 5], &[2, 1]);
        batch.push_row(4, &[6], &[6], &[1]);
        assert_eq!(batch.rows, [0, 7, 7, 4]);
        let places: Vec<_> = batch.token_places().iter().map(|place| (place.row, place.token)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (7, 0), (7, 1), (7, 2), (4, 0)]);
    }

    #[test]
    fn a_batch_that_cannot_run_says_why() {
        let good = Batch::text(vec![1, 2, 3]);
        assert_eq!(good.check(4, 3), Ok(()));
        assert_eq!(good.check(3, 3), Err(BatchError::Vocabulary { index: 2, id: 3, vocab_size: 3 }));
        assert_eq!(good.check(4, 2), Err(BatchError::TooLong { tokens: 3, max_position_embeddings: 2 }));
        assert_eq!(Batch::default().check(4, 2), Err(BatchError::Empty));
        let uncovered = Batch { document_lengths: vec![2], ..good.clone() };
        assert_eq!(uncovered.check(4, 3), Err(BatchError::Lengths { tokens: 3, documents: 2 }));
        let unlabelled = Batch { labels: vec![1], ..good.clone() };
        assert_eq!(unlabelled.check(4, 3), Err(BatchError::Labels { tokens: 3, labels: 1 }));
        let homeless = Batch { rows: vec![0, 1], ..good.clone() };
        assert_eq!(homeless.check(4, 3), Err(BatchError::Rows { documents: 1, rows: 2 }));
        let odd = Batch { labels: vec![1, -7, 3], ..good };
        assert_eq!(odd.check(4, 3), Err(BatchError::Vocabulary { index: 1, id: -7, vocab_size: 4 }));
    }
}
