//! Matrix products of any orientation, over all or a part of the result, summed in f32.
//!
//! Each element is summed over the inner dimension in one order whatever the partition over threads, so that the result does
//! not depend on their number. The right operand may lie in a narrower type; it is widened on the way.

#[cfg(target_arch = "x86_64")]
mod pairs;
mod panels;

use std::marker::PhantomData;
use std::ops::Range;

use half::bf16;

use super::Cpu;
use super::instructions::{InstructionSet, multiversion};
use super::vector::sum;
#[cfg(target_arch = "x86_64")]
pub(super) use pairs::Pairs;
#[cfg(target_arch = "x86_64")]
use pairs::product as product_of_pairs;
use panels::blocks;
use panels::store;

/// Up to so many rows a product reads its right operand in place: packing it would cost more than it saves.
pub(super) const FEW_ROWS: usize = 3;

/// A number type of a right operand.
pub(super) trait Element: Copy + Send + Sync {
    /// The same number in f32.
    fn widen(self) -> f32;

    /// `c (+)= scale · a · b` by dot products, the columns of `b` lying contiguously.
    fn few_rows(set: InstructionSet, scale: f32, a: View<'_>, b: View<'_, Self>, write: Into, c: Target<'_>);
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    fn few_rows(set: InstructionSet, scale: f32, a: View<'_>, b: View<'_>, write: Into, c: Target<'_>) {
        few_rows_f32(set, scale, a, b, write, c);
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    fn few_rows(set: InstructionSet, scale: f32, a: View<'_>, b: View<'_, Self>, write: Into, c: Target<'_>) {
        few_rows_bf16(set, scale, a, b, write, c);
    }
}

/// A matrix to read, element `(i, j)` being `values[i · row_stride + j · column_stride]`.
#[derive(Clone, Copy)]
pub(super) struct View<'a, T = f32> {
    values: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T: Copy> View<'a, T> {
    /// A view of rows that start `row_stride` apart.
    pub(super) fn new(values: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
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
    pub(super) fn rows(self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub(super) fn columns(self) -> usize {
        self.columns
    }

    /// Rows and columns exchanged.
    pub(super) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// One row, which lies contiguously.
    pub(super) fn row(self, row: usize) -> &'a [T] {
        assert_eq!(self.column_stride, 1, "rows that lie contiguously");
        &self.values[row * self.row_stride..][..self.columns]
    }

    /// Some of its rows.
    pub(super) fn row_range(self, rows: Range<usize>) -> Self {
        let values = self.values.get(rows.start * self.row_stride..).unwrap_or_default();
        Self::checked(values, rows.len(), self.columns, self.row_stride, self.column_stride)
    }

    /// Some of its columns.
    pub(super) fn column_range(self, columns: Range<usize>) -> Self {
        let values = self.values.get(columns.start * self.column_stride..).unwrap_or_default();
        Self::checked(values, self.rows, columns.len(), self.row_stride, self.column_stride)
    }
}

/// A matrix to write, of which parts are written by several threads at once.
#[derive(Clone, Copy)]
pub(super) struct Target<'a> {
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
    pub(super) fn new(values: &'a mut [f32], row_stride: usize) -> Self {
        Self { values: values.as_mut_ptr(), length: values.len(), row_stride, owner: PhantomData }
    }

    /// Columns of one row.
    ///
    /// # Safety
    /// Nobody else may read or write these elements while the slice lives.
    #[inline(always)]
    pub(super) unsafe fn row(self, row: usize, columns: Range<usize>) -> &'a mut [f32] {
        let first = row * self.row_stride + columns.start;
        assert!(columns.start <= columns.end && first + columns.len() <= self.length, "a row beyond the matrix");
        // SAFETY: the range lies within the slice this was made from, and the caller vouches for exclusivity.
        unsafe { std::slice::from_raw_parts_mut(self.values.add(first), columns.len()) }
    }

    /// The same matrix with another origin.
    pub(super) fn offset(self, row: usize, column: usize) -> Self {
        let first = row * self.row_stride + column;
        assert!(first <= self.length, "an origin beyond the matrix");
        // SAFETY: the origin lies within the slice this was made from or at its end.
        Self { values: unsafe { self.values.add(first) }, length: self.length - first, ..self }
    }
}

/// A matrix to write, of which this is the only view.
pub(super) struct ViewMut<'a> {
    target: Target<'a>,
    rows: usize,
    columns: usize,
}

impl<'a> ViewMut<'a> {
    /// A view of rows that start `row_stride` apart.
    pub(super) fn new(values: &'a mut [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        // As for a view to read.
        View::new(values, rows, columns, row_stride);
        Self { target: Target::new(values, row_stride), rows, columns }
    }

    /// Some of its columns.
    #[allow(dead_code, reason = "for fused blocks")]
    pub(super) fn column_range(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.columns, "columns beyond the matrix");
        let target = if self.rows == 0 { self.target } else { self.target.offset(0, columns.start) };
        Self { target, columns: columns.len(), ..self }
    }

    /// The same view for a while.
    pub(super) fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { ..*self }
    }

    /// Its rows.
    pub(super) fn rows_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        // SAFETY: nobody else has a view of these elements, and the rows do not overlap.
        (0..self.rows).map(|row| unsafe { self.target.row(row, 0..self.columns) })
    }
}

/// What a product does with what it finds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Into {
    /// Overwrites it.
    Replace,
    /// Adds to it.
    Add,
}

/// `c (+)= scale · a · b` by the calling thread.
///
/// # Safety
/// Nobody else may read or write the `a.rows × b.columns` elements of `c` meanwhile.
pub(super) unsafe fn product<T: Element>(
    set: InstructionSet,
    scale: f32,
    a: View<'_>,
    b: View<'_, T>,
    write: Into,
    c: Target<'_>,
) {
    // SAFETY: the caller vouches for all of `c`.
    unsafe { product_along(Path::of(a, b), set, scale, a, b, write, c) }
}

/// How a product is computed. It is chosen for the whole product, so that no partition changes the result.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    /// Row by row, the right operand read in place.
    DotProducts,
    /// In tiles, the right operand packed.
    Panels,
}

impl Path {
    /// The one for these operands.
    fn of<T: Copy>(a: View<'_>, b: View<'_, T>) -> Self {
        let in_place = a.rows <= FEW_ROWS && b.row_stride == 1 && a.column_stride == 1;
        if in_place { Self::DotProducts } else { Self::Panels }
    }
}

/// # Safety
/// As for [`product`].
unsafe fn product_along<T: Element>(
    path: Path,
    set: InstructionSet,
    scale: f32,
    a: View<'_>,
    b: View<'_, T>,
    write: Into,
    c: Target<'_>,
) {
    assert_eq!(a.columns, b.rows, "inner dimensions");
    if path == Path::DotProducts {
        return T::few_rows(set, scale, a, b, write, c);
    }
    match set {
        InstructionSet::Portable => blocks::<4, 8, false, T>(scale, a, b, write, c),
        // SAFETY: a set other than the portable one is only ever chosen where the machine has it.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2 => unsafe { blocks_avx2(scale, a, b, write, c) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512 | InstructionSet::Avx512Bf16 => unsafe { blocks_avx512(scale, a, b, write, c) },
        #[cfg(not(target_arch = "x86_64"))]
        InstructionSet::Avx2 | InstructionSet::Avx512 | InstructionSet::Avx512Bf16 => {
            unreachable!("an instruction set of another architecture")
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn blocks_avx2<T: Element>(scale: f32, a: View<'_>, b: View<'_, T>, write: Into, c: Target<'_>) {
    blocks::<6, 16, true, T>(scale, a, b, write, c);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx2,fma")]
fn blocks_avx512<T: Element>(scale: f32, a: View<'_>, b: View<'_, T>, write: Into, c: Target<'_>) {
    blocks::<8, 32, true, T>(scale, a, b, write, c);
}

multiversion! {
    /// [`Element::few_rows`] of f32.
    fn few_rows_f32(scale: f32, a: View<'_>, b: View<'_>, write: Into, c: Target<'_>) {
        dot_products(scale, a, b, write, c);
    }
}

multiversion! {
    /// [`Element::few_rows`] of bf16.
    fn few_rows_bf16(scale: f32, a: View<'_>, b: View<'_, bf16>, write: Into, c: Target<'_>) {
        dot_products(scale, a, b, write, c);
    }
}

/// Dot products of rows with columns that lie contiguously.
#[inline(always)]
fn dot_products<T: Element>(scale: f32, a: View<'_>, b: View<'_, T>, write: Into, c: Target<'_>) {
    for column in 0..b.columns {
        let weights = &b.values[column * b.column_stride..][..b.rows];
        for row in 0..a.rows {
            let x = &a.values[row * a.row_stride..][..a.columns];
            let sum = scale * sum(x.len(), |index| x[index] * weights[index].widen());
            // SAFETY: the caller of `product` vouches for these elements.
            let element = unsafe { &mut c.row(row, column..column + 1)[0] };
            *element = if write == Into::Add { *element + sum } else { sum };
        }
    }
}

/// Rows and columns of the parts into which a product is cut for threads.
struct Partition {
    rows: usize,
    columns: usize,
    row_block: usize,
    column_block: usize,
    row_blocks: usize,
    column_blocks: usize,
}

impl Partition {
    /// Cuts columns first, for then each part of `b` is packed once, and rows where that gives too few parts.
    fn new(rows: usize, columns: usize, threads: usize) -> Self {
        let column_block = 96;
        let column_blocks = columns.div_ceil(column_block).max(1);
        let wanted = (4 * threads).div_ceil(column_blocks);
        let row_block = rows.div_ceil(wanted).next_multiple_of(24).clamp(24, 1536);
        Self { rows, columns, row_block, column_block, row_blocks: rows.div_ceil(row_block), column_blocks }
    }

    /// Number of parts.
    fn parts(&self) -> usize {
        self.row_blocks * self.column_blocks
    }

    /// Computes one part of [`product`].
    ///
    /// # Safety
    /// Nobody else may read or write this part of `c` meanwhile.
    #[expect(clippy::too_many_arguments, reason = "those of `product`, and which part")]
    unsafe fn product<T: Element>(
        &self,
        part: usize,
        set: InstructionSet,
        scale: f32,
        a: View<'_>,
        b: View<'_, T>,
        write: Into,
        c: Target<'_>,
    ) {
        let path = Path::of(a, b);
        let (rows, columns) = self.ranges(part);
        let c = c.offset(rows.start, columns.start);
        // SAFETY: the caller vouches for the part, and parts do not overlap.
        unsafe { product_along(path, set, scale, a.row_range(rows), b.column_range(columns), write, c) }
    }

    /// Rows and columns of one part.
    fn ranges(&self, part: usize) -> (Range<usize>, Range<usize>) {
        let (row, column) = (part % self.row_blocks * self.row_block, part / self.row_blocks * self.column_block);
        (row..self.rows.min(row + self.row_block), column..self.columns.min(column + self.column_block))
    }
}

impl Cpu {
    /// `c (+)= scale · a · b`, over the threads.
    pub(super) fn product<T: Element>(&self, scale: f32, a: View<'_>, b: View<'_, T>, write: Into, c: ViewMut<'_>) {
        assert_eq!((c.rows, c.columns), (a.rows, b.columns), "shape of a product");
        let partition = Partition::new(a.rows, b.columns, self.threads());
        self.each(partition.parts(), a.rows * b.columns * a.columns.max(1), |part| {
            // SAFETY: parts do not overlap.
            unsafe { partition.product(part, self.set, scale, a, b, write, c.target) };
        });
    }

    /// `c (+)= a · b` by instructions for pairs of bf16.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn product_of_pairs(&self, a: Pairs<'_>, b: View<'_, bf16>, write: Into, c: ViewMut<'_>) {
        assert_eq!((c.rows, c.columns), (a.rows(), b.columns), "shape of a product");
        let partition = Partition::new(a.rows(), b.columns, self.threads());
        self.each(partition.parts(), a.rows() * b.columns * b.rows.max(1), |part| {
            let (rows, columns) = partition.ranges(part);
            let c = c.target.offset(rows.start, columns.start);
            // SAFETY: only a set that the machine has makes pairs, and parts do not overlap.
            unsafe { product_of_pairs(a.row_range(rows), b.column_range(columns), write, c) };
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|index| ((index * 37 + seed * 11) % 23) as f32 / 23.0 - 0.5).collect()
    }

    fn sets() -> impl Iterator<Item = InstructionSet> {
        InstructionSet::ALL.into_iter().filter(|set| set.is_available())
    }

    #[test]
    fn every_orientation_and_odd_shape_equals_the_definition() {
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (2, 33, 300), (13, 37, 17), (9, 65, 513), (50, 100, 3), (4, 4, 0)] {
            let (left, right) = (values(m * k, 1), values(k * n, 2));
            for transposed in 0..4 {
                let a = match transposed & 1 {
                    0 => View::new(&left, m, k, k),
                    _ => View::new(&left, k, m, m).transposed(),
                };
                let b = match transposed & 2 {
                    0 => View::new(&right, k, n, n),
                    _ => View::new(&right, n, k, k).transposed(),
                };
                let element = |view: View<'_>, i: usize, j: usize| {
                    f64::from(view.values[i * view.row_stride + j * view.column_stride])
                };
                for set in sets() {
                    let mut c = vec![1.0f32; m * n];
                    let partition = Partition::new(m, n, 3);
                    let target = Target::new(&mut c, n);
                    for part in 0..partition.parts() {
                        // SAFETY: one thread.
                        unsafe { partition.product(part, set, 0.5, a, b, Into::Add, target) };
                    }
                    for i in 0..m {
                        for j in 0..n {
                            let sum: f64 = (0..k).map(|p| element(a, i, p) * element(b, p, j)).sum();
                            let expected = 1.0 + 0.5 * sum;
                            let found = f64::from(c[i * n + j]);
                            assert!(
                                (found - expected).abs() < 1e-4,
                                "{m}x{n}x{k} {set:?} {transposed}: {found} {expected}"
                            );
                        }
                    }
                }
            }
        }
    }
}
