//! Keys and values of one layer for several sequences.
//!
//! They lie in blocks of [`BLOCK`] tokens, and in each head by head, as attention reads them: a head's keys, one column
//! of `BLOCK` for each dimension, and behind them its values, a row for each token. So one head's part of a block is
//! read from end to end, and what queries are multiplied with lies side by side for as many keys as a vector has lanes.
//! Blocks are a sequence's own, and another's when it has ended.

use std::ops::Range;
use std::sync::Arc;

use super::memory::{Arena, Memory};
use crate::batch::Documents;
use crate::ops::{AttentionShape, CachedRows};

/// Tokens of a block.
pub(super) const BLOCK: usize = 64;

/// Keys and values of each slot: as much memory as its tokens need, rounded up to whole blocks.
pub struct Cache {
    slots: Vec<Slot>,
    capacity: usize,
    heads: usize,
    head_dim: usize,
    /// Blocks of no slot.
    free: Vec<Memory<f32>>,
    /// Where new ones come from.
    memory: Arc<Arena>,
}

/// A sequence's tokens, and the blocks that they are in.
#[derive(Default)]
struct Slot {
    tokens: usize,
    blocks: Vec<Memory<f32>>,
}

/// One head's keys and values of a slot.
#[derive(Clone, Copy)]
pub(super) struct CachedHead<'a> {
    cache: &'a Cache,
    slot: &'a Slot,
    head: usize,
}

/// A head's part of a block.
#[derive(Clone, Copy)]
pub(super) struct CachedBlock<'a> {
    /// Keys, `[head_dim, BLOCK]`.
    pub keys: &'a [f32],
    /// Values, `[BLOCK, head_dim]`.
    pub values: &'a [f32],
}

impl<'a> CachedHead<'a> {
    /// Tokens that are there.
    pub(super) fn tokens(self) -> usize {
        self.slot.tokens
    }

    /// Whether it is of a cache for this shape.
    pub(super) fn is_of(self, shape: &AttentionShape) -> bool {
        (self.cache.heads, self.cache.head_dim) == (shape.num_key_value_heads, shape.head_dim)
    }

    /// The block of tokens from `number · BLOCK` on. Behind the last token there is anything, numbers or none: to
    /// multiply it with zero does not hide it.
    pub(super) fn block(self, number: usize) -> CachedBlock<'a> {
        let of_head = self.cache.head_values();
        let (keys, values) = self.slot.blocks[number][self.head * of_head..][..of_head].split_at(of_head / 2);
        CachedBlock { keys, values }
    }
}

impl Cache {
    pub(super) fn new(slots: usize, capacity: usize, shape: &AttentionShape, memory: Arc<Arena>) -> Self {
        Self {
            slots: std::iter::repeat_with(Slot::default).take(slots).collect(),
            capacity,
            heads: shape.num_key_value_heads,
            head_dim: shape.head_dim,
            free: Vec::new(),
            memory,
        }
    }

    /// Stores rows of new keys and values, each document's at its slot from its start on.
    pub(super) fn append(&mut self, keys: &[f32], values: &[f32], documents: &Documents) {
        let width = self.heads * self.head_dim;
        for span in documents.spans() {
            let elements = span.rows.start * width..span.rows.end * width;
            self.store(span.slot, span.start, &keys[elements.clone()], &values[elements]);
        }
    }

    /// Leaves a slot's blocks to the other slots; to the system they go with those of the last slot.
    pub(super) fn clear(&mut self, slot: usize) {
        self.free.append(&mut self.slots[slot].blocks);
        self.slots[slot].tokens = 0;
        if self.slots.iter().all(|slot| slot.blocks.is_empty()) {
            self.free = Vec::new();
        }
    }

    /// A copy of the keys and values of some of a slot's tokens.
    pub(super) fn read(&self, slot: usize, tokens: Range<usize>) -> CachedRows {
        assert!(tokens.end <= self.slots[slot].tokens, "tokens that are there");
        let width = self.heads * self.head_dim;
        let [mut keys, mut values] = [(); 2].map(|()| Vec::with_capacity(tokens.len() * width));
        for token in tokens {
            for head in 0..self.heads {
                let block = self.head(slot, head).block(token / BLOCK);
                let place = token % BLOCK;
                keys.extend(block.keys.chunks_exact(BLOCK).map(|of_dimension| of_dimension[place]));
                values.extend_from_slice(&block.values[place * self.head_dim..][..self.head_dim]);
            }
        }
        CachedRows { keys, values }
    }

    /// Puts such a copy behind a slot's tokens.
    pub(super) fn extend(&mut self, slot: usize, rows: &CachedRows) {
        self.store(slot, self.slots[slot].tokens, &rows.keys, &rows.values);
    }

    /// A head of a slot.
    pub(super) fn head(&self, slot: usize, head: usize) -> CachedHead<'_> {
        CachedHead { cache: self, slot: &self.slots[slot], head }
    }

    /// Stores rows of keys and values of a slot from some token on, behind which nothing stays.
    fn store(&mut self, slot: usize, start: usize, keys: &[f32], values: &[f32]) {
        let (width, head_dim, of_head) = (self.heads * self.head_dim, self.head_dim, self.head_values());
        let end = start + keys.len() / width;
        let slot = &mut self.slots[slot];
        assert!(start <= slot.tokens, "tokens behind a gap");
        assert!(end <= self.capacity, "a sequence longer than its cache");
        while slot.blocks.len() < end.div_ceil(BLOCK) {
            slot.blocks.push(self.free.pop().unwrap_or_else(|| self.memory.room(self.heads * of_head)));
        }
        slot.tokens = end;
        let mut token = start;
        while token < end {
            let tokens = token..end.min((token / BLOCK + 1) * BLOCK);
            for (head, of_head) in slot.blocks[token / BLOCK].chunks_exact_mut(of_head).enumerate() {
                let (to_keys, to_values) = of_head.split_at_mut(head_dim * BLOCK);
                let row = |token: usize| (token - start) * width + head * head_dim;
                for (dimension, column) in to_keys.chunks_exact_mut(BLOCK).enumerate() {
                    tokens.clone().for_each(|token| column[token % BLOCK] = keys[row(token) + dimension]);
                }
                for token in tokens.clone() {
                    let to = &mut to_values[token % BLOCK * head_dim..][..head_dim];
                    to.copy_from_slice(&values[row(token)..][..head_dim]);
                }
            }
            token = tokens.end;
        }
    }

    /// Values of a head in a block: keys and values.
    fn head_values(&self) -> usize {
        2 * self.head_dim * BLOCK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 6;

    fn cache(slots: usize, capacity: usize) -> Cache {
        let shape =
            AttentionShape { num_attention_heads: 2, num_key_value_heads: 2, head_dim: 3, scale: 1.0, ..shape() };
        Cache::new(slots, capacity, &shape, Arc::default())
    }

    fn shape() -> AttentionShape {
        AttentionShape {
            num_attention_heads: 1,
            num_key_value_heads: 1,
            head_dim: 1,
            window: None,
            scale: 1.0,
            soft_cap: None,
        }
    }

    /// Rows of a sequence; no two values are the same.
    fn rows(sequence: usize, tokens: Range<usize>) -> CachedRows {
        let value = |index: usize| (sequence * 100_000 + index) as f32;
        let keys: Vec<f32> = (tokens.start * WIDTH..tokens.end * WIDTH).map(value).collect();
        CachedRows { values: keys.iter().map(|key| -key).collect(), keys }
    }

    fn append(cache: &mut Cache, slot: usize, sequence: usize, tokens: Range<usize>) {
        let CachedRows { keys, values } = rows(sequence, tokens.clone());
        cache.append(&keys, &values, &Documents::continued([(slot, tokens.start, tokens.len())]));
    }

    #[test]
    fn what_is_stored_is_read_whatever_the_blocks() {
        let mut cache = cache(3, 500);
        for (slot, tokens) in [(0, 0..1), (1, 0..200), (0, 1..63), (2, 0..65), (0, 63..64), (0, 64..300), (1, 200..201)]
        {
            append(&mut cache, slot, slot, tokens);
        }
        for (slot, tokens) in [(0, 0..300), (1, 0..201), (2, 0..65), (0, 60..70), (1, 130..131), (2, 64..64)] {
            assert_eq!(cache.read(slot, tokens.clone()), rows(slot, tokens));
        }
        // Part of it goes, and other tokens come in its place.
        append(&mut cache, 0, 7, 100..130);
        assert_eq!(cache.head(0, 0).tokens(), 130);
        assert_eq!(cache.read(0, 0..100), rows(0, 0..100));
        assert_eq!(cache.read(0, 100..130), rows(7, 100..130));
        let copy = cache.read(1, 0..70);
        cache.clear(2);
        cache.extend(2, &copy);
        append(&mut cache, 2, 1, 70..80);
        assert_eq!(cache.read(2, 0..80), rows(1, 0..80));
    }

    #[test]
    fn blocks_of_a_slot_that_ended_are_used_again_and_go_with_the_last() {
        let mut cache = cache(4, 640);
        for slot in 0..4 {
            append(&mut cache, slot, slot, 0..640);
        }
        let places = |cache: &Cache| {
            let blocks = [1, 2].into_iter().flat_map(|slot| &cache.slots[slot].blocks);
            blocks.map(|block| block.as_ptr()).collect::<std::collections::BTreeSet<_>>()
        };
        let before = places(&cache);
        [1, 2].into_iter().for_each(|slot| cache.clear(slot));
        append(&mut cache, 1, 9, 0..640);
        append(&mut cache, 2, 2, 0..640);
        assert_eq!(before.len(), 20);
        assert_eq!(places(&cache), before);
        assert_eq!(cache.read(1, 0..640), rows(9, 0..640));
        assert_eq!(cache.read(2, 0..640), rows(2, 0..640));
        (0..4).for_each(|slot| cache.clear(slot));
        assert!(cache.free.is_empty());
        append(&mut cache, 3, 5, 0..10);
        assert_eq!(cache.read(3, 0..10), rows(5, 0..10));
    }
}
