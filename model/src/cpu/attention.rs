//! Attention of one key head over one document, a block of rows at a time.
//!
//! A block of rows (queries; see [`sight`]) goes over the keys it sees in blocks, keeping the largest score and the sum of the
//! exponentials of each row; so memory grows with the block alone. Blocks that no row sees are never touched, and within a block
//! on the border only the tiles that are seen are computed. Scores lie with the rows in the lanes of vectors: a row's softmax
//! needs no sum across lanes, and keys, values and weights are read where they lie.
//!
//! Source: Dao et al., arXiv:2205.14135 and arXiv:2307.08691.

mod backward;
mod forward;
mod scratch;
mod sight;
mod softmax;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;

use super::product::Target;
use super::simd::Vector;
use crate::ops::AttentionShape;
pub(super) use backward::{Backward, Turns, backward};
pub(super) use forward::{Forward, forward};
pub(super) use sight::Sight;
use tile::{Left, Right};

/// Rows per block.
pub(super) const ROWS: usize = 64;
/// Keys per block.
pub(super) const KEYS: usize = 64;

/// Some columns of a row-major matrix.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a> {
    /// Values from the first row's first column on.
    pub values: &'a [f32],
    /// Distance of two rows.
    pub stride: usize,
}

impl<'a> Columns<'a> {
    /// The same matrix with another origin.
    pub(super) fn from(self, row: usize, column: usize) -> Self {
        Self { values: self.values.get(row * self.stride + column..).unwrap_or_default(), ..self }
    }

    /// Panics unless it has so many rows and columns.
    fn check(self, rows: usize, columns: usize) {
        let needed = if rows == 0 { 0 } else { (rows - 1) * self.stride + columns };
        assert!(needed <= self.values.len() && columns <= self.stride, "columns beyond their matrix");
    }

    /// The columns of one query head in one row of a document.
    fn of_row(self, sight: &Sight, row: usize, head_dim: usize) -> &'a [f32] {
        &self.values[row / sight.group * self.stride + row % sight.group * head_dim..][..head_dim]
    }

    /// Its rows from one on, as a left operand.
    fn left(self, first: usize) -> Left {
        Left { values: self.values[first * self.stride..].as_ptr(), row_stride: self.stride, inner_stride: 1 }
    }

    /// Its rows from one on, as a right operand.
    fn right(self, first: usize) -> Right {
        Right { values: self.values[first * self.stride..].as_ptr(), stride: self.stride }
    }
}

/// The columns of one query head in one row of a document.
///
/// # Safety
/// Nobody else may touch them while the slice lives.
unsafe fn target_row<'a>(target: Target<'a>, sight: &Sight, row: usize, width: usize) -> &'a mut [f32] {
    let first = row % sight.group * width;
    // SAFETY: the caller vouches for them.
    unsafe { target.row(row / sight.group, first..first + width) }
}

/// Factors that take a product of a query with a key to what the exponential of base 2 is taken of.
#[derive(Clone, Copy)]
struct Scale {
    /// On the queries, before the product.
    query: f32,
    /// On the tangent of that, with a soft-cap.
    cap: Option<f32>,
}

impl Scale {
    fn of(shape: &AttentionShape) -> Self {
        match shape.soft_cap {
            None => Self { query: shape.scale * std::f32::consts::LOG2_E, cap: None },
            Some(cap) => Self { query: shape.scale / cap, cap: Some(cap * std::f32::consts::LOG2_E) },
        }
    }
}

/// Rows of a block as columns, times a factor; lanes without a row are zero.
///
/// # Safety
/// The machine has the instructions; `to` has room for `head_dim` rows of [`ROWS`].
#[inline(always)]
unsafe fn pack_columns<V: Vector>(
    from: Columns<'_>,
    sight: &Sight,
    rows: &Range<usize>,
    head_dim: usize,
    factor: f32,
    to: *mut f32,
) {
    for first in rows.clone().step_by(V::LANES) {
        let lanes = first..rows.end.min(first + V::LANES);
        let mut lines = [std::ptr::null(); ROWS];
        for (line, row) in lines.iter_mut().zip(lanes.clone()) {
            *line = from.of_row(sight, row, head_dim).as_ptr();
        }
        // SAFETY: the lines are slices of so many values, and the caller vouches for the rest.
        unsafe { V::transpose(&lines[..lanes.len()], head_dim, factor, to.add(first - rows.start), ROWS) };
    }
}
