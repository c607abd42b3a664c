//! Rows of tokens on their way into a micro-batch, and their numbers in messages.

use model::batch::Batch;

use crate::data::artifact::TokenRow;

/// Rows named in a message.
const LISTED: usize = 8;

/// Adds a row, without its padding.
pub(super) fn push(batch: &mut Batch, number: u64, row: &TokenRow) {
    let lengths: Vec<usize> = row.document_lengths.iter().map(|length| *length as usize).collect();
    batch.push_row(number, &row.input_ids, &row.labels, &lengths);
}

/// `3, 17, 4 and 9 more`.
pub(super) fn listed(rows: &[u64]) -> String {
    let named: Vec<String> = rows.iter().take(LISTED).map(u64::to_string).collect();
    match rows.len().saturating_sub(LISTED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
