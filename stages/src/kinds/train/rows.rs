//! Numbers of rows in messages.

/// Rows named in a message.
const LISTED: usize = 8;

/// `3, 17, 4 and 9 more`.
pub(super) fn listed(rows: &[u64]) -> String {
    let named: Vec<String> = rows.iter().take(LISTED).map(u64::to_string).collect();
    match rows.len().saturating_sub(LISTED) {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
