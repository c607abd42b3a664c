//! Keys and values of one layer for several sequences.

use std::ops::Range;

use crate::batch::Documents;
use crate::ops::CachedRows;

/// Keys and values of each slot, `[tokens, width]`: as much memory as its tokens need.
pub struct Cache {
    slots: Vec<Slot>,
    capacity: usize,
    width: usize,
}

#[derive(Clone, Default)]
struct Slot {
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Cache {
    pub(super) fn new(slots: usize, capacity: usize, width: usize) -> Self {
        Self { slots: vec![Slot::default(); slots], capacity, width }
    }

    /// Stores rows of new keys and values, each document's at its slot from its start on.
    pub(super) fn append(&mut self, keys: &[f32], values: &[f32], documents: &Documents) {
        for span in documents.spans() {
            let end = span.start + span.rows.len();
            assert!(end <= self.capacity, "a sequence longer than its cache");
            let source = span.rows.start * self.width..span.rows.end * self.width;
            let slot = &mut self.slots[span.slot];
            for (held, new) in [(&mut slot.keys, keys), (&mut slot.values, values)] {
                held.truncate(span.start * self.width);
                if held.capacity() < end * self.width {
                    // Doubled, but never beyond what the sequence may have.
                    let tokens = (2 * end).min(self.capacity);
                    held.reserve_exact(tokens * self.width - held.len());
                }
                held.extend_from_slice(&new[source.clone()]);
            }
        }
    }

    /// Gives a slot's memory back.
    pub(super) fn clear(&mut self, slot: usize) {
        self.slots[slot] = Slot::default();
    }

    /// A copy of the keys and values of some of a slot's tokens.
    pub(super) fn read(&self, slot: usize, tokens: Range<usize>) -> CachedRows {
        let Slot { keys, values } = &self.slots[slot];
        let elements = tokens.start * self.width..tokens.end * self.width;
        CachedRows { keys: keys[elements.clone()].to_vec(), values: values[elements].to_vec() }
    }

    /// Puts such a copy behind a slot's tokens.
    pub(super) fn extend(&mut self, slot: usize, rows: &CachedRows) {
        let slot = &mut self.slots[slot];
        slot.keys.extend_from_slice(&rows.keys);
        slot.values.extend_from_slice(&rows.values);
    }

    /// A slot's keys and values, from its first on.
    pub(super) fn slot(&self, slot: usize) -> (&[f32], &[f32]) {
        let Slot { keys, values } = &self.slots[slot];
        (keys, values)
    }
}
