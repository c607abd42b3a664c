//! Which keys a query sees.
//!
//! The queries of a document that read the same key head are *rows*: row `r` is query head `r % group` at position
//! `start + r / group`. So one block of rows shares its keys, whatever the number of heads per key head; and a row sees
//! no key before those of the row above it, and none beyond those of the row below.

use std::ops::Range;

/// The rows of a document and what they see.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct AttentionMask {
    /// Position of the first query; the keys begin at position 0.
    pub start: usize,
    /// Number of queries.
    pub queries: usize,
    /// Query heads per key head.
    pub group: usize,
    /// How many keys a query sees at most.
    pub window: Option<usize>,
}

impl AttentionMask {
    /// Number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.queries * self.group
    }

    /// The keys that some row of a range sees.
    pub(crate) fn keys(&self, rows: &Range<usize>) -> Range<usize> {
        if rows.is_empty() {
            return 0..0;
        }
        self.keys_of(rows.start).start..self.keys_of(rows.end - 1).end
    }

    /// The rows that see some key of a range.
    pub(crate) fn rows_seeing(&self, keys: &Range<usize>) -> Range<usize> {
        let row = |position: usize| position.saturating_sub(self.start).min(self.queries) * self.group;
        let last = self.window.map_or(self.rows(), |window| row((keys.end + window).saturating_sub(1)));
        row(keys.start)..last
    }

    /// Whether each row of a range sees each key of another.
    pub(crate) fn all_seen(&self, rows: &Range<usize>, keys: &Range<usize>) -> bool {
        let (first, last) = (self.keys_of(rows.start), self.keys_of(rows.end - 1));
        last.start <= keys.start && keys.end <= first.end
    }

    /// The key that a row sees, if it sees no other.
    pub(crate) fn only_key(&self, row: usize) -> Option<usize> {
        let keys = self.keys_of(row);
        (keys.len() == 1).then_some(keys.start)
    }

    fn keys_of(&self, row: usize) -> Range<usize> {
        let position = self.start + row / self.group;
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        first..position + 1
    }
}

/// The part of a range that lies within a block, counted from the block's first.
pub(super) fn within(range: Range<usize>, block: &Range<usize>) -> Range<usize> {
    let place = |index: usize| index.clamp(block.start, block.end) - block.start;
    let (start, end) = (place(range.start), place(range.end));
    start..end.max(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_those_of_the_definition() {
        for (start, queries, group, window) in [
            (0, 7, 1, None),
            (0, 9, 3, None),
            (5, 4, 2, None),
            (0, 12, 1, Some(1)),
            (3, 8, 3, Some(4)),
            (40, 6, 2, Some(5)),
        ] {
            let mask = AttentionMask { start, queries, group, window };
            let sees = |row: usize, key: usize| {
                let position = start + row / group;
                key <= position && window.is_none_or(|window| position - key < window)
            };
            let keys = start + queries;
            for rows in (0..mask.rows()).flat_map(|first| (first + 1..=mask.rows()).map(move |end| first..end)) {
                let seen: Vec<_> = (0..keys).filter(|&key| rows.clone().any(|row| sees(row, key))).collect();
                assert_eq!(mask.keys(&rows).collect::<Vec<_>>(), seen, "{mask:?} {rows:?}");
            }
            for block in (0..keys).flat_map(|first| (first + 1..=keys).map(move |end| first..end)) {
                let seeing: Vec<_> = (0..mask.rows()).filter(|&row| block.clone().any(|key| sees(row, key))).collect();
                assert_eq!(mask.rows_seeing(&block).collect::<Vec<_>>(), seeing, "{mask:?} {block:?}");
                let all = (0..mask.rows()).all(|row| block.clone().all(|key| sees(row, key)));
                assert_eq!(mask.all_seen(&(0..mask.rows()), &block), all, "{mask:?} {block:?}");
            }
        }
    }
}
