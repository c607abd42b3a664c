//! Documents as token ids and labels: a row of a table of tokens, and the ragged micro-batches made of such rows.

use std::ops::Range;

/// The label of a token that is not a target, as in `torch.nn.CrossEntropyLoss`.
pub const IGNORE_INDEX: i32 = -100;

/// Documents to train on or to score, one after the other: a row of a table of tokens, or several rows as a
/// micro-batch. Several rows are simply more documents. In a table the documents of a row may be followed by padding,
/// which [`Batch::push`] leaves out; the decoder takes a batch without padding.
///
/// Labels are *not* shifted: `labels[i]` belongs to the token `input_ids[i]` and is predicted from the token before it
/// in the same document. So the label of a document's first token counts for nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Token ids.
    pub input_ids: Vec<u32>,
    /// The target at each token, or [`IGNORE_INDEX`].
    pub labels: Vec<i32>,
    /// Tokens per document; in a micro-batch they add up to the tokens.
    pub document_lengths: Vec<usize>,
    /// The row of the data that each document belongs to, for the addresses of dropout's draws; documents of a row
    /// follow each other. Empty: 0, 1, 2 and so on.
    pub rows: Vec<u64>,
    /// Weight of each token in the loss, finite and not negative. Empty: 1 each.
    pub weights: Vec<f32>,
    /// The group of each document: documents of one group (a chosen and a rejected response, say) have one loss.
    /// Empty: each document is a group of its own.
    pub groups: Vec<u64>,
    /// What each document is within its group. Empty: [`Role::Chosen`] each.
    pub roles: Vec<Role>,
}

/// What a document is within its group, for losses that compare documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Is to become likelier.
    #[default]
    Chosen,
    /// Is to become less likely.
    Rejected,
    /// A prompt with the response of another one: it is scored, and not trained on.
    Mismatched,
}

impl Role {
    /// Every role; each stands at the place that is its number.
    pub const ALL: [Self; 3] = [Self::Chosen, Self::Rejected, Self::Mismatched];

    /// The role of a number, as `role as u8` gives it.
    pub fn of_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
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
    /// There is not one weight for each token, or one is negative or not finite.
    #[error("{tokens} tokens have {weights} weights; each must be finite and not negative")]
    Weights {
        /// Tokens in the batch.
        tokens: usize,
        /// Weights that are usable.
        weights: usize,
    },
    /// There is not one group, or not one role, for each document.
    #[error("{documents} documents have {groups} groups and {roles} roles")]
    Groups {
        /// Documents in the batch.
        documents: usize,
        /// Entries of [`Batch::groups`].
        groups: usize,
        /// Entries of [`Batch::roles`].
        roles: usize,
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
        Self { input_ids, labels, document_lengths, ..Self::default() }
    }

    /// One document in which each token is a target.
    pub fn text(input_ids: Vec<u32>) -> Self {
        let labels = input_ids.iter().map(|&id| i32::try_from(id).unwrap_or(IGNORE_INDEX)).collect();
        Self::document(input_ids, labels)
    }

    /// Adds the documents of a row of the data of this number, without the padding behind them.
    ///
    /// # Panics
    /// If some rows of the batch have groups or roles and others have none.
    pub fn push(&mut self, number: u64, row: &Self) {
        for document in self.rows.len()..self.document_lengths.len() {
            self.rows.push(document as u64);
        }
        self.extend(row);
        self.rows.resize(self.document_lengths.len(), number);
    }

    /// Adds the first `Σ document_lengths` tokens of a packed row of this number.
    pub fn push_row(&mut self, number: u64, input_ids: &[u32], labels: &[i32], document_lengths: &[usize]) {
        let (input_ids, labels, document_lengths) = (input_ids.to_vec(), labels.to_vec(), document_lengths.to_vec());
        self.push(number, &Self { input_ids, labels, document_lengths, ..Self::default() });
    }

    /// Adds documents to a row, without the padding behind them.
    ///
    /// # Panics
    /// If some of the documents have groups or roles and others have none.
    pub fn extend(&mut self, row: &Self) {
        let tokens = row.real_tokens();
        if !(self.weights.is_empty() && row.weights.is_empty()) {
            self.weights.resize(self.tokens(), 1.0);
            self.weights.extend((0..tokens).map(|token| row.weight(token)));
        }
        self.input_ids.extend_from_slice(&row.input_ids[..tokens]);
        self.labels.extend_from_slice(&row.labels[..tokens]);
        for (document, &length) in row.document_lengths.iter().enumerate().filter(|(_, length)| **length > 0) {
            self.document_lengths.push(length);
            self.groups.extend(row.groups.get(document));
            self.roles.extend(row.roles.get(document));
        }
        let documents = self.document_lengths.len();
        let all_or_none = |entries: usize| entries == 0 || entries == documents;
        assert!(all_or_none(self.groups.len()) && all_or_none(self.roles.len()), "every document has a group or none");
    }

    /// Some tokens of one of the documents as a document of its own.
    pub fn piece(&self, document: usize, tokens: Range<usize>) -> Self {
        Self {
            input_ids: self.input_ids[tokens.clone()].to_vec(),
            labels: self.labels[tokens.clone()].to_vec(),
            document_lengths: vec![tokens.len()],
            rows: Vec::new(),
            weights: self.weights.get(tokens).map(<[f32]>::to_vec).unwrap_or_default(),
            groups: self.groups.get(document).copied().into_iter().collect(),
            roles: self.roles.get(document).copied().into_iter().collect(),
        }
    }

    /// Lengthens the row by padding, which belongs to no document.
    pub fn pad(&mut self, tokens: usize, padding_id: u32) {
        self.input_ids.resize(tokens, padding_id);
        self.labels.resize(tokens, IGNORE_INDEX);
        if !self.weights.is_empty() {
            self.weights.resize(tokens, 0.0);
        }
    }

    /// How many tokens belong to documents.
    pub fn real_tokens(&self) -> usize {
        self.document_lengths.iter().sum()
    }

    /// How many tokens the loss is taken over.
    pub fn target_tokens(&self) -> usize {
        self.target_places(TargetScope::Response).count()
    }

    /// The weight of a token in the loss.
    pub fn weight(&self, token: usize) -> f32 {
        self.weights.get(token).copied().unwrap_or(1.0)
    }

    /// The group of a document.
    pub fn group(&self, document: usize) -> u64 {
        self.groups.get(document).copied().unwrap_or(document as u64)
    }

    /// What a document is within its group.
    pub fn role(&self, document: usize) -> Role {
        self.roles.get(document).copied().unwrap_or_default()
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

    /// The rows that have a label to predict, and the labels, shifted within each document.
    pub fn targets(&self) -> Targets {
        self.targets_in(TargetScope::Response)
    }

    /// The same with the targets of a scope.
    pub fn targets_in(&self, scope: TargetScope) -> Targets {
        let mut targets = Targets::default();
        for place in self.target_places(scope) {
            targets.rows.push(place.row as u32);
            targets.ids.push(place.id);
            targets.documents.push(place.document as u32);
            targets.response.push(place.response);
            if !self.weights.is_empty() {
                targets.weights.push(self.weights[place.row + 1]);
            }
        }
        targets
    }

    /// The shift rule: the label of a token is predicted in the row before it, and nothing predicts a document's first
    /// token.
    fn target_places(&self, scope: TargetScope) -> impl Iterator<Item = TargetPlace> + '_ {
        let mut end = 0;
        let documents = self.document_lengths.iter().enumerate().map(move |(document, &length)| {
            let first = end;
            end += length;
            (document, first..end.saturating_sub(1).max(first))
        });
        documents.flat_map(move |(document, rows)| {
            rows.filter_map(move |row| {
                // A negative label is the ignored one.
                let label = u32::try_from(self.labels[row + 1]).ok();
                let id = match scope {
                    TargetScope::Response => label?,
                    TargetScope::Document => label.unwrap_or(self.input_ids[row + 1]),
                };
                Some(TargetPlace { row, id, document, response: label.is_some() })
            })
        })
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
        let usable = self.weights.iter().filter(|weight| weight.is_finite() && **weight >= 0.0).count();
        if !self.weights.is_empty() && (usable, self.weights.len()) != (tokens, tokens) {
            return Err(BatchError::Weights { tokens, weights: usable });
        }
        let (documents, groups, roles) = (self.document_lengths.len(), self.groups.len(), self.roles.len());
        if [groups, roles].into_iter().any(|entries| entries != 0 && entries != documents) {
            return Err(BatchError::Groups { documents, groups, roles });
        }
        if let Some(&longest) = self.document_lengths.iter().max()
            && longest > max_position_embeddings
        {
            return Err(BatchError::TooLong { tokens: longest, max_position_embeddings });
        }
        let outside = |id: i64| id >= vocab_size as i64 || (id < 0 && id != i64::from(IGNORE_INDEX));
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

/// How many targets a document of these labels has; nothing predicts its first token.
pub fn target_count(labels: &[i32]) -> usize {
    labels.iter().skip(1).filter(|label| **label != IGNORE_INDEX).count()
}

/// Which tokens of a document are targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TargetScope {
    /// Those that have a label: the response.
    Response,
    /// Every token but the first. One without a label (the prompt's) is its own target.
    Document,
}

/// One target of a batch.
struct TargetPlace {
    row: usize,
    id: u32,
    document: usize,
    response: bool,
}

/// The rows of a batch that carry a target, ascending, and the targets themselves.
///
/// A target has two masks: that it is here means that it counts; [`Targets::response`] says whether it belongs to the
/// response, so that a loss may take the prompt and still know the response.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Targets {
    /// Rows whose logits are needed.
    pub rows: Vec<u32>,
    /// The id each of them should predict.
    pub ids: Vec<u32>,
    /// Index of the document each belongs to.
    pub documents: Vec<u32>,
    /// Whether each has a label.
    pub response: Vec<bool>,
    /// Weight of each in the loss. Empty: 1 each.
    pub weights: Vec<f32>,
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

    /// The weight of each in the loss; none where all are 1.
    pub fn weights(&self) -> Option<&[f32]> {
        (!self.weights.is_empty()).then_some(&self.weights)
    }

    /// The sum of the weights, by which the summed loss is divided.
    pub fn total_weight(&self) -> f64 {
        match self.weights() {
            None => self.len() as f64,
            Some(weights) => weights.iter().map(|&weight| f64::from(weight)).sum(),
        }
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
        batch.push_row(0, &[1, 2, 3, 4, 5, 0, 0], &[1, IGNORE_INDEX, 3, 4, 5, -100, -100], &[3, 2]);
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
    fn weights_groups_and_roles_follow_their_tokens_and_documents() {
        let pair = Batch {
            weights: vec![1.0, 0.5, 2.0, 1.0, 9.0],
            groups: vec![7, 7],
            roles: vec![Role::Chosen, Role::Rejected],
            document_lengths: vec![2, 2],
            ..Batch::text(vec![1, 2, 3, 4, 0])
        };
        let mut batch = Batch::default();
        batch.push(3, &pair);
        batch.push(5, &pair);
        assert_eq!((batch.tokens(), batch.rows.as_slice()), (8, &[3, 3, 5, 5][..]));
        let targets = batch.targets();
        assert_eq!((&targets.rows, &targets.weights), (&vec![0, 2, 4, 6], &vec![0.5, 1.0, 0.5, 1.0]));
        assert_eq!((targets.documents.as_slice(), targets.total_weight()), (&[0, 1, 2, 3][..], 3.0));
        assert_eq!((batch.group(2), batch.role(3)), (7, Role::Rejected));
        assert_eq!(batch.check(5, 9), Ok(()));
        assert_eq!(pair.piece(1, 2..4).weights, [2.0, 1.0]);
        let mut mixed = Batch::default();
        mixed.push(0, &Batch::text(vec![1, 2]));
        mixed.push(1, &Batch { weights: vec![0.5, 0.5], ..Batch::text(vec![1, 2]) });
        assert_eq!(mixed.weights, [1.0, 1.0, 0.5, 0.5], "a row without weights has weights of 1");
        mixed.weights[1] = f32::NAN;
        assert_eq!(mixed.check(4, 2), Err(BatchError::Weights { tokens: 4, weights: 3 }));
        mixed.weights.clear();
        mixed.groups = vec![1];
        assert_eq!(mixed.check(4, 2), Err(BatchError::Groups { documents: 2, groups: 1, roles: 0 }));
    }

    #[test]
    fn a_loss_may_take_the_prompt_and_still_know_the_response() {
        let batch = Batch::document(vec![1, 2, 3, 4], vec![IGNORE_INDEX, IGNORE_INDEX, 3, 9]);
        let targets = batch.targets_in(TargetScope::Document);
        assert_eq!((targets.ids, targets.response), (vec![2, 3, 9], vec![false, true, true]));
        assert_eq!(batch.targets().ids, [3, 9]);
        assert_eq!(batch.target_tokens(), 2);
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
