//! Matrices to read and to write: where the elements of an operand or a result lie.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::Element;

/// A matrix to read, element `(i, j)` being `values[i · row_stride + j · column_stride]`.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct View<'a, T = f32> {
    values: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T: Copy> View<'a, T> {
    /// A view of rows that start `row_stride` apart.
    pub(in crate::cpu) fn new(values: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        Self::checked(values, rows, columns, row_stride, 1)
    }

    fn checked(values: &'a [T], rows: usize, columns: usize, row_stride: usize, column_stride: usize) -> Self {
        if rows > 0 && columns > 0 {
            let last = (rows - 1) * row_stride + (columns - 1) * column_stride;
            assert!(last < values.len(), "a view of {rows}x{columns} over {} values", values.len());
        }
        Self { values, rows, columns, row_stride, column_stride }
    }

    /// Number of rows.
    pub(in crate::cpu) fn rows(self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub(in crate::cpu) fn columns(self) -> usize {
        self.columns
    }

    /// How far apart rows start.
    pub(super) fn row_stride(self) -> usize {
        self.row_stride
    }

    /// How far apart columns start.
    pub(super) fn column_stride(self) -> usize {
        self.column_stride
    }

    /// One row, which lies contiguously.
    pub(in crate::cpu) fn row(self, row: usize) -> &'a [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert!(self.column_stride == 1 || self.columns <= 1, "rows that lie contiguously");
        if self.columns == 0 { &[] } else { &self.values[row * self.row_stride..][..self.columns] }
    }

    /// Where an element lies: one of the matrix, so that it and those beside it may be read.
    #[inline(always)]
    pub(super) fn pointer(self, row: usize, column: usize) -> *const T {
        assert!(row < self.rows && column < self.columns, "element {row}, {column} of {}x{}", self.rows, self.columns);
        // SAFETY: `checked` saw that the last element lies within the values.
        unsafe { self.values.as_ptr().add(row * self.row_stride + column * self.column_stride) }
    }

    /// An element.
    #[inline(always)]
    pub(super) fn at(self, row: usize, column: usize) -> T {
        // SAFETY: a place within the values.
        unsafe { *self.pointer(row, column) }
    }

    /// Rows and columns exchanged.
    pub(in crate::cpu) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Some of its rows.
    pub(in crate::cpu) fn row_range(self, rows: Range<usize>) -> Self {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        let values = self.values.get(rows.start * self.row_stride..).unwrap_or_default();
        Self::checked(values, rows.len(), self.columns, self.row_stride, self.column_stride)
    }

    /// Some of its columns.
    pub(in crate::cpu) fn column_range(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.columns, "columns {columns:?} of {}", self.columns);
        let values = self.values.get(columns.start * self.column_stride..).unwrap_or_default();
        Self::checked(values, self.rows, columns.len(), self.row_stride, self.column_stride)
    }
}

impl<'a> View<'a, u32> {
    /// Rows of pairs as the first `columns` of their halves: all but the padding.
    pub(super) fn of_halves(self, columns: usize) -> View<'a, bf16> {
        assert!(self.column_stride == 1 && self.columns == columns.div_ceil(2), "rows of {columns} halves");
        // SAFETY: a word holds two bf16, and every bit pattern is a value of each type.
        let (_, values, _) = unsafe { self.values.align_to::<bf16>() };
        View::new(values, self.rows, columns, 2 * self.row_stride)
    }
}

#[cfg(target_arch = "x86_64")]
impl<'a, T: Element> View<'a, T> {
    /// The same matrix as one of f32, if it is that.
    pub(super) fn floats(self) -> Option<View<'a, f32>> {
        let Self { values, rows, columns, row_stride, column_stride } = self;
        let place = T::floats(values.as_ptr())?;
        // SAFETY: the values are f32, and these are all of them.
        let values = unsafe { std::slice::from_raw_parts(place, values.len()) };
        Some(View { values, rows, columns, row_stride, column_stride })
    }
}

#[cfg(target_arch = "x86_64")]
impl<'a> View<'a, bf16> {
    /// The other way: rows of halves, which begin at whole words, as pairs. Behind an odd row there is a half more.
    pub(super) fn of_pairs(self) -> View<'a, u32> {
        assert!(self.column_stride == 1 && self.row_stride.is_multiple_of(2), "rows of whole words");
        // SAFETY: as above.
        let (before, values, _) = unsafe { self.values.align_to::<u32>() };
        assert!(before.is_empty(), "rows that begin at whole words");
        View::new(values, self.rows, self.columns.div_ceil(2), self.row_stride / 2)
    }
}

/// A matrix to write, of which parts are written by several threads at once.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Target<'a> {
    values: *mut f32,
    length: usize,
    row_stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: a target is only a place; whoever writes through it vouches that nobody else touches those elements.
unsafe impl Send for Target<'_> {}
// SAFETY: as above.
unsafe impl Sync for Target<'_> {}

impl<'a> Target<'a> {
    /// The rows of `values`, `row_stride` apart.
    pub(in crate::cpu) fn new(values: &'a mut [f32], row_stride: usize) -> Self {
        Self { values: values.as_mut_ptr(), length: values.len(), row_stride, owner: PhantomData }
    }

    /// Columns of one row.
    ///
    /// # Safety
    /// Nobody else may read or write these elements while the slice lives.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn row(self, row: usize, columns: Range<usize>) -> &'a mut [f32] {
        let first = row * self.row_stride + columns.start;
        assert!(columns.start <= columns.end && first + columns.len() <= self.length, "a row beyond the matrix");
        // SAFETY: the range lies within the slice this was made from, and the caller vouches for exclusivity.
        unsafe { std::slice::from_raw_parts_mut(self.values.add(first), columns.len()) }
    }

    /// The same matrix with another origin.
    pub(in crate::cpu) fn offset(self, row: usize, column: usize) -> Self {
        let first = row * self.row_stride + column;
        assert!(first <= self.length, "an origin beyond the matrix");
        // SAFETY: the origin lies within the slice this was made from or at its end.
        Self { values: unsafe { self.values.add(first) }, length: self.length - first, ..self }
    }

    /// Where a block of so many rows and columns begins that lies within the matrix.
    #[inline(always)]
    pub(in crate::cpu) fn block(self, row: usize, column: usize, rows: usize, columns: usize) -> *mut f32 {
        let first = row * self.row_stride + column;
        let end = if rows == 0 { first } else { first + (rows - 1) * self.row_stride + columns };
        assert!(end <= self.length, "a block beyond the matrix");
        // SAFETY: the block lies within the slice this was made from.
        unsafe { self.values.add(first) }
    }

    /// How far apart rows start.
    pub(in crate::cpu) fn row_stride(self) -> usize {
        self.row_stride
    }
}

/// A matrix to write, of which this is the only view.
pub(in crate::cpu) struct ViewMut<'a> {
    target: Target<'a>,
    rows: usize,
    columns: usize,
}

impl<'a> ViewMut<'a> {
    /// A view of rows that start `row_stride` apart.
    pub(in crate::cpu) fn new(values: &'a mut [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        // As for a view to read.
        View::new(values, rows, columns, row_stride);
        assert!(columns <= row_stride || rows <= 1, "rows that overlap");
        Self { target: Target::new(values, row_stride), rows, columns }
    }

    /// Some of its columns.
    pub(in crate::cpu) fn column_range(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.columns, "columns beyond the matrix");
        let target = if self.rows == 0 { self.target } else { self.target.offset(0, columns.start) };
        Self { target, columns: columns.len(), ..self }
    }

    /// The same view for a while.
    pub(in crate::cpu) fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { ..*self }
    }

    /// Number of rows and columns.
    pub(in crate::cpu) fn shape(&self) -> (usize, usize) {
        (self.rows, self.columns)
    }

    /// For several threads.
    pub(in crate::cpu) fn into_target(self) -> Target<'a> {
        self.target
    }
}
