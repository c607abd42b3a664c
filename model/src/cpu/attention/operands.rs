//! What the small products inside attention read and write. A word is a value or, of bf16, a pair of them along the
//! inner index.

use std::ops::Range;

/// `output (+)= left · right`.
///
/// Each element is summed in the order of the inner index, however the work is cut.
#[derive(Clone, Copy)]
pub(super) struct Product<'a, W> {
    pub left: Left<W>,
    pub right: Right<W>,
    pub output: Output,
    /// Rows of the result.
    pub rows: usize,
    /// What there is to do for some of the rows.
    pub extent: &'a dyn Fn(Range<usize>) -> Extent,
}

/// A left operand; word `(i, k)` is `words[i · row_stride + k · inner_stride]`.
#[derive(Clone, Copy)]
pub(super) struct Left<W> {
    pub words: *const W,
    pub row_stride: usize,
    pub inner_stride: usize,
}

/// A right operand; word `(k, j)` is `words[k · stride + j]`.
#[derive(Clone, Copy)]
pub(super) struct Right<W> {
    pub words: *const W,
    pub stride: usize,
}

/// A result; element `(i, j)` is `values[i · stride + j]`.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub values: *mut f32,
    pub stride: usize,
    /// Whether the product is added to what is there.
    pub add: bool,
}

/// What of a product there is to do for some rows of the result.
pub(super) struct Extent {
    /// The elements that are summed; the others count as zero. (Of a pair with one of these, the other is zero or
    /// nothing.)
    pub inner: Range<usize>,
    /// The columns that are wanted.
    pub columns: Range<usize>,
}
