//! Attention of one key head over one document, a block of rows at a time.
//!
//! A block of rows (queries; see [`mask`]) goes over the keys it sees in blocks, keeping the largest score and the sum
//! of the exponentials of each row; so memory grows with the block alone. Blocks that no row sees are never touched,
//! and within a block on the border only the tiles that are seen are computed. Scores lie with the rows in the lanes of
//! vectors: a row's softmax needs no sum across lanes, and keys, values and weights are read where they lie. (Those of
//! a few rows over cached keys lie the other way; see [`cached`].)
//!
//! Where bf16 is computed in, what the products multiply is rounded to it: queries, keys, values, weights, the
//! gradients of the output and of the scores. Scores, softmax and all sums stay in f32.
//!
//! Source: Dao et al., arXiv:2205.14135 and arXiv:2307.08691.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

mod backward;
mod cached;
mod floats;
mod forms;
mod forward;
mod kernel;
mod mask;
#[cfg(target_arch = "aarch64")]
mod neon;
mod operands;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod softmax;
#[cfg(test)]
mod tests;
mod tile;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::ops::Range;

use super::product::Target;
use super::simd::Vector;
use crate::ops::AttentionShape;
pub(super) use backward::{Backward, Turns, backward};
pub(super) use cached::forward_cached;
pub(super) use forward::{Forward, forward};
use kernel::Kernel;
pub(super) use mask::AttentionMask;
use operands::{Left, Right};

/// Rows per block.
pub(super) const ROWS: usize = 64;
/// Keys per block.
pub(super) const KEYS: usize = 64;

/// Some columns of a row-major matrix, in words: values, or pairs of bf16.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a, W = f32> {
    /// Words from the first row's first column on.
    pub words: &'a [W],
    /// Distance of two rows.
    pub stride: usize,
}

impl<'a, W: Copy> Columns<'a, W> {
    /// The same matrix with another origin.
    pub(super) fn from(self, row: usize, column: usize) -> Self {
        Self { words: self.words.get(row * self.stride + column..).unwrap_or_default(), ..self }
    }

    /// Panics unless it has so many rows and columns.
    fn check(self, rows: usize, columns: usize) {
        let needed = if rows == 0 { 0 } else { (rows - 1) * self.stride + columns };
        assert!(needed <= self.words.len() && columns <= self.stride, "columns beyond their matrix");
    }

    /// The columns of one query head, of so many words, in one row of a document.
    fn of_row(self, mask: &AttentionMask, row: usize, width: usize) -> &'a [W] {
        &self.words[row / mask.group * self.stride + row % mask.group * width..][..width]
    }

    /// Its rows from one on, as a left operand.
    fn left(self, first: usize) -> Left<W> {
        Left { words: self.words[first * self.stride..].as_ptr(), row_stride: self.stride, inner_stride: 1 }
    }

    /// Its rows from one on, as a right operand.
    fn right(self, first: usize) -> Right<W> {
        Right { words: self.words[first * self.stride..].as_ptr(), stride: self.stride }
    }
}

/// Queries, keys and values.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a, W> {
    /// Queries, from the first head of a group on.
    pub q: Columns<'a, W>,
    /// Keys.
    pub k: Columns<'a, W>,
    /// Values.
    pub v: Columns<'a, W>,
}

/// Queries, keys and values in the form that is computed in.
#[derive(Clone, Copy)]
pub(super) enum Qkv<'a> {
    /// In f32.
    F32(Operands<'a, f32>),
    /// In f32, rounded to values of bf16: so is all else that products multiply.
    Rounded(Operands<'a, f32>),
    /// In pairs of bf16, the heads being of an even width.
    Pairs(Operands<'a, u32>),
}

impl Qkv<'_> {
    /// The same matrices from other heads and rows on, `[row, column]` of the queries and of keys and values.
    pub(super) fn from(self, [row, column]: [usize; 2], [key_row, key_column]: [usize; 2]) -> Self {
        fn from<W: Copy>(
            Operands { q, k, v }: Operands<'_, W>,
            at: [usize; 2],
            of_keys: [usize; 2],
        ) -> Operands<'_, W> {
            let [k, v] = [k, v].map(|columns| columns.from(of_keys[0], of_keys[1]));
            Operands { q: q.from(at[0], at[1]), k, v }
        }
        match self {
            Self::F32(operands) => Self::F32(from(operands, [row, column], [key_row, key_column])),
            Self::Rounded(operands) => Self::Rounded(from(operands, [row, column], [key_row, key_column])),
            Self::Pairs(operands) => {
                assert!(column % 2 == 0 && key_column % 2 == 0, "heads of an even width");
                Self::Pairs(from(operands, [row, column / 2], [key_row, key_column / 2]))
            }
        }
    }

    /// Panics unless there are so many rows and columns of queries, and of keys and values.
    fn check(self, [rows, columns]: [usize; 2], [keys, key_columns]: [usize; 2]) {
        fn check<W: Copy>(Operands { q, k, v }: Operands<'_, W>, of_rows: [usize; 2], of_keys: [usize; 2]) {
            q.check(of_rows[0], of_rows[1]);
            k.check(of_keys[0], of_keys[1]);
            v.check(of_keys[0], of_keys[1]);
        }
        match self {
            Self::F32(operands) | Self::Rounded(operands) => check(operands, [rows, columns], [keys, key_columns]),
            Self::Pairs(operands) => {
                assert!(columns % 2 == 0 && key_columns % 2 == 0, "heads of an even width");
                check(operands, [rows, columns / 2], [keys, key_columns / 2]);
            }
        }
    }
}

/// The columns of one query head in one row of a document.
///
/// # Safety
/// Nobody else may touch them while the slice lives.
unsafe fn target_row<'a>(target: Target<'a>, mask: &AttentionMask, row: usize, width: usize) -> &'a mut [f32] {
    let first = row % mask.group * width;
    // SAFETY: the caller vouches for them.
    unsafe { target.row(row / mask.group, first..first + width) }
}

/// How a product of a query with a key becomes what the exponential of base 2 is taken of.
#[derive(Clone, Copy)]
struct Scale {
    /// Factor on the product.
    factor: f32,
    /// Factor on the tangent of that, with a soft-cap.
    cap: Option<f32>,
}

impl Scale {
    fn of(shape: &AttentionShape) -> Self {
        match shape.soft_cap {
            None => Self { factor: shape.scale * std::f32::consts::LOG2_E, cap: None },
            Some(cap) => Self { factor: shape.scale / cap, cap: Some(cap * std::f32::consts::LOG2_E) },
        }
    }
}

/// Lines of as many words, one for each row of a block, as columns; lanes without a line are zero.
///
/// # Safety
/// The machine has the instructions; `to` has room for so many rows of [`ROWS`].
#[inline(always)]
unsafe fn pack_columns<K: Kernel>(lines: &[*const K::Word], words: usize, to: *mut K::Word) {
    let lanes = K::Sums::LANES;
    for (number, lines) in lines.chunks(lanes).enumerate() {
        // SAFETY: the caller vouches for the lines and for the rest.
        unsafe { K::transpose(lines, words, to.add(number * lanes)) };
    }
}

/// Where each row of a block begins; beyond the last one, nothing.
#[inline(always)]
fn lines<W: Copy>(from: Columns<'_, W>, mask: &AttentionMask, rows: &Range<usize>, width: usize) -> [*const W; ROWS] {
    let mut lines = [std::ptr::null(); ROWS];
    for (line, row) in lines.iter_mut().zip(rows.clone()) {
        *line = from.of_row(mask, row, width).as_ptr();
    }
    lines
}
