//! Attention of new rows over the cached keys and values of their sequence, in f32.
//!
//! A few rows, as decoding has them, would leave most lanes of a block of rows empty: their scores lie with the keys in
//! lanes instead. Each element comes of the same sums in the same order either way, to the bit where numbers are
//! finite.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::forward::{Buffers, Forward, KeyBlocks, correct, finish, forward_block};
use super::operands::{Extent, Left, Output, Product, Right};
use super::softmax::{Block, exponentials_of_rows};
use super::{Columns, KEYS, Scale, tile};
use crate::cpu::cache::{self, CachedHead};
use crate::cpu::instructions::InstructionSet;
use crate::cpu::simd::{Floats, Routine, Vector};

const _: () = assert!(cache::BLOCK == KEYS, "a block of the cache is a block of keys");

/// Rows that are few: those of one vector of the widest set.
const FEW: usize = 16;

/// Computes the output of one block of rows over cached keys and values.
///
/// # Safety
/// The machine has the instructions, and nobody else may touch these rows of the results meanwhile.
pub(in crate::cpu) unsafe fn forward_cached(
    set: InstructionSet,
    head: &Forward<'_>,
    queries: Columns<'_>,
    cached: CachedHead<'_>,
    rows: Range<usize>,
) {
    let Forward { shape, mask, .. } = head;
    queries.check(mask.queries, mask.group * shape.head_dim);
    assert!(cached.is_of(shape), "a cache for this shape");
    assert!(cached.tokens() == mask.start + mask.queries, "keys and values of these tokens");
    Buffers::with(shape.head_dim, |buffers| {
        // SAFETY: the buffers have their lengths, queries and cache were checked, and the caller vouches for the rest.
        unsafe { set.run(OverCache { set, head, queries, cached, rows, buffers }) };
    });
}

/// A block of rows.
struct OverCache<'a> {
    set: InstructionSet,
    head: &'a Forward<'a>,
    queries: Columns<'a>,
    cached: CachedHead<'a>,
    rows: Range<usize>,
    buffers: Buffers,
}

impl Routine for OverCache<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller vouches for buffers, operands and results.
        unsafe {
            if self.rows.len() <= FEW {
                few_rows::<V>(self);
            } else {
                forward_block::<Floats<V>, _>(self.set, self.queries, self.cached, self.head, self.rows, self.buffers);
            }
        }
    }
}

impl<V: Vector> KeyBlocks<Floats<V>> for CachedHead<'_> {
    #[inline(always)]
    fn keys(self, first: usize) -> Left<f32> {
        Left { words: self.block(first / KEYS).keys.as_ptr(), row_stride: 1, inner_stride: KEYS }
    }

    #[inline(always)]
    unsafe fn values(self, keys: Range<usize>, head_dim: usize, _: *mut f32, _: usize) -> Right<f32> {
        Right { words: self.block(keys.start / KEYS).values.as_ptr(), stride: head_dim }
    }
}

/// What [`forward_block`] computes, of up to [`FEW`] rows.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn few_rows<V: Vector>(of: OverCache<'_>) {
    let OverCache { set: _, head, queries, cached, rows, buffers } = of;
    let Forward { shape, mask, .. } = head;
    let head_dim = shape.head_dim;
    let Buffers { columns: own, scores, sums, running, stride, .. } = buffers;
    // SAFETY: the caller vouches for buffers, operands and results.
    unsafe {
        for (index, row) in rows.clone().enumerate() {
            let query = queries.of_row(mask, row, head_dim);
            std::ptr::copy_nonoverlapping(query.as_ptr(), own.add(index * head_dim), head_dim);
        }
        running.begin::<V>();
        let seen = mask.keys(&rows);
        let first = seen.start / KEYS * KEYS;
        for key in (first..seen.end).step_by(KEYS) {
            let of_block = cached.block(key / KEYS);
            // No stream that a machine follows by itself goes from one block to the next.
            let next = if key + KEYS < seen.end { cached.block(key / KEYS + 1) } else { of_block };
            let keys = key..(mask.start + mask.queries).min(key + KEYS);
            let block = Block { mask, rows: rows.clone(), keys, scale: Scale::of(shape) };
            let add = key > first;
            let of_scores = Product {
                left: Left { words: own, row_stride: head_dim, inner_stride: 1 },
                right: Right { words: of_block.keys.as_ptr(), stride: KEYS },
                output: Output { values: scores, stride: KEYS, add: false },
                rows: rows.len(),
                extent: &|rows| {
                    let keys = block.seen(rows);
                    let columns = keys.start / V::LANES * V::LANES..keys.end.next_multiple_of(V::LANES);
                    Extent { inner: 0..head_dim, columns }
                },
            };
            tile::few_rows::<Floats<V>>(&of_scores, next.keys.as_ptr());
            let changed = exponentials_of_rows::<V>(&block, scores, running);
            if changed && add {
                correct::<Floats<V>>(sums, stride, running.correction, rows.len());
            }
            let of_sums = Product {
                left: Left { words: scores, row_stride: KEYS, inner_stride: 1 },
                right: Right { words: of_block.values.as_ptr(), stride: head_dim },
                output: Output { values: sums, stride, add },
                rows: rows.len(),
                extent: &|rows| Extent { inner: block.seen(rows), columns: 0..head_dim },
            };
            tile::few_rows::<Floats<V>>(&of_sums, next.values.as_ptr());
        }
        finish(head, rows, buffers);
    }
}
