//! Operands of products in tiles: how a left and a right one become packed tiles.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use half::bf16;

use super::blocks::blocks_of;
use super::pack::avx512::{pack_halves, transpose_tile};
use super::{InstructionSet, PairsRight, Right, View};
use crate::cpu::amx::{SIDE, Strips, TILE};
use crate::cpu::scratch::with_buffers;

/// A left operand in bf16. Words are pairs of values along the inner dimension.
pub(super) trait Left {
    /// Rows, and words of a row.
    fn shape(&self) -> (usize, usize);

    /// The tiles of up to 32 rows where they lie, if they are whole tiles there and those of `piece`
    /// steps along the inner dimension do not displace each other in the first-level cache.
    fn in_place(&self, _rows: &Range<usize>, _words: &Range<usize>, _piece: usize) -> Option<Strips> {
        None
    }

    /// Packs up to 16 rows, whole tiles behind one another with zeros beyond the last row and word.
    ///
    /// # Safety
    /// There is room for so many tiles, and the machine has [`crate::cpu::simd::Avx512Bf16`]'s instructions.
    unsafe fn pack(&self, rows: Range<usize>, words: Range<usize>, to: *mut u32);
}

/// The matrices that a left operand is, and how right ones become as many beside it.
pub(super) trait Operands<R> {
    /// The form of the left ones.
    type Left: Left;
    /// Matrices that an operand is: its values or, of such as are split, the nearest values and the rests.
    const MATRICES: usize;

    /// The left ones, which are of one shape and lie alike.
    fn left(&self) -> &[Self::Left];

    /// Packs up to 32 columns of a right operand, the rows of two tiles side by side, each matrix `matrix` words behind
    /// the one before. A line of the cache has so many bf16 of a matrix that lies in rows, and is read once.
    ///
    /// # Safety
    /// As for [`Left::pack`].
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

/// Pairs of bf16, in the rows of a matrix.
pub(super) struct Pairs<'a>(pub View<'a, u32>);

impl Left for Pairs<'_> {
    fn shape(&self) -> (usize, usize) {
        (self.0.rows(), self.0.columns())
    }

    fn in_place(&self, rows: &Range<usize>, words: &Range<usize>, piece: usize) -> Option<Strips> {
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

    unsafe fn pack(&self, rows: Range<usize>, inner: Range<usize>, to: *mut u32) {
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
}

/// A matrix of bf16 whose columns are the rows of the operand: what is summed over are its rows.
pub(super) struct AcrossRows<'a>(pub View<'a, bf16>);

impl Left for AcrossRows<'_> {
    fn shape(&self) -> (usize, usize) {
        (self.0.columns(), self.0.rows().div_ceil(2))
    }

    unsafe fn pack(&self, columns: Range<usize>, words: Range<usize>, to: *mut u32) {
        let tiles = words.len().div_ceil(SIDE);
        // SAFETY: the caller vouches for the room. Packed as right tiles, those of 16 columns are left ones but for the
        // order of rows and columns.
        unsafe {
            pack_pairs(self.0, columns, words, to);
            (0..tiles).for_each(|tile| transpose_tile(to.add(tile * TILE)));
        }
    }
}

/// Operands in bf16 as they are.
pub(super) struct One<L>(pub [L; 1]);

impl<R: PairsRight, L: Left> Operands<R> for One<L> {
    type Left = L;
    const MATRICES: usize = 1;

    fn left(&self) -> &[L] {
        &self.0
    }

    unsafe fn pack_right(&self, b: R, columns: Range<usize>, words: Range<usize>, to: *mut u32, _matrix: usize) {
        // SAFETY: the caller vouches for both.
        unsafe { pack_pairs(b, columns, words, to) }
    }
}

/// [`Operands::pack_right`] of one matrix.
///
/// # Safety
/// As there.
unsafe fn pack_pairs<R: PairsRight>(b: R, columns: Range<usize>, inner: Range<usize>, to: *mut u32) {
    let width = columns.len().next_multiple_of(SIDE);
    let (words, padded) = (inner.len() * width, inner.len().next_multiple_of(SIDE) * width);
    // SAFETY: the caller vouches for both: a panel of 32 columns is right tiles side by side.
    unsafe {
        let panel = std::slice::from_raw_parts_mut(to, words);
        b.pack_pairs(InstructionSet::Avx512Bf16, inner, columns, width, panel);
        to.add(words).write_bytes(0, padded - words);
    }
}

/// Operands in f32, of which each value is [split] into two of bf16. Of their four products the one of both rests is
/// left out, which is as small as what rounding leaves.
///
/// [split]: super::split
pub(super) struct Split<L> {
    /// The nearest values and the rests of the left operand.
    pub left: [L; 2],
    /// What the right one is packed by.
    pub set: InstructionSet,
}

impl<R: Right, L: Left> Operands<R> for Split<L> {
    type Left = L;
    const MATRICES: usize = 2;

    fn left(&self) -> &[L] {
        &self.left
    }

    unsafe fn pack_right(&self, b: R, columns: Range<usize>, words: Range<usize>, to: *mut u32, matrix: usize) {
        /// Words that are packed before they are split: they stay in the first-level cache.
        const WORDS: usize = 4 * SIDE;
        if let Some(b) = b.floats() {
            // SAFETY: the caller vouches for the machine, and for the room.
            return unsafe { pack_halves(b, words, columns, [to, to.add(matrix)]) };
        }
        let width = columns.len().next_multiple_of(SIDE);
        with_buffers([2 * WORDS * width], |[panel]| {
            for piece in blocks_of(words.len().next_multiple_of(SIDE), WORDS) {
                let first = 2 * (words.start + piece.start);
                let inner = first..b.rows().min(2 * words.end).min(first + 2 * piece.len()).max(first);
                // SAFETY: the caller vouches for the machine, and both buffers have the room.
                unsafe {
                    let values = std::slice::from_raw_parts_mut(panel, inner.len() * width);
                    b.pack(self.set, inner.clone(), columns.clone(), width, values);
                    let values = View::new(values, inner.len(), columns.len(), width);
                    let to = to.add(piece.start * width);
                    pack_halves(values, 0..piece.len(), 0..columns.len(), [to, to.add(matrix)]);
                }
            }
        });
    }
}
