//! A product of pairs of bf16 in tiles.
//!
//! Panels of some columns stay in the second-level cache, and 32 rows at a time are gone along for all of them, in
//! pieces of the inner dimension that stay in the first-level cache. Each element is summed over tiles along a block of
//! the inner dimension, ascending, and blocks depend on its length alone: neither other rows and columns nor how a
//! product is cut have a say in its bits.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::ops::Range;

use super::blocks::{INNER, blocks_of, inner_blocks, with_words};
use super::kernel::store;
use super::{Finish, PairsRight, Side, View};
use crate::cpu::amx::{SIDE, Square, TILE, Tiles};
use crate::cpu::simd::{Avx512Bf16, Multiplier, Routine, Vector};

/// Rows, and columns, of a square of sums.
const SQUARE: usize = 2 * SIDE;
/// Squares of columns whose panels are used in turn: with as many words along the inner dimension as there are at most,
/// they take 768 KiB.
const GROUP: usize = 8;
/// Tiles along the inner dimension of a piece: those of 32 rows take 36 KiB.
const PIECE: usize = 18;

/// `c (+)= scale · a · b (+ bias)` of each side by the calling thread, the inner dimension in words of `a`.
///
/// # Safety
/// The machine has [`Avx512Bf16`]'s instructions and the process the permission to use `T`, the sides are of one shape,
/// and nobody else may read or write the `a.rows × b.columns` elements of each `c` meanwhile.
pub(super) unsafe fn product<T: Tiles, R: PairsRight>(a: View<'_, u32>, sides: &[Side<'_, R>]) {
    let strip = INNER.min(a.columns()).next_multiple_of(SIDE) * SIDE;
    let (strips, sums) = ((2 + 2 * GROUP) * strip, GROUP * SQUARE * SQUARE);
    with_words(strips + sums, |buffer| {
        let left = buffer;
        // SAFETY: the buffer has room for two strips of the left operand, those of a group, and its sums.
        let (right, sums) = unsafe { (left.add(2 * strip), left.add(strips).cast::<f32>()) };
        // SAFETY: the caller vouches for the permission.
        let _ready = unsafe { Ready::<T>::new() };
        for inner in inner_blocks(a.columns()) {
            for side in sides {
                for columns in blocks_of(side.b.columns(), GROUP * SQUARE) {
                    let of = Group { a, side, inner: inner.clone(), columns, strip, left, right, sums };
                    // SAFETY: the caller vouches for operands and results.
                    unsafe {
                        of.pack_right();
                        blocks_of(a.rows(), SQUARE).for_each(|rows| of.rows::<T>(rows));
                    }
                }
            }
        }
    });
}

/// The calling thread is ready for tiles, and has none in use afterwards: while it waits, nothing is saved for it.
struct Ready<T: Tiles>(PhantomData<T>);

impl<T: Tiles> Ready<T> {
    /// # Safety
    /// As for [`Tiles::begin`].
    unsafe fn new() -> Self {
        // SAFETY: the caller vouches for it.
        unsafe { T::begin() };
        Self(PhantomData)
    }
}

impl<T: Tiles> Drop for Ready<T> {
    fn drop(&mut self) {
        // SAFETY: whoever made this had the permission.
        unsafe { T::end() }
    }
}

/// Some columns of a product, as far as one block of the inner dimension goes.
struct Group<'a, R> {
    a: View<'a, u32>,
    side: &'a Side<'a, R>,
    inner: Range<usize>,
    columns: Range<usize>,
    /// Words from one strip of 16 rows or columns to the next.
    strip: usize,
    left: *mut u32,
    right: *mut u32,
    sums: *mut f32,
}

impl<R: PairsRight> Group<'_, R> {
    /// Tiles along the inner dimension.
    fn steps(&self) -> usize {
        self.inner.len().div_ceil(SIDE)
    }

    /// Packs the columns, 16 at a time: a panel of so many is right tiles behind one another.
    ///
    /// # Safety
    /// The machine has the instructions, and the buffer the room.
    unsafe fn pack_right(&self) {
        for (number, columns) in blocks_of(self.columns.len(), SIDE).enumerate() {
            let columns = self.columns.start + columns.start..self.columns.start + columns.end;
            let words = self.inner.len() * SIDE;
            // SAFETY: the caller vouches for both.
            unsafe {
                let panel = self.right.add(number * self.strip);
                self.side.b.pack_pairs(self.inner.clone(), columns, panel);
                panel.add(words).write_bytes(0, self.steps() * TILE - words);
            }
        }
    }

    /// Packs up to 32 rows: copies them, a tile behind the other.
    ///
    /// # Safety
    /// The buffer has the room.
    unsafe fn pack_left(&self, rows: &Range<usize>) {
        for (number, rows) in
            blocks_of(rows.len(), SIDE).map(|of| rows.start + of.start..rows.start + of.end).enumerate()
        {
            for (line, row) in (rows.start..rows.start + SIDE).enumerate() {
                let words: &[u32] = if row < rows.end { &self.a.row(row)[self.inner.clone()] } else { &[] };
                let (whole, rest) = words.as_chunks::<SIDE>();
                // SAFETY: the caller vouches for the room.
                unsafe {
                    let mut to = self.left.add(number * self.strip + line * SIDE).cast::<[u32; SIDE]>();
                    for words in whole {
                        to.write(*words);
                        to = to.add(SIDE);
                    }
                    if whole.len() < self.steps() {
                        let mut words = [0; SIDE];
                        words[..rest.len()].copy_from_slice(rest);
                        to.write(words);
                        to = to.add(SIDE);
                    }
                    // Of a row that is none, all are zero.
                    for _ in whole.len() + 1..self.steps() {
                        to.write([0; SIDE]);
                        to = to.add(SIDE);
                    }
                }
            }
        }
    }

    /// The products of up to 32 rows.
    ///
    /// # Safety
    /// The thread is ready; and as for [`product`].
    unsafe fn rows<T: Tiles>(&self, rows: Range<usize>) {
        let squares = self.columns.len().div_ceil(SQUARE);
        // Where there are no more than 16 rows or columns the other tiles are the same ones again, and nobody reads
        // what becomes of them.
        let second = |count: usize| if count > SIDE { self.strip } else { 0 };
        // SAFETY: the buffers have the tiles, which are packed; the caller vouches for the results.
        unsafe {
            self.pack_left(&rows);
            for piece in blocks_of(self.steps(), PIECE) {
                for square in 0..squares {
                    T::square(&Square {
                        left: self.left.add(piece.start * TILE),
                        left_stride: second(rows.len()),
                        right: self.right.add(2 * square * self.strip + piece.start * TILE),
                        right_stride: second(self.columns.len() - square * SQUARE),
                        steps: piece.len(),
                        sums: self.sums.add(square * SQUARE * SQUARE),
                        go_on: piece.start > 0,
                    });
                }
            }
            for (square, columns) in blocks_of(self.columns.len(), SQUARE).enumerate() {
                let columns = self.columns.start + columns.start..self.columns.start + columns.end;
                let finish = if self.inner.start == 0 { self.side.finish } else { self.side.finish.later() };
                Avx512Bf16::compiled(Finished {
                    sums: self.sums.add(square * SQUARE * SQUARE),
                    rows: rows.len(),
                    columns: columns.len(),
                    finish: finish.of_columns(columns.clone()),
                    c: self.side.c.block(rows.start, columns.start, rows.len(), columns.len()),
                    c_stride: self.side.c.row_stride(),
                });
            }
        }
    }
}

/// A square's sums, or those of them that are of the result, and what becomes of them.
struct Finished<'a> {
    sums: *const f32,
    rows: usize,
    columns: usize,
    finish: Finish<'a>,
    c: *mut f32,
    c_stride: usize,
}

impl Routine for Finished<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let bias = self.finish.bias.map_or(std::ptr::null(), <[f32]>::as_ptr);
        for row in 0..self.rows {
            for first in (0..self.columns).step_by(V::LANES) {
                let lanes = V::LANES.min(self.columns - first);
                // SAFETY: the sums are of a square, and the caller vouches for these elements of the result.
                unsafe {
                    let sums = V::load(self.sums.add(row * SQUARE + first));
                    let c = self.c.add(row * self.c_stride + first);
                    store(sums, lanes, &self.finish, bias.wrapping_add(first), c);
                }
            }
        }
    }
}
