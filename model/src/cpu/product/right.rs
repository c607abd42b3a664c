//! The right operand of a product: a matrix as it is stored, which a kernel reads in place or packs into panels.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use half::bf16;

use super::few_rows;
#[cfg(target_arch = "x86_64")]
use super::pack::avx512;
use super::{Element, Finish, InstructionSet, Target, View};

/// A right operand, `[inner, columns]`.
pub(in crate::cpu) trait Right: Copy + Send + Sync {
    /// Rows: the inner dimension.
    fn rows(self) -> usize;

    /// Columns.
    fn columns(self) -> usize;

    /// Some of its columns.
    fn column_range(self, columns: Range<usize>) -> Self;

    /// How far apart rows and columns are, in elements, or would be if it were not quantised.
    fn strides(self) -> (usize, usize);

    /// Writes rows `inner` of some columns to `[inner][width]` in f32, zero beyond the last column.
    ///
    /// # Safety
    /// The machine has the set.
    unsafe fn pack(
        self,
        set: InstructionSet,
        inner: Range<usize>,
        columns: Range<usize>,
        width: usize,
        panel: &mut [f32],
    );

    /// Where rows of some columns begin that lie as a panel of f32 does but for the distance of its rows, and that
    /// distance. The columns fill whole vectors.
    fn in_place(self, _inner: &Range<usize>, _columns: &Range<usize>) -> Option<(*const f32, usize)> {
        None
    }

    /// The operand as a matrix of f32, if it lies as one.
    #[cfg(target_arch = "x86_64")]
    fn floats(&self) -> Option<View<'_>> {
        None
    }

    /// A product of few rows, the columns being contiguous.
    ///
    /// # Safety
    /// As for [`super::product_along`].
    unsafe fn few_rows(self, set: InstructionSet, a: View<'_>, finish: Finish<'_>, c: Target<'_>);
}

/// A right operand of kernels for pairs of bf16.
pub(in crate::cpu) trait PairsRight: Right {
    /// Writes words `inner` of some columns, a word being the rows `2w` and `2w + 1`, to `[inner][width]`, the width
    /// being the least of whole vectors; zero beyond the last row and column.
    ///
    /// # Safety
    /// The machine has the set.
    unsafe fn pack_pairs(
        self,
        set: InstructionSet,
        inner: Range<usize>,
        columns: Range<usize>,
        width: usize,
        panel: &mut [u32],
    );

    /// A product of few rows of bf16, the columns being contiguous.
    ///
    /// # Safety
    /// As for [`super::product_of_pairs`].
    unsafe fn few_rows_of_pairs(self, set: InstructionSet, a: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>);
}

/// A right operand and what becomes of the product with it.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Side<'a, R> {
    /// The operand.
    pub b: R,
    /// What becomes of the sums.
    pub finish: Finish<'a>,
    /// Where they go.
    pub c: Target<'a>,
}

impl<R: Right> Side<'_, R> {
    /// Finishes sums of nothing, of so many rows.
    ///
    /// # Safety
    /// Nobody else may read or write these elements of the result meanwhile.
    pub(super) unsafe fn nothing(&self, rows: usize) {
        // SAFETY: the caller vouches for them.
        unsafe { self.finish.nothing(rows, self.b.columns(), self.c) }
    }
}

impl<T: Element> Right for View<'_, T> {
    fn rows(self) -> usize {
        self.rows()
    }

    fn columns(self) -> usize {
        self.columns()
    }

    fn column_range(self, columns: Range<usize>) -> Self {
        self.column_range(columns)
    }

    fn strides(self) -> (usize, usize) {
        (self.row_stride(), self.column_stride())
    }

    unsafe fn pack(
        self,
        set: InstructionSet,
        inner: Range<usize>,
        columns: Range<usize>,
        width: usize,
        panel: &mut [f32],
    ) {
        match set {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 | InstructionSet::Avx512Bf16 | InstructionSet::Amx | InstructionSet::AmxEmulated => {
                assert!(panel.len() >= inner.len() * width && width >= columns.len(), "room for a panel");
                // SAFETY: the caller vouches for the instructions, and the panel has the room.
                unsafe { T::pack_512(self, inner, columns, panel.as_mut_ptr()) }
            }
            _ => pack_plainly(self, inner, columns, width, panel),
        }
    }

    fn in_place(self, inner: &Range<usize>, columns: &Range<usize>) -> Option<(*const f32, usize)> {
        let lies_so = self.column_stride() == 1;
        lies_so.then(|| T::floats(self.pointer(inner.start, columns.start))).flatten().map(|at| (at, self.row_stride()))
    }

    #[cfg(target_arch = "x86_64")]
    fn floats(&self) -> Option<View<'_>> {
        View::floats(*self)
    }

    unsafe fn few_rows(self, set: InstructionSet, a: View<'_>, finish: Finish<'_>, c: Target<'_>) {
        // SAFETY: the caller vouches for it.
        unsafe { T::few_rows(set, a, self, finish, c) }
    }
}

impl PairsRight for View<'_, bf16> {
    unsafe fn pack_pairs(
        self,
        set: InstructionSet,
        inner: Range<usize>,
        columns: Range<usize>,
        width: usize,
        panel: &mut [u32],
    ) {
        assert!(panel.len() >= inner.len() * width && width >= columns.len(), "room for a panel");
        match set {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512Bf16 | InstructionSet::Amx | InstructionSet::AmxEmulated => {
                assert_eq!(width, columns.len().next_multiple_of(16), "whole vectors");
                // SAFETY: the caller vouches for the instructions, and the panel has the room.
                unsafe { avx512::pack_pairs(self, inner, columns, panel.as_mut_ptr()) }
            }
            _ => pack_pairs_plainly(self, inner, columns, width, panel),
        }
    }

    unsafe fn few_rows_of_pairs(self, set: InstructionSet, a: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>) {
        // SAFETY: the caller vouches for it.
        unsafe { few_rows::of_pairs(set, a, self, finish, c) }
    }
}

/// [`Right::pack`] by plain loops.
pub(super) fn pack_plainly<T: Element>(
    b: View<'_, T>,
    inner: Range<usize>,
    columns: Range<usize>,
    width: usize,
    panel: &mut [f32],
) {
    /// Steps after which a loop over columns returns to the first: what it has written is in cache until then.
    const STEPS: usize = 16;
    if b.column_stride() == 1 {
        for (row, target) in inner.zip(panel.chunks_exact_mut(width)) {
            let (target, padding) = target.split_at_mut(columns.len());
            let source = &b.row(row)[columns.clone()];
            target.iter_mut().zip(source).for_each(|(element, value)| *element = value.widen());
            padding.fill(0.0);
        }
        return;
    }
    let b = b.transposed();
    let mut first = inner.start;
    for panel in panel.chunks_mut(STEPS * width) {
        let steps = first..inner.end.min(first + STEPS);
        first = steps.end;
        for (lane, column) in columns.clone().enumerate() {
            let source = &b.row(column)[steps.clone()];
            for (target, value) in panel.chunks_exact_mut(width).zip(source) {
                target[lane] = value.widen();
            }
        }
        panel.chunks_exact_mut(width).for_each(|target| target[columns.len()..].fill(0.0));
    }
}

/// [`PairsRight::pack_pairs`] by plain loops.
fn pack_pairs_plainly(b: View<'_, bf16>, inner: Range<usize>, columns: Range<usize>, width: usize, panel: &mut [u32]) {
    /// Steps after which a loop over columns returns to the first, as above.
    const STEPS: usize = 16;
    let word = |low: bf16, high: bf16| u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
    let panel = &mut panel[..inner.len() * width];
    panel.chunks_exact_mut(width).for_each(|target| target[columns.len()..].fill(0));
    if b.column_stride() == 1 {
        for (step, target) in inner.zip(panel.chunks_exact_mut(width)) {
            let even = &b.row(2 * step)[columns.clone()];
            // The last word of an odd number of rows has no second half.
            if 2 * step + 1 == b.rows() {
                target.iter_mut().zip(even).for_each(|(target, low)| *target = word(*low, bf16::ZERO));
                continue;
            }
            let odd = &b.row(2 * step + 1)[columns.clone()];
            target.iter_mut().zip(even).zip(odd).for_each(|((target, low), high)| *target = word(*low, *high));
        }
        return;
    }
    let b = b.transposed();
    let mut first = inner.start;
    for panel in panel.chunks_mut(STEPS * width) {
        let steps = first..inner.end.min(first + STEPS);
        first = steps.end;
        for (lane, column) in columns.clone().enumerate() {
            let source = &b.row(column)[2 * steps.start..b.columns().min(2 * steps.end)];
            for (target, pair) in panel.chunks_exact_mut(width).zip(source.chunks(2)) {
                target[lane] = word(pair[0], pair.get(1).copied().unwrap_or(bf16::ZERO));
            }
        }
    }
}
