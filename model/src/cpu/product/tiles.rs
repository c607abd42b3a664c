//! A product in tiles, of pairs of bf16 or of f32 that are split into such.
//!
//! Panels of some columns stay in the second-level cache, and 32 rows at a time are gone along for all of them, in
//! pieces of the inner dimension that stay in the first-level cache. Each element is summed over tiles along a block of
//! the inner dimension, ascending, and blocks depend on its length alone: neither other rows and columns nor how a
//! product is cut have a say in its bits.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::blocks::{blocks_of, inner_blocks, with_words};
use super::kernel::store;
use super::operands::{Left, Operands, strips_of_right};
use super::{Finish, Right, Side};
use crate::cpu::amx::{Ready, SIDE, SUMS_ROW, Square, Strips, TILE, Tiles};
use crate::cpu::simd::{Avx512Bf16, Multiplier, Routine, Vector};
use crate::ops::Write;

/// Rows, and columns, of a square of sums.
const SQUARE: usize = 2 * SIDE;
/// Words of the inner dimension whose sums go on from tile to tile, at most: results that are larger than a cache would
/// be read and written again with each further block.
const INNER: usize = 1024;
/// Squares of columns, at most, whose panels are used in turn.
const GROUP: usize = 16;
/// And tiles of them along the inner dimension: of 32 columns each, they take 1 MiB.
const GROUP_STEPS: usize = 512;
/// Words along the inner dimension, whole tiles, that are packed together of columns whose rows lie contiguously.
const ROWS: usize = SIDE;
/// Tiles along the inner dimension of a piece, at most: those of 32 rows take 36 KiB.
const PIECE: usize = 18;

/// `c (+)= scale · a · b (+ bias)` of each side by the calling thread.
///
/// # Safety
/// The machine has [`Avx512Bf16`]'s instructions and the process the permission to use `T`, the sides are of one shape,
/// and nobody else may read or write the `a.rows × b.columns` elements of each `c` meanwhile.
pub(super) unsafe fn product<T: Tiles, O: Operands<R>, R: Right>(a: &O, sides: &[Side<'_, R>]) {
    let (rows, words) = a.left()[0].shape();
    if words == 0 {
        // SAFETY: the caller vouches for all of each result.
        return sides.iter().for_each(|side| unsafe { side.nothing(rows) });
    }
    let strip = INNER.min(words).next_multiple_of(SIDE) * SIDE;
    let squares = sides[0].b.columns().div_ceil(SQUARE);
    // What stays in a cache is as much, however many matrices it is of.
    let most = (GROUP_STEPS / (strip / TILE).max(1)).clamp(1, GROUP) / O::MATRICES;
    let group = squares.div_ceil(squares.div_ceil(most.max(1)).max(1));
    let (left_matrix, right_matrix) = (2 * strip, 2 * group * strip);
    let (strips, sums) = (O::MATRICES * (left_matrix + right_matrix), group * SQUARE * SQUARE);
    with_words(strips + sums, |buffer| {
        let left = buffer;
        // SAFETY: the buffer has room for two strips of the left operand, those of a group, and its sums.
        let (right, sums) = unsafe { (left.add(O::MATRICES * left_matrix), left.add(strips).cast::<f32>()) };
        // SAFETY: the caller vouches for the permission.
        let _ready = unsafe { Ready::<T>::new() };
        for inner in inner_blocks(words, INNER) {
            for side in sides {
                for columns in blocks_of(side.b.columns(), group * SQUARE) {
                    let inner = inner.clone();
                    let of = Group { a, side, inner, columns, strip, left_matrix, right_matrix, left, right, sums };
                    // SAFETY: the caller vouches for operands and results.
                    unsafe {
                        of.pack_right();
                        blocks_of(rows, SQUARE).for_each(|rows| of.rows::<T>(rows));
                    }
                }
            }
        }
    });
}

/// Some columns of a product, as far as one block of the inner dimension goes.
struct Group<'a, O, R> {
    a: &'a O,
    side: &'a Side<'a, R>,
    inner: Range<usize>,
    columns: Range<usize>,
    /// Words from one strip of 16 rows or columns to the next.
    strip: usize,
    /// Words from one matrix of the left operand to the next, and of the right one.
    left_matrix: usize,
    right_matrix: usize,
    left: *mut u32,
    right: *mut u32,
    sums: *mut f32,
}

impl<O: Operands<R>, R: Right> Group<'_, O, R> {
    /// Tiles along the inner dimension.
    fn steps(&self) -> usize {
        self.inner.len().div_ceil(SIDE)
    }

    /// Packs the columns, 32 at a time: a few rows of a matrix that lies in rows, so that these are read from end to
    /// end, or else all of them.
    ///
    /// # Safety
    /// The machine has the instructions, and the buffer the room.
    unsafe fn pack_right(&self) {
        let lies_in_rows = self.side.b.strides().1 == 1;
        for words in blocks_of(self.inner.len(), if lies_in_rows { ROWS } else { self.inner.len() }) {
            for (number, columns) in blocks_of(self.columns.len(), SQUARE).enumerate() {
                let columns = self.columns.start + columns.start..self.columns.start + columns.end;
                let first = words.start * columns.len().next_multiple_of(SIDE);
                let words = self.inner.start + words.start..self.inner.start + words.end;
                // SAFETY: the caller vouches for both.
                unsafe {
                    let to = self.right.add(2 * number * self.strip + first);
                    self.a.pack_right(self.side.b, columns, words, to, self.right_matrix);
                }
            }
        }
    }

    /// Packs up to 32 rows, 16 at a time.
    ///
    /// # Safety
    /// As for [`Group::pack_right`].
    unsafe fn pack_left(&self, rows: &Range<usize>) {
        for (number, part) in blocks_of(rows.len(), SIDE).enumerate() {
            let rows = rows.start + part.start..rows.start + part.end;
            for (matrix, left) in self.a.left().iter().enumerate() {
                // SAFETY: the caller vouches for both.
                unsafe {
                    let to = self.left.add(matrix * self.left_matrix + number * self.strip);
                    left.pack(rows.clone(), self.inner.clone(), to);
                }
            }
        }
    }

    /// The products of up to 32 rows.
    ///
    /// # Safety
    /// The thread is ready; and as for [`product`].
    unsafe fn rows<T: Tiles>(&self, rows: Range<usize>) {
        let (steps, squares) = (self.steps(), self.columns.len().div_ceil(SQUARE));
        let pieces = steps.div_ceil(PIECE / O::MATRICES);
        let piece = steps.div_ceil(pieces);
        // Where there are no more than 16 rows or columns the other tiles are the same ones again, and nobody reads
        // what becomes of them.
        let second = |count: usize| if count > SIDE { self.strip } else { 0 };
        let packed =
            |matrix: usize| Strips::packed(self.left.wrapping_add(matrix * self.left_matrix), second(rows.len()));
        let right = |matrix: usize, square: usize| {
            let first = self.right.wrapping_add(matrix * self.right_matrix + 2 * square * self.strip);
            strips_of_right(first, SQUARE.min(self.columns.len() - square * SQUARE))
        };
        // SAFETY: the buffers have the tiles, which are packed; the caller vouches for the results.
        unsafe {
            let in_place = |left: &O::Left| left.in_place(&rows, &self.inner, O::MATRICES * piece);
            let is_in_place = self.a.left().iter().all(|left| in_place(left).is_some());
            if !is_in_place {
                self.pack_left(&rows);
            }
            let left: [Strips; 2] = [0, O::MATRICES - 1].map(|matrix| {
                in_place(&self.a.left()[matrix]).filter(|_| is_in_place).unwrap_or_else(|| packed(matrix))
            });
            for piece in blocks_of(steps, piece) {
                for square in 0..squares {
                    // Those of one piece are finished before the next ones are summed in their place.
                    let buffer = self.sums.add(if pieces > 1 { square * SQUARE * SQUARE } else { 0 });
                    let result = self.whole_square(&rows, square);
                    let (sums, sums_row) =
                        result.map_or((buffer, SUMS_ROW), |c| (c, self.side.c.row_stride() * size_of::<f32>()));
                    let rests = [left[1], right(1, square)].map(|strips| strips.from(piece.start).first);
                    T::square(&Square {
                        left: left[0].from(piece.start),
                        right: right(0, square).from(piece.start),
                        rests: (O::MATRICES > 1).then_some(rests),
                        steps: piece.len(),
                        sums,
                        sums_row,
                        go_on: piece.start > 0,
                    });
                    if piece.end == steps && result.is_none() {
                        self.finish(sums, &rows, square);
                    }
                }
            }
        }
    }

    /// Where a square of the result lies of which nothing becomes but its sums: they are written there at once.
    fn whole_square(&self, rows: &Range<usize>, square: usize) -> Option<*mut f32> {
        let Finish { scale, bias, write } = self.side.finish;
        let are_sums = self.inner.start == 0 && scale == 1.0 && bias.is_none() && write == Write::Replace;
        let first = self.columns.start + square * SQUARE;
        let is_whole = rows.len() == SQUARE && first + SQUARE <= self.columns.end;
        (are_sums && is_whole).then(|| self.side.c.block(rows.start, first, SQUARE, SQUARE))
    }

    /// Finishes the sums of a square.
    ///
    /// # Safety
    /// As for [`product`].
    unsafe fn finish(&self, sums: *const f32, rows: &Range<usize>, square: usize) {
        let first = self.columns.start + square * SQUARE;
        let columns = first..self.columns.end.min(first + SQUARE);
        let finish = if self.inner.start == 0 { self.side.finish } else { self.side.finish.later() };
        let of_square = Finished {
            sums,
            rows: rows.len(),
            columns: columns.len(),
            finish: finish.of_columns(columns.clone()),
            c: self.side.c.block(rows.start, columns.start, rows.len(), columns.len()),
            c_stride: self.side.c.row_stride(),
        };
        // SAFETY: the caller vouches for machine and results.
        unsafe { Avx512Bf16::compiled(of_square) }
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
