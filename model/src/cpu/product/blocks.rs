//! A product in blocks that fit the caches: panels of the right operand are packed, and each is multiplied with all rows of the left.
//!
//! A few panels of one block of the inner dimension stay in the second-level cache. The rows of a tile are read for each of them in
//! turn, from the first-level cache after the first, so that the left operand is read from further away once per group of panels.

use std::cell::RefCell;
use std::ops::Range;

use super::kernel::{Kernel, Tile};
use super::pack::Pack;
use super::{Finish, Target, View};

/// Words of the inner dimension in a panel, at most: three panels of 48 columns take 432 KiB, and eight rows 24 KiB.
const INNER: usize = 768;
/// Panels that are used in turn.
const GROUP: usize = 3;

thread_local! {
    /// Panels and a strip of the left operand, used by one product after the other.
    static BUFFER: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Words that begin at a cache line.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Line {
    _words: [u32; 16],
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
        let panel_words = INNER.min(a.columns()) * width;
        let words = GROUP * panel_words + INNER * K::ROWS;
        if buffer.len() * 16 < words {
            buffer.resize(words.div_ceil(16), Line::default());
        }
        let panels = buffer.as_mut_ptr().cast::<K::Word>();
        let blocks = Blocks::<'_, K, T> { a, b, finish, c, panels, panel_words };
        for first in (0..b.columns()).step_by(GROUP * width) {
            let columns = first..b.columns().min(first + GROUP * width);
            for (number, inner) in inner_blocks(a.columns()).enumerate() {
                // SAFETY: the caller vouches for the result, and the buffer is this product's alone.
                unsafe { blocks.group(columns.clone(), inner, number == 0) };
            }
        }
    });
}

/// Equal blocks of the inner dimension, the same for every part of a product.
fn inner_blocks(inner: usize) -> impl Iterator<Item = Range<usize>> {
    let length = inner.div_ceil(inner.div_ceil(INNER)).next_multiple_of(16);
    (0..inner).step_by(length).map(move |first| first..inner.min(first + length))
}

/// A product under way.
struct Blocks<'a, K: Kernel, T> {
    a: View<'a, K::Word>,
    b: View<'a, T>,
    finish: Finish<'a>,
    c: Target<'a>,
    /// Room for a group of panels, and for a strip of `a`.
    panels: *mut K::Word,
    panel_words: usize,
}

impl<K: Pack<T>, T: Copy> Blocks<'_, K, T> {
    /// Some columns of the result, as far as one block of the inner dimension goes.
    ///
    /// # Safety
    /// As for [`product`].
    unsafe fn group(&self, columns: Range<usize>, inner: Range<usize>, is_first: bool) {
        let width = K::LANES * K::VECTORS;
        let panels = || columns.clone().step_by(width).map(|first| first..columns.end.min(first + width)).enumerate();
        for (number, columns) in panels() {
            // SAFETY: the buffer has room for the group.
            unsafe { K::pack(self.b, inner.clone(), columns, self.panels.add(number * self.panel_words)) };
        }
        for first in (0..self.a.rows()).step_by(K::ROWS) {
            let rows = first..self.a.rows().min(first + K::ROWS);
            // SAFETY: the buffer has room for a strip behind the group.
            let (a, row_stride, step) = unsafe { self.left(rows.clone(), inner.clone()) };
            for (number, columns) in panels() {
                let finish = if is_first { self.finish } else { self.finish.later() };
                let c = self.c.block(rows.start, columns.start, rows.len(), columns.len());
                let tile = Tile {
                    a,
                    row_stride,
                    step,
                    inner: inner.len(),
                    // SAFETY: a panel of the group.
                    panel: unsafe { self.panels.add(number * self.panel_words) },
                    c,
                    c_stride: self.c.row_stride(),
                    columns: columns.len(),
                    finish: finish.of_columns(columns.clone()),
                };
                // SAFETY: the panel has these steps and columns, `left` saw to the rows, and `block` to the result.
                unsafe { K::tile(rows.len(), columns.len().div_ceil(K::LANES), &tile) };
            }
        }
    }

    /// Some rows of the left operand: where the first begins, and how far apart rows and steps are. Rows that do not lie
    /// contiguously are copied side by side, as the steps of a tile would otherwise each touch another page.
    ///
    /// # Safety
    /// The buffer has room for a strip behind the panels.
    unsafe fn left(&self, rows: Range<usize>, inner: Range<usize>) -> (*const K::Word, usize, usize) {
        if self.a.column_stride() == 1 {
            return (self.a.row_range(rows).column_range(inner).pointer(0, 0), self.a.row_stride(), 1);
        }
        let steps = self.a.transposed();
        // SAFETY: the caller vouches for the room.
        unsafe {
            let strip = self.panels.add(GROUP * self.panel_words);
            for (number, step) in inner.enumerate() {
                let words = &steps.row(step)[rows.clone()];
                std::ptr::copy_nonoverlapping(words.as_ptr(), strip.add(number * K::ROWS), words.len());
            }
            (strip, 1, K::ROWS)
        }
    }
}
