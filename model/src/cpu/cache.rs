//! Keys and values of one layer for several sequences.

use crate::batch::Documents;

/// Keys and values, `[slots, capacity, width]` each.
pub struct Cache {
    keys: Vec<f32>,
    values: Vec<f32>,
    capacity: usize,
    width: usize,
}

impl Cache {
    pub(super) fn new(slots: usize, capacity: usize, width: usize) -> Self {
        let empty = || vec![0.0; slots * capacity * width];
        Self { keys: empty(), values: empty(), capacity, width }
    }

    /// Stores rows of new keys and values, each document's at its slot from its start on.
    pub(super) fn append(&mut self, keys: &[f32], values: &[f32], documents: &Documents) {
        for span in documents.spans() {
            assert!(span.start + span.rows.len() <= self.capacity, "a sequence longer than its cache");
            let source = span.rows.start * self.width..span.rows.end * self.width;
            let first = (span.slot * self.capacity + span.start) * self.width;
            let target = first..first + source.len();
            self.keys[target.clone()].copy_from_slice(&keys[source.clone()]);
            self.values[target].copy_from_slice(&values[source]);
        }
    }

    /// A slot's keys and values, from its first on.
    pub(super) fn slot(&self, slot: usize) -> (&[f32], &[f32]) {
        let size = self.capacity * self.width;
        (&self.keys[slot * size..][..size], &self.values[slot * size..][..size])
    }
}
