//! Products over the threads of a kernel set: each thread computes parts of the result, which do not overlap.

use std::ops::Range;

use profile::Work;

use half::bf16;

use super::super::Cpu;
#[cfg(target_arch = "x86_64")]
use super::product_of_pairs;
use super::{Element, Finish, Into, Path, View, ViewMut, product_along};

/// Rows and columns of the parts into which a product is cut for threads.
pub(super) struct Partition {
    rows: usize,
    columns: usize,
    row_block: usize,
    column_block: usize,
    row_blocks: usize,
    column_blocks: usize,
}

/// What a thread spends on a column of a part, in rows: packing it, most of which is waiting for memory.
const COST_OF_COLUMN: usize = 40;
/// What it spends on a part, in rows times columns.
const COST_OF_PART: usize = 2000;
/// Of a part's time, what threads wait for the last one on average is one in so many: they are not equally fast.
const SHARE_OF_WAITING: usize = 8;
/// Columns of a panel of the widest set.
const PANEL: usize = 48;

impl Partition {
    /// The grid of parts of which the threads are done first.
    ///
    /// Columns that are in several parts are packed for each; and few large parts may leave threads idle.
    pub(super) fn new(rows: usize, columns: usize, threads: usize) -> Self {
        let grids = [1, 2, 3, 4, 6, 8, 12, 16].into_iter().flat_map(|column_panels| {
            (0..7).map(move |cut| {
                let column_block = column_panels * PANEL;
                let row_block = rows.div_ceil(1 << cut).next_multiple_of(24);
                let column_blocks = columns.div_ceil(column_block).max(1);
                Self {
                    rows,
                    columns,
                    row_block,
                    column_block,
                    row_blocks: rows.div_ceil(row_block).max(1),
                    column_blocks,
                }
            })
        });
        grids.min_by_key(|grid| grid.cost(threads)).expect("there are grids")
    }

    /// About how long the last thread takes.
    fn cost(&self, threads: usize) -> usize {
        let block = |extent: usize, block: usize| block.min(extent.next_multiple_of(8));
        let (rows, columns) = (block(self.rows, self.row_block), block(self.columns, self.column_block));
        // Rows are read once for each part of their columns.
        let groups = columns.div_ceil(4 * PANEL);
        let part = columns * (rows + COST_OF_COLUMN) + 4 * groups * rows + COST_OF_PART;
        let waiting = if threads > 1 { part / SHARE_OF_WAITING } else { 0 };
        self.parts().div_ceil(threads) * part + waiting
    }

    /// Number of parts.
    pub(super) fn parts(&self) -> usize {
        self.row_blocks * self.column_blocks
    }

    /// Rows and columns of one part.
    pub(super) fn ranges(&self, part: usize) -> (Range<usize>, Range<usize>) {
        let (row, column) = (part % self.row_blocks * self.row_block, part / self.row_blocks * self.column_block);
        (row..self.rows.min(row + self.row_block), column..self.columns.min(column + self.column_block))
    }
}

impl Cpu {
    /// `c (+)= scale · a · b`, over the threads.
    pub(in crate::cpu) fn product<T: Element>(
        &self,
        scale: f32,
        a: View<'_>,
        b: View<'_, T>,
        write: Into,
        c: ViewMut<'_>,
    ) {
        let _kernel = self.profile.kernel("product", || Work::product(a.rows(), a.columns(), b.columns()));
        self.finished_product(a, b, Finish { scale, bias: None, write }, c);
    }

    /// `c (+)= scale · a · b (+ bias)`, over the threads.
    pub(in crate::cpu) fn finished_product<T: Element>(
        &self,
        a: View<'_>,
        b: View<'_, T>,
        finish: Finish<'_>,
        c: ViewMut<'_>,
    ) {
        let path = Path::of(a, b);
        self.each_part(a.rows(), b.columns(), b.rows(), c, |rows, columns, c| {
            let (a, b, finish) = (a.row_range(rows), b.column_range(columns.clone()), finish.of_columns(columns));
            // SAFETY: parts do not overlap.
            unsafe { product_along(path, self.set, a, b, finish, c) };
        });
    }

    /// `c (+)= scale · a · b (+ bias)` by instructions for pairs of bf16, over the threads.
    #[cfg(target_arch = "x86_64")]
    pub(in crate::cpu) fn product_of_pairs(
        &self,
        a: View<'_, u32>,
        b: View<'_, bf16>,
        finish: Finish<'_>,
        c: ViewMut<'_>,
    ) {
        let path = Path::of(a, b);
        self.each_part(a.rows(), b.columns(), b.rows(), c, |rows, columns, c| {
            let (a, b, finish) = (a.row_range(rows), b.column_range(columns.clone()), finish.of_columns(columns));
            // SAFETY: only a set that the machine has makes pairs, and parts do not overlap.
            unsafe { product_of_pairs(path, a, b, finish, c) };
        });
    }

    /// Runs a function for each part of a result.
    fn each_part(
        &self,
        rows: usize,
        columns: usize,
        inner: usize,
        c: ViewMut<'_>,
        run: impl Fn(Range<usize>, Range<usize>, super::Target<'_>) + Sync + Send,
    ) {
        assert_eq!(c.shape(), (rows, columns), "shape of a product");
        if rows == 0 || columns == 0 {
            return;
        }
        let (partition, c) = (Partition::new(rows, columns, self.threads()), c.into_target());
        self.each(partition.parts(), rows * columns * inner.max(1), |part| {
            let (rows, columns) = partition.ranges(part);
            let c = c.offset(rows.start, columns.start);
            run(rows, columns, c);
        });
    }
}
