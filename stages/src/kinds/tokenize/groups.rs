//! Groups of documents: a pair's number, and beside a judged response the prompt with the response of the row before.

use engine::error::StageError;

use super::row::{Fate, RowEncoder};
use crate::data::artifact::{IGNORE_INDEX, Role, RowsReader, Shape, TokenRow};

/// Completes the rows of a table in their order.
pub(super) struct Groups {
    shape: Shape,
    max_seq_len: usize,
    next: u64,
    /// The response of the last row, with its labels.
    before: Response,
}

/// Ids and labels.
type Response = (Vec<u32>, Vec<i32>);

impl Groups {
    /// For the rows of a table. The row before the first is the last: it is encoded ahead.
    ///
    /// # Errors
    /// Fails where a row cannot be read or encoded.
    pub(super) fn of(rows: &mut RowsReader, encoder: &RowEncoder<'_>) -> Result<Self, StageError> {
        let (shape, mut index) = (rows.facts().shape, rows.len());
        let mut last = None;
        while shape == Shape::Judged && last.is_none() && index > 0 {
            index -= 1;
            let outcome = encoder.encode(&rows.row(index)?).map_err(|error| error.at_row(index))?;
            if let Fate::Kept { mut rows, .. } = outcome.fate {
                last = rows.pop();
            }
        }
        Ok(Self::after(last.as_ref(), shape, encoder.max_seq_len))
    }

    /// For rows of which the first follows this one.
    pub(super) fn after(last: Option<&TokenRow>, shape: Shape, max_seq_len: Option<usize>) -> Self {
        let before = last.map(|last| response(last).1).unwrap_or_default();
        Self { shape, max_seq_len: max_seq_len.unwrap_or(usize::MAX), next: 0, before }
    }

    /// A row as it is written.
    pub(super) fn complete(&mut self, mut row: TokenRow) -> TokenRow {
        if !self.shape.is_preference() {
            return row;
        }
        if self.shape == Shape::Judged {
            let (prompt, response) = response(&row);
            let (ids, labels) = std::mem::replace(&mut self.before, response);
            let mut document = TokenRow::document([prompt.0, ids].concat(), [prompt.1, labels].concat());
            if document.input_ids.len() > self.max_seq_len {
                document = document.piece(0, 0..self.max_seq_len);
            }
            row.extend(&TokenRow { groups: vec![0], roles: vec![Role::Mismatched], ..document });
        }
        row.groups = vec![self.next; row.document_lengths.len()];
        self.next += 1;
        row
    }
}

/// A document before its first label, and from there on.
fn response(row: &TokenRow) -> (Response, Response) {
    let border = row.labels.iter().position(|label| *label != IGNORE_INDEX).unwrap_or(row.labels.len());
    let of = |range: std::ops::Range<usize>| (row.input_ids[range.clone()].to_vec(), row.labels[range].to_vec());
    (of(0..border), of(border..row.input_ids.len()))
}
