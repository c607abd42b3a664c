//! A product in blocks that fit the caches: panels of the right operand are packed, and each is multiplied with all rows of the left.
//!
//! A few panels of one block of the inner dimension stay in the second-level cache. The rows of a tile are read for each of them in
//! turn, from the first-level cache after the first, so that the left operand is read from further away once per group of panels.

use std::cell::RefCell;
use std::ops::Range;

use super::kernel::{Kernel, Tile};
use super::pack::Pack;
use super::{Finish, Target, View};
use crate::cpu::simd::prefetch;

/// Words of the inner dimension in a panel, at most: four panels of 48 columns take 576 KiB, and eight rows 24 KiB.
const INNER: usize = 768;
/// Panels that are used in turn.
const GROUP: usize = 4;
/// Steps along the inner dimension that are copied together where each lies on another page.
const STEPS: usize = 16;
/// Rows of the left operand that are copied at once, where they do not lie contiguously.
const COPIED_ROWS: usize = 480;

thread_local! {
    /// Panels and rows of the left operand, used by one product after the other.
    static BUFFER: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Words of a cache line.
const LINE: usize = 16;

/// A cache line.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Line {
    _words: [u32; LINE],
}

/// `c (+)= scale · a · b (+ bias)` by the calling thread, the inner dimension in words of `a`.
///
/// # Safety
/// The machine has the kernel's instructions, and nobody else may read or write the `a.rows × b.columns` elements of `c` meanwhile.
pub(super) unsafe fn product<K: Pack<T>, T: Copy>(
    a: View<'_, K::Word>,
    b: View<'_, T>,
    finish: Finish<'_>,
    c: Target<'_>,
) {
    BUFFER.with_borrow_mut(|buffer| {
        let width = K::LANES * K::VECTORS;
        let is_copied = a.column_stride() != 1;
        let inner_words = INNER.min(a.columns());
        let panel_words = inner_words * width;
        let copied_rows = if is_copied { COPIED_ROWS.min(a.rows().next_multiple_of(K::ROWS)) } else { 0 };
        let words = GROUP * panel_words + copied_rows * inner_words;
        if buffer.len() * LINE < words {
            buffer.resize(words.div_ceil(LINE), Line::default());
        }
        let blocks = Blocks::<'_, K, T> { a, b, finish, c, buffer: buffer.as_mut_ptr().cast(), panel_words };
        let groups = || blocks_of(b.columns(), GROUP * width);
        // SAFETY: the caller vouches for the result, and the buffer is this product's alone.
        unsafe {
            if is_copied {
                for rows in blocks_of(a.rows(), COPIED_ROWS) {
                    for inner in inner_blocks(a.columns()) {
                        blocks.copy_rows(rows.clone(), inner.clone());
                        groups().for_each(|columns| blocks.group(rows.clone(), columns, inner.clone()));
                    }
                }
            } else if a.columns() <= b.columns() {
                // The smaller operand is gone through again and again: here the left one, else the result.
                for columns in groups() {
                    inner_blocks(a.columns()).for_each(|inner| blocks.group(0..a.rows(), columns.clone(), inner));
                }
            } else {
                for inner in inner_blocks(a.columns()) {
                    groups().for_each(|columns| blocks.group(0..a.rows(), columns, inner.clone()));
                }
            }
        }
    });
}

/// An extent in blocks of a length, the last one shorter.
fn blocks_of(extent: usize, length: usize) -> impl Iterator<Item = Range<usize>> {
    (0..extent).step_by(length).map(move |first| first..extent.min(first + length))
}

/// Equal blocks of the inner dimension, the same for every part of a product.
fn inner_blocks(inner: usize) -> impl Iterator<Item = Range<usize>> {
    blocks_of(inner, inner.div_ceil(inner.div_ceil(INNER)).next_multiple_of(LINE))
}

/// A product under way.
struct Blocks<'a, K: Kernel, T> {
    a: View<'a, K::Word>,
    b: View<'a, T>,
    finish: Finish<'a>,
    c: Target<'a>,
    /// Room for a group of panels and, behind it, for rows of `a` that are copied.
    buffer: *mut K::Word,
    panel_words: usize,
}

impl<K: Pack<T>, T: Copy> Blocks<'_, K, T> {
    /// A block of the result, as far as one block of the inner dimension goes.
    ///
    /// # Safety
    /// As for [`product`].
    unsafe fn group(&self, rows: Range<usize>, columns: Range<usize>, inner: Range<usize>) {
        let width = K::LANES * K::VECTORS;
        let panels = || columns.clone().step_by(width).map(|first| first..columns.end.min(first + width)).enumerate();
        // SAFETY: the buffer has room for a group.
        let panel = |number| unsafe { self.buffer.add(number * self.panel_words) };
        // Contiguous rows are gone along a few at a time, through all panels; contiguous columns one panel after the other.
        let length = if self.b.column_stride() == 1 { STEPS } else { inner.len() };
        for steps in blocks_of(inner.len(), length) {
            for (number, columns) in panels() {
                let steps = inner.start + steps.start..inner.start + steps.end;
                let first = (steps.start - inner.start) * columns.len().next_multiple_of(K::LANES);
                // SAFETY: as above.
                unsafe { K::pack(self.b, steps, columns, panel(number).add(first)) };
            }
        }
        let finish = if inner.start == 0 { self.finish } else { self.finish.later() };
        for (tile_number, first) in rows.clone().step_by(K::ROWS).enumerate() {
            let count = K::ROWS.min(rows.end - first);
            let (a, row_stride, step) = self.left(tile_number, first, &inner);
            for (number, columns) in panels() {
                let tile = Tile {
                    a,
                    row_stride,
                    step,
                    inner: inner.len(),
                    panel: panel(number),
                    c: self.c.block(first, columns.start, count, columns.len()),
                    c_stride: self.c.row_stride(),
                    columns: columns.len(),
                    finish: finish.of_columns(columns.clone()),
                };
                // SAFETY: the panel has these steps and columns, `left` saw to the rows, and `block` to the result.
                unsafe { K::tile(count, columns.len().div_ceil(K::LANES), &tile) };
            }
        }
    }

    /// A tile's rows of the left operand: where the first begins, and how far apart rows and steps are.
    fn left(&self, tile: usize, first: usize, inner: &Range<usize>) -> (*const K::Word, usize, usize) {
        if self.a.column_stride() == 1 {
            (self.a.pointer(first, inner.start), self.a.row_stride(), 1)
        } else {
            (self.copied().wrapping_add(tile * inner.len() * K::ROWS), 1, K::ROWS)
        }
    }

    /// Where copied rows begin.
    fn copied(&self) -> *mut K::Word {
        self.buffer.wrapping_add(GROUP * self.panel_words)
    }

    /// Copies rows of the left operand, those of each tile side by side, as steps that lie far apart would each be on another page.
    ///
    /// # Safety
    /// The buffer has room for them.
    unsafe fn copy_rows(&self, rows: Range<usize>, inner: Range<usize>) {
        /// Words ahead that memory is asked for.
        const AHEAD: usize = 4 * LINE;
        let length = inner.len() * K::ROWS;
        for steps in blocks_of(inner.len(), STEPS) {
            for (tile, first) in rows.clone().step_by(K::ROWS).enumerate() {
                let count = K::ROWS.min(rows.end - first);
                for step in steps.clone() {
                    let words = self.a.pointer(first, inner.start + step);
                    prefetch(words.wrapping_add(AHEAD));
                    // SAFETY: the caller vouches for the room, and the words are of a column of `a`, which lies contiguously.
                    unsafe {
                        let copy = self.copied().add(tile * length + step * K::ROWS);
                        if count == K::ROWS {
                            std::ptr::copy_nonoverlapping(words, copy, K::ROWS);
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
