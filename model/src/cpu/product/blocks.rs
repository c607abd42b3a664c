//! A product in blocks that fit the caches: panels of the right operand are packed, and each is multiplied with all
//! rows of the left.
//!
//! A few panels of one block of the inner dimension stay in the second-level cache. The rows of a tile are read for
//! each of them in turn, from the first-level cache after the first, so that the left operand is read from further away
//! once per group of panels.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::kernel::Tile;
use super::pack::Pack;
use super::{Right, Side, View};
use crate::cpu::scratch::with_buffers;
use crate::cpu::simd::{Multiplier, Vector, prefetch};

/// Words of the inner dimension in a panel, at most: four panels of 48 columns take 576 KiB, and eight rows 24 KiB.
const INNER: usize = 768;
/// Panels that are used in turn.
const GROUP: usize = 4;
/// Steps along the inner dimension that are copied together where each lies on another page.
const STEPS: usize = 16;
/// Tiles that a panel is packed for, at least, where its words can be read in place.
const IN_PLACE: usize = 2;
/// Rows of the left operand that are copied at once, where they do not lie contiguously.
const COPIED_ROWS: usize = 480;

/// Words of a cache line.
const LINE: usize = 16;

/// Runs a function with a buffer of so many words, which are whatever they are.
pub(in crate::cpu) fn with_words<R>(words: usize, run: impl FnOnce(*mut u32) -> R) -> R {
    with_buffers([words], |[buffer]| run(buffer.cast()))
}

/// `c (+)= scale · a · b (+ bias)` of each side by the calling thread, the inner dimension in words of `a`.
///
/// # Safety
/// The machine has the kernel's instructions, the sides are of one shape, and nobody else may read or write the `a.rows
/// × b.columns` elements of each `c` meanwhile.
pub(super) unsafe fn product<K: Pack<R>, R: Right>(a: View<'_, K::Word>, sides: &[Side<'_, R>]) {
    let columns = sides[0].b.columns();
    assert!(sides.iter().all(|side| side.b.columns() == columns), "sides of one shape");
    let width = K::LANES * K::Sums::TILE_VECTORS;
    let is_copied = a.column_stride() != 1;
    let inner_words = INNER.min(a.columns());
    let panel_words = inner_words.next_multiple_of(K::STEPS) * width;
    let copied_rows = if is_copied { COPIED_ROWS.min(a.rows().next_multiple_of(K::Sums::TILE_ROWS)) } else { 0 };
    with_words(GROUP * panel_words + copied_rows * inner_words, |buffer| {
        let side_panels = columns.div_ceil(width);
        let blocks = Blocks::<'_, K, R> { a, sides, side_panels, buffer: buffer.cast(), panel_words };
        let groups = || blocks_of(sides.len() * side_panels, GROUP);
        // SAFETY: the caller vouches for the results, and the buffer is this product's alone.
        unsafe {
            if is_copied {
                for rows in blocks_of(a.rows(), COPIED_ROWS) {
                    for inner in inner_blocks(a.columns(), INNER) {
                        blocks.copy_rows(rows.clone(), inner.clone());
                        groups().for_each(|panels| blocks.group(rows.clone(), panels, inner.clone()));
                    }
                }
            } else if a.columns() <= sides.len() * columns {
                // The smaller operand is gone through again and again: here the left one, else the result.
                for panels in groups() {
                    inner_blocks(a.columns(), INNER).for_each(|inner| blocks.group(0..a.rows(), panels.clone(), inner));
                }
            } else {
                for inner in inner_blocks(a.columns(), INNER) {
                    groups().for_each(|panels| blocks.group(0..a.rows(), panels, inner.clone()));
                }
            }
        }
    });
}

/// An extent in blocks of a length, the last one shorter.
pub(super) fn blocks_of(extent: usize, length: usize) -> impl Iterator<Item = Range<usize>> {
    (0..extent).step_by(length).map(move |first| first..extent.min(first + length))
}

/// Equal blocks of the inner dimension, of so many words at most: the same for every part of a product.
pub(super) fn inner_blocks(inner: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    blocks_of(inner, inner.div_ceil(inner.div_ceil(most)).next_multiple_of(LINE))
}

/// Products under way.
struct Blocks<'a, K: Multiplier, R> {
    a: View<'a, K::Word>,
    sides: &'a [Side<'a, R>],
    /// Panels of each side; those of the next one follow.
    side_panels: usize,
    /// Room for a group of panels and, behind it, for rows of `a` that are copied.
    buffer: *mut K::Word,
    panel_words: usize,
}

impl<K: Pack<R>, R: Right> Blocks<'_, K, R> {
    /// Panels: their number in the group, whose they are, and of which columns.
    fn panels(&self, group: &Range<usize>) -> impl Iterator<Item = (usize, &Side<'_, R>, Range<usize>)> {
        let width = K::LANES * K::Sums::TILE_VECTORS;
        group.clone().enumerate().map(move |(number, panel)| {
            let (side, first) = (&self.sides[panel / self.side_panels], panel % self.side_panels * width);
            (number, side, first..side.b.columns().min(first + width))
        })
    }

    /// Blocks of the results, as far as one block of the inner dimension goes.
    ///
    /// # Safety
    /// As for [`product`].
    unsafe fn group(&self, rows: Range<usize>, group: Range<usize>, inner: Range<usize>) {
        // SAFETY: the buffer has room for a group.
        let panel = |number| unsafe { self.buffer.add(number * self.panel_words) };
        // A panel that few tiles go through is not worth packing.
        let in_place = |side: &Side<'_, R>, columns: &Range<usize>| {
            if self.a.rows() <= IN_PLACE * K::Sums::TILE_ROWS { K::in_place(side.b, &inner, columns) } else { None }
        };
        // Contiguous rows are gone along a few at a time, through all panels; contiguous columns one panel after the
        // other.
        let length = if self.sides[0].b.strides().1 == 1 { STEPS } else { inner.len() };
        for steps in blocks_of(inner.len(), length) {
            for (number, side, columns) in self.panels(&group) {
                if in_place(side, &columns).is_some() {
                    continue;
                }
                let steps = inner.start + steps.start..inner.start + steps.end;
                let first = (steps.start - inner.start) * columns.len().next_multiple_of(K::LANES);
                // SAFETY: as above.
                unsafe { K::pack(side.b, steps, columns, panel(number).add(first)) };
            }
        }
        for (tile_number, first) in rows.clone().step_by(K::Sums::TILE_ROWS).enumerate() {
            let count = K::Sums::TILE_ROWS.min(rows.end - first);
            let (a, row_stride, step) = self.left(tile_number, first, &inner);
            for (number, side, columns) in self.panels(&group) {
                let finish = if inner.start == 0 { side.finish } else { side.finish.later() };
                let packed = || (panel(number).cast_const(), columns.len().next_multiple_of(K::LANES));
                let (panel, panel_step) = in_place(side, &columns).unwrap_or_else(packed);
                let operands = Tile {
                    a,
                    row_stride,
                    step,
                    inner: inner.len(),
                    panel,
                    panel_step,
                    c: side.c.block(first, columns.start, count, columns.len()),
                    c_stride: side.c.row_stride(),
                    columns: columns.len(),
                    finish: finish.of_columns(columns.clone()),
                };
                // SAFETY: the panel has these steps and columns, `left` saw to the rows, and `block` to the result.
                unsafe { K::tile(count, columns.len().div_ceil(K::LANES), &operands) };
            }
        }
    }

    /// A tile's rows of the left operand: where the first begins, and how far apart rows and steps are.
    fn left(&self, tile: usize, first: usize, inner: &Range<usize>) -> (*const K::Word, usize, usize) {
        if self.a.column_stride() == 1 {
            (self.a.pointer(first, inner.start), self.a.row_stride(), 1)
        } else {
            (self.copied().wrapping_add(tile * inner.len() * K::Sums::TILE_ROWS), 1, K::Sums::TILE_ROWS)
        }
    }

    /// Where copied rows begin.
    fn copied(&self) -> *mut K::Word {
        self.buffer.wrapping_add(GROUP * self.panel_words)
    }

    /// Copies rows of the left operand, those of each tile side by side, as steps that lie far apart would each be on
    /// another page.
    ///
    /// # Safety
    /// The buffer has room for them.
    unsafe fn copy_rows(&self, rows: Range<usize>, inner: Range<usize>) {
        /// Words ahead that memory is asked for.
        const AHEAD: usize = 4 * LINE;
        let length = inner.len() * K::Sums::TILE_ROWS;
        for steps in blocks_of(inner.len(), STEPS) {
            for (tile, first) in rows.clone().step_by(K::Sums::TILE_ROWS).enumerate() {
                let count = K::Sums::TILE_ROWS.min(rows.end - first);
                for step in steps.clone() {
                    let words = self.a.pointer(first, inner.start + step);
                    prefetch(words.wrapping_add(AHEAD));
                    // SAFETY: the caller vouches for the room, and the words are of a column of `a`, which lies
                    // contiguously.
                    unsafe {
                        let copy = self.copied().add(tile * length + step * K::Sums::TILE_ROWS);
                        if count == K::Sums::TILE_ROWS {
                            std::ptr::copy_nonoverlapping(words, copy, K::Sums::TILE_ROWS);
                        } else {
                            copy_few(words, copy, count);
                        }
                    }
                }
            }
        }
    }
}

/// Copies words, out of line so that the copy of a whole step, whose length is known, is not joined with it.
///
/// # Safety
/// So many may be read and written.
#[cold]
#[inline(never)]
unsafe fn copy_few<W: Copy>(from: *const W, to: *mut W, count: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { std::ptr::copy_nonoverlapping(from, to, count) }
}
