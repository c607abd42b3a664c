//! Products over the threads of a kernel set: each thread computes parts of the result, which do not overlap.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use profile::Work;

use super::super::{Cpu, Tensor};
use super::partition::{Grain, Partition, ROW_ACROSS, ROW_IN_PLACE};
use super::{Element, Finish, PairsRight, Path, Right, Side, SplitView, View, ViewMut};
use super::{product_across_rows, product_along, product_of_pairs, product_of_split};
use crate::ops::Write;

impl Cpu {
    /// `c (+)= scale · a · b`, over the threads.
    pub(in crate::cpu) fn product<T: Element>(
        &self,
        scale: f32,
        a: View<'_>,
        b: View<'_, T>,
        write: Write,
        c: ViewMut<'_>,
    ) {
        let _kernel = self.profile.kernel("product", || Work::product(a.rows(), a.columns(), b.columns()));
        self.finished_product(a, b, Finish { scale, bias: None, write }, c);
    }

    /// `c (+)= scale · a · b (+ bias)`, over the threads.
    pub(in crate::cpu) fn finished_product<R: Right>(&self, a: View<'_>, b: R, finish: Finish<'_>, c: ViewMut<'_>) {
        let path = Path::of(a, b.strides());
        let grain = self.grain(path, false);
        self.each_part(grain, [a.rows(), b.columns(), b.rows()], c, |rows, columns, c| {
            let (a, b, finish) = (a.row_range(rows), b.column_range(columns.clone()), finish.of_columns(columns));
            // SAFETY: parts do not overlap.
            unsafe { product_along(path, self.set, a, &[Side { b, finish, c }]) };
        });
    }

    /// The same in the precision that is asked for of products with weights and of their gradients.
    pub(in crate::cpu) fn product_of_precision<R: Right>(&self, a: View<'_>, b: R, finish: Finish<'_>, c: ViewMut<'_>) {
        if !self.splits(Path::of(a, b.strides())) {
            return self.finished_product(a, b, finish, c);
        }
        let (of_row, mut buffer) = (if a.column_stride() == 1 { ROW_IN_PLACE } else { ROW_ACROSS }, Tensor::default());
        let (a, grain) = (self.split(a, &mut buffer), Grain::Tiles { of_row });
        self.each_part(grain, [a.rows(), b.columns(), b.rows()], c, |rows, columns, c| {
            let (a, b, finish) = (a.row_range(rows), b.column_range(columns.clone()), finish.of_columns(columns));
            // SAFETY: parts do not overlap, and only with a set that has tiles operands are split.
            unsafe { product_of_split(self.set, a, &[Side { b, finish, c }]) };
        });
    }

    /// `c (+)= scale · a · b (+ bias)` by instructions for pairs of bf16, over the threads.
    pub(in crate::cpu) fn product_of_pairs<R: PairsRight>(
        &self,
        a: View<'_, u32>,
        b: R,
        finish: Finish<'_>,
        c: ViewMut<'_>,
    ) {
        let path = Path::of(a, b.strides());
        let grain = self.grain(path, true);
        self.each_part(grain, [a.rows(), b.columns(), b.rows()], c, |rows, columns, c| {
            let (a, b, finish) = (a.row_range(rows), b.column_range(columns.clone()), finish.of_columns(columns));
            // SAFETY: only a set that the machine has makes pairs, and parts do not overlap.
            unsafe { product_of_pairs(path, self.set, a, &[Side { b, finish, c }]) };
        });
    }

    /// `c += aᵀ · b`, both pairs of bf16 along the columns of rows that are summed over; `b` and `c` have so many
    /// columns.
    pub(in crate::cpu) fn product_across_rows(
        &self,
        a: View<'_, u32>,
        b: View<'_, u32>,
        columns: usize,
        c: &mut Tensor,
    ) {
        let (a, b) = (a.of_halves(c.rows()), b.of_halves(columns));
        assert_eq!(a.rows(), b.rows(), "rows that are summed over");
        let _kernel = self.profile.kernel("weight gradient", || Work::product(a.columns(), a.rows(), b.columns()));
        let finish = Finish { scale: 1.0, bias: None, write: Write::Add };
        let grain = Grain::Tiles { of_row: ROW_ACROSS };
        self.each_part(grain, [a.columns(), b.columns(), a.rows()], c.view_mut(), |rows, columns, c| {
            let (a, side) = (a.column_range(rows), Side { b: b.column_range(columns), finish, c });
            // SAFETY: parts do not overlap, and only a set with tiles has such products.
            unsafe { product_across_rows(self.set, a, side) };
        });
    }

    /// What computes a product that has this path, of f32 or of bf16.
    pub(in crate::cpu) fn grain(&self, path: Path, of_bf16: bool) -> Grain {
        if path == Path::Blocks && of_bf16 && self.set.has_tiles() {
            Grain::Tiles { of_row: ROW_IN_PLACE }
        } else {
            Grain::Vectors
        }
    }

    /// Runs a function for each part of a result of so many rows and columns, and so many products for each element.
    fn each_part(
        &self,
        grain: Grain,
        [rows, columns, inner]: [usize; 3],
        c: ViewMut<'_>,
        run: impl Fn(Range<usize>, Range<usize>, super::Target<'_>) + Sync + Send,
    ) {
        assert_eq!(c.shape(), (rows, columns), "shape of a product");
        if rows == 0 || columns == 0 {
            return;
        }
        let c = c.into_target();
        let partition = Partition::new(grain, (rows, columns), self.threads(), usize::MAX);
        self.each_of(&partition, rows * columns * inner.max(1), |rows, columns| {
            let c = c.offset(rows.start, columns.start);
            run(rows, columns, c);
        });
    }

    /// Runs a function for each part, of so many elements or fewer, of results of one shape, that many products in all.
    pub(in crate::cpu) fn each_small_part(
        &self,
        grain: Grain,
        (rows, columns): (usize, usize),
        most: usize,
        products: usize,
        run: impl Fn(Range<usize>, Range<usize>) + Sync + Send,
    ) {
        if rows > 0 && columns > 0 {
            self.each_of(&Partition::new(grain, (rows, columns), self.threads(), most), products, run);
        }
    }

    fn each_of(&self, partition: &Partition, products: usize, run: impl Fn(Range<usize>, Range<usize>) + Sync + Send) {
        self.each(partition.parts(), products, |part| {
            let (rows, columns) = partition.ranges(part);
            if !rows.is_empty() && !columns.is_empty() {
                run(rows, columns);
            }
        });
    }

    /// Rows and columns of a product by the calling thread.
    ///
    /// # Safety
    /// Nobody else may read or write the elements of each result meanwhile.
    pub(in crate::cpu) unsafe fn product_along<R: Right>(&self, path: Path, a: View<'_>, sides: &[Side<'_, R>]) {
        // SAFETY: the caller vouches for the results.
        unsafe { product_along(path, self.set, a, sides) }
    }

    /// As [`Cpu::product_along`], of values that are split.
    ///
    /// # Safety
    /// As there.
    pub(in crate::cpu) unsafe fn product_of_split_along<R: Right>(&self, a: SplitView<'_>, sides: &[Side<'_, R>]) {
        // SAFETY: the caller vouches for the results, and only with a set that has tiles operands are split.
        unsafe { product_of_split(self.set, a, sides) }
    }

    /// As [`Cpu::product_along`], `a` being pairs of bf16.
    ///
    /// # Safety
    /// As there.
    pub(in crate::cpu) unsafe fn product_of_pairs_along<R: PairsRight>(
        &self,
        path: Path,
        a: View<'_, u32>,
        sides: &[Side<'_, R>],
    ) {
        // SAFETY: the caller vouches for the results, and only a set that the machine has makes pairs.
        unsafe { product_of_pairs(path, self.set, a, sides) }
    }
}
