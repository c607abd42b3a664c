//! Operands of products in tiles: how a left and a right one become packed tiles, and which of the packed ones are
//! multiplied.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use half::bf16;

use super::pack::avx512::transpose_tile;
use super::{Element, InstructionSet, PairsRight, Right, View};
use crate::cpu::amx::{SIDE, Strips, TILE};
use crate::cpu::instructions::multiversion;
use crate::cpu::rounding::nearest;

/// A left operand, and how right ones are packed beside it. Words are pairs of values along the inner dimension.
pub(super) trait Operands<R> {
    /// Packed matrices that an operand becomes.
    const MATRICES: usize;
    /// Which of the left and of the right ones are multiplied, summed in this order.
    const PRODUCTS: &'static [(usize, usize)];

    /// Rows, and words of a row.
    fn shape(&self) -> (usize, usize);

    /// The tiles of up to 32 rows where they lie, if they are whole tiles of one matrix there and those of `piece`
    /// steps along the inner dimension do not displace each other in the first-level cache.
    fn left_in_place(&self, _rows: &Range<usize>, _words: &Range<usize>, _piece: usize) -> Option<Strips> {
        None
    }

    /// Packs up to 16 rows, whole tiles behind one another with zeros beyond the last row and word; each matrix
    /// `matrix` words behind the one before.
    ///
    /// # Safety
    /// There is room for so many tiles, and the machine has [`crate::cpu::simd::Avx512Bf16`]'s instructions.
    unsafe fn pack_left(&self, rows: Range<usize>, words: Range<usize>, to: *mut u32, matrix: usize);

    /// Packs up to 32 columns of a right operand, the rows of two tiles side by side. A line of the cache has so many
    /// bf16 of a matrix that lies in rows, and is read once.
    ///
    /// # Safety
    /// As for [`Operands::pack_left`].
    unsafe fn pack_right(&self, b: R, columns: Range<usize>, words: Range<usize>, to: *mut u32, matrix: usize);
}

/// The tiles of so many columns that [`Operands::pack_right`] has packed: a row of both strips after the other.
pub(super) fn strips_of_right(first: *const u32, columns: usize) -> Strips {
    let row = columns.next_multiple_of(SIDE) * size_of::<u32>();
    // Of 16 columns, the second strip is the first again.
    Strips { first, next: row - SIDE * size_of::<u32>(), row, step: SIDE * row }
}

/// Bytes of a cache line, and of a row of a tile.
const LINE: usize = 64;

/// Whether 32 rows, so many lines apart, of so many lines stay in a first-level cache with 64 sets of 12 lines: it is
/// to hold other things beside.
fn fits_first_level(distance: usize, lines: usize) -> bool {
    const SETS: usize = 64;
    const WAYS: usize = 10;
    // Rows begin in sets that are as far apart as the largest power of two that divides their distance.
    let apart = 1 << distance.trailing_zeros().min(SETS.trailing_zeros());
    (2 * SIDE * apart).div_ceil(SETS) * lines.div_ceil(apart) <= WAYS
}

/// Pairs of bf16 as they are.
pub(super) struct Pairs<'a>(pub View<'a, u32>);

impl<R: PairsRight> Operands<R> for Pairs<'_> {
    const MATRICES: usize = 1;
    const PRODUCTS: &'static [(usize, usize)] = &[(0, 0)];

    fn shape(&self) -> (usize, usize) {
        (self.0.rows(), self.0.columns())
    }

    fn left_in_place(&self, rows: &Range<usize>, words: &Range<usize>, piece: usize) -> Option<Strips> {
        let are_whole = rows.len().is_multiple_of(SIDE) && words.len().is_multiple_of(SIDE);
        if !are_whole || self.0.column_stride() != 1 {
            return None;
        }
        let (first, row) = (self.0.pointer(rows.start, words.start), self.0.row_stride() * size_of::<u32>());
        // A row that begins within a line of the cache would be read as two.
        let are_lines = first.addr().is_multiple_of(LINE) && row.is_multiple_of(LINE);
        (are_lines && fits_first_level(row / LINE, piece)).then_some(Strips {
            first,
            next: if rows.len() > SIDE { SIDE * row } else { 0 },
            row,
            step: SIDE * size_of::<u32>(),
        })
    }

    unsafe fn pack_left(&self, rows: Range<usize>, inner: Range<usize>, to: *mut u32, _: usize) {
        let steps = inner.len().div_ceil(SIDE);
        for (line, row) in (rows.start..rows.start + SIDE).enumerate() {
            let words: &[u32] = if row < rows.end { &self.0.row(row)[inner.clone()] } else { &[] };
            let (whole, rest) = words.as_chunks::<SIDE>();
            // SAFETY: the caller vouches for the room.
            unsafe {
                let mut to = to.add(line * SIDE).cast::<[u32; SIDE]>();
                for words in whole {
                    to.write(*words);
                    to = to.add(SIDE);
                }
                if whole.len() < steps {
                    let mut words = [0; SIDE];
                    words[..rest.len()].copy_from_slice(rest);
                    to.write(words);
                    to = to.add(SIDE);
                }
                // Of a row that is none, all are zero.
                for _ in whole.len() + 1..steps {
                    to.write([0; SIDE]);
                    to = to.add(SIDE);
                }
            }
        }
    }

    unsafe fn pack_right(&self, b: R, columns: Range<usize>, inner: Range<usize>, to: *mut u32, _: usize) {
        // SAFETY: the caller vouches for both.
        unsafe { Pairs::pack_right_of(b, columns, inner, to) }
    }
}

impl Pairs<'_> {
    /// [`Operands::pack_right`] of one matrix.
    ///
    /// # Safety
    /// As there.
    unsafe fn pack_right_of<R: PairsRight>(b: R, columns: Range<usize>, inner: Range<usize>, to: *mut u32) {
        let width = columns.len().next_multiple_of(SIDE);
        let (words, padded) = (inner.len() * width, inner.len().next_multiple_of(SIDE) * width);
        // SAFETY: the caller vouches for both: a panel of 32 columns is right tiles side by side.
        unsafe {
            let panel = std::slice::from_raw_parts_mut(to, words);
            b.pack_pairs(InstructionSet::Avx512Bf16, inner, columns, width, panel);
            to.add(words).write_bytes(0, padded - words);
        }
    }
}

/// A matrix of bf16 whose columns are the rows of the operand: what is summed over are its rows.
pub(super) struct AcrossRows<'a>(pub View<'a, bf16>);

impl<'b> Operands<View<'b, bf16>> for AcrossRows<'_> {
    const MATRICES: usize = 1;
    const PRODUCTS: &'static [(usize, usize)] = &[(0, 0)];

    fn shape(&self) -> (usize, usize) {
        (self.0.columns(), self.0.rows().div_ceil(2))
    }

    unsafe fn pack_left(&self, columns: Range<usize>, words: Range<usize>, to: *mut u32, _matrix: usize) {
        let tiles = words.len().div_ceil(SIDE);
        // SAFETY: the caller vouches for the room. Packed as right tiles, those of 16 columns are left ones but for the
        // order of rows and columns.
        unsafe {
            Pairs::pack_right_of(self.0, columns, words, to);
            (0..tiles).for_each(|tile| transpose_tile(to.add(tile * TILE)));
        }
    }

    unsafe fn pack_right(
        &self,
        b: View<'b, bf16>,
        columns: Range<usize>,
        words: Range<usize>,
        to: *mut u32,
        _matrix: usize,
    ) {
        // SAFETY: the caller vouches for both.
        unsafe { Pairs::pack_right_of(b, columns, words, to) }
    }
}

/// Values of f32, each split into a bf16 and what that leaves, rounded to a second one: about 16 bits. Of their four
/// products the one of both rests is left out, which is as small as what rounding leaves.
pub(super) struct Split<'a> {
    a: View<'a>,
    set: InstructionSet,
}

impl<'a> Split<'a> {
    pub(super) fn new(a: View<'a>, set: InstructionSet) -> Self {
        Self { a, set }
    }
}

impl<R: Right> Operands<R> for Split<'_> {
    const MATRICES: usize = 2;
    /// The small ones first.
    const PRODUCTS: &'static [(usize, usize)] = &[(1, 0), (0, 1), (0, 0)];

    fn shape(&self) -> (usize, usize) {
        (self.a.rows(), self.a.columns().div_ceil(2))
    }

    unsafe fn pack_left(&self, rows: Range<usize>, words: Range<usize>, to: *mut u32, matrix: usize) {
        let inner = 2 * words.start..self.a.columns().min(2 * words.end);
        let steps = words.len().div_ceil(SIDE);
        let mut values = vec![0.0; 2 * SIDE * steps];
        for line in 0..SIDE {
            let row = rows.start + line;
            if row >= rows.end {
                values.fill(0.0);
            } else if self.a.column_stride() == 1 {
                values[..inner.len()].copy_from_slice(&self.a.row(row)[inner.clone()]);
            } else {
                values.iter_mut().zip(inner.clone()).for_each(|(value, at)| *value = self.a.at(row, at));
            }
            for (tile, values) in values.chunks_exact(2 * SIDE).enumerate() {
                // SAFETY: the caller vouches for the room.
                let [high, rest] = [0, matrix].map(|matrix| unsafe {
                    std::slice::from_raw_parts_mut(to.add(matrix + tile * TILE + line * SIDE), SIDE)
                });
                split_row(self.set, values, high, rest);
            }
        }
    }

    unsafe fn pack_right(&self, b: R, columns: Range<usize>, words: Range<usize>, to: *mut u32, matrix: usize) {
        let inner = 2 * words.start..b.rows().min(2 * words.end);
        let width = columns.len().next_multiple_of(SIDE);
        let length = words.len().next_multiple_of(SIDE) * width;
        let mut panel = vec![0.0; 2 * length];
        // SAFETY: the caller vouches for the machine, and for the room.
        unsafe {
            b.pack(self.set, inner.clone(), columns, width, &mut panel[..inner.len() * width]);
            let [high, rest] = [0, matrix].map(|matrix| std::slice::from_raw_parts_mut(to.add(matrix), length));
            split_rows(self.set, &panel, width, high, rest);
        }
    }
}

/// A value in two: the nearest bf16, and the nearest to what that leaves. Of one that is not finite nothing is left.
#[inline(always)]
fn split(value: f32) -> [u32; 2] {
    let high = nearest(value);
    let left = value - high.widen();
    let rest = if left.is_finite() { nearest(left) } else { bf16::ZERO };
    [high, rest].map(|half| u32::from(half.to_bits()))
}

multiversion! {
    /// Splits values, two neighbours to a word.
    fn split_row(values: &[f32], high: &mut [u32], rest: &mut [u32]) {
        for ((pair, high), rest) in values.chunks_exact(2).zip(high).zip(rest) {
            let [first, second] = [split(pair[0]), split(pair[1])];
            (*high, *rest) = (first[0] | second[0] << 16, first[1] | second[1] << 16);
        }
    }
}

multiversion! {
    /// Splits rows of so many values, two rows to one of words.
    fn split_rows(values: &[f32], width: usize, high: &mut [u32], rest: &mut [u32]) {
        let words = high.chunks_exact_mut(width).zip(rest.chunks_exact_mut(width));
        for (rows, (high, rest)) in values.chunks_exact(2 * width).zip(words) {
            let (first, second) = rows.split_at(width);
            for (((first, second), high), rest) in first.iter().zip(second).zip(high).zip(rest) {
                let [first, second] = [split(*first), split(*second)];
                (*high, *rest) = (first[0] | second[0] << 16, first[1] | second[1] << 16);
            }
        }
    }
}
