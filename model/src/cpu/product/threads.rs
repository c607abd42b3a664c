//! Products over the threads of a kernel set: each thread computes parts of the result, which do not overlap.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use profile::Work;

use super::super::Cpu;
use super::{Element, Finish, Path, Right, Side, View, ViewMut, product_along};
use super::{PairsRight, product_of_pairs};
use crate::ops::{FEW_ROWS, Write};

/// The parts into which a product is cut for threads: a grid, of which the last parts are cut once more, so that no
/// thread waits long for the one that took the last.
pub(super) struct Partition {
    rows: usize,
    columns: usize,
    row_block: usize,
    column_block: usize,
    row_blocks: usize,
    column_blocks: usize,
    /// Parts of the grid that stay whole, the first ones.
    whole: usize,
    /// Rows of a part of one that is cut; its columns are those of a panel.
    row_cut: usize,
}

/// What a thread spends on a column of a part, in rows: packing it, most of which is waiting for memory.
const COST_OF_COLUMN: usize = 40;
/// What it spends on a part, in rows times columns.
const COST_OF_PART: usize = 2000;
/// Of a part's time, what threads wait for the last one on average is one in so many: they are not equally fast.
const SHARE_OF_WAITING: usize = 8;
/// Columns of a panel of the widest set.
const PANEL: usize = 48;
/// Parts that a part of the grid is cut into, at least, where it has so many rows or columns.
const CUTS: usize = 4;
/// Rows of a tile of the widest set, and so many of them that a panel is worth packing for.
const ROWS: usize = 24;

impl Partition {
    /// The grid of parts, of about `most` elements or fewer, of which the threads are done first.
    ///
    /// Columns that are in several parts are packed for each; and few large parts may leave threads idle.
    pub(super) fn new(rows: usize, columns: usize, threads: usize, most: usize) -> Self {
        let most_rows = (most / PANEL).max(ROWS);
        let grids = [1, 2, 3, 4, 6, 8, 12, 16].into_iter().flat_map(|column_panels| {
            let grid = move |row_block| Self::of_grid(rows, columns, threads, row_block, column_panels * PANEL);
            (0..7).map(move |cut| grid(rows.div_ceil(1 << cut).min(most_rows)))
        });
        let fits = |grid: &Self| grid.column_block == PANEL || grid.row_block * grid.column_block <= most;
        grids.filter(fits).min_by_key(|grid| grid.cost(threads)).expect("there are grids")
    }

    fn of_grid(rows: usize, columns: usize, threads: usize, row_block: usize, column_block: usize) -> Self {
        let row_block = row_block.next_multiple_of(ROWS);
        let (row_blocks, column_blocks) = (rows.div_ceil(row_block).max(1), columns.div_ceil(column_block).max(1));
        // Few rows are a moment's work for each column, in any order: their parts are small as they are.
        let cut = if threads == 1 || rows <= FEW_ROWS { 0 } else { threads };
        let row_cuts = CUTS.div_ceil(column_block / PANEL);
        Self {
            rows,
            columns,
            row_block,
            column_block,
            row_blocks,
            column_blocks,
            whole: (row_blocks * column_blocks).saturating_sub(cut),
            row_cut: row_block.div_ceil(row_cuts).next_multiple_of(ROWS),
        }
    }

    /// About how long the last thread takes.
    fn cost(&self, threads: usize) -> usize {
        let block = |extent: usize, block: usize| block.min(extent.next_multiple_of(8));
        let (rows, columns) = (block(self.rows, self.row_block), block(self.columns, self.column_block));
        let cost = |rows: usize, columns: usize| {
            // Rows are read once for each part of their columns.
            columns * (rows + COST_OF_COLUMN) + 4 * columns.div_ceil(4 * PANEL) * rows + COST_OF_PART
        };
        let grid = self.row_blocks * self.column_blocks;
        if grid == self.whole {
            let part = cost(rows, columns);
            let waiting = if threads > 1 { part / SHARE_OF_WAITING } else { 0 };
            return grid.div_ceil(threads) * part + waiting;
        }
        let part = cost(rows.min(self.row_cut), columns.min(PANEL));
        let parts = rows.div_ceil(self.row_cut) * columns.div_ceil(PANEL);
        let work = self.whole * cost(rows, columns) + (grid - self.whole) * parts * part;
        // Parts of which there are fewer than threads leave some idle.
        let least = (grid * parts).div_ceil(threads) * part;
        (work / threads).max(least) + part / 2
    }

    /// Parts that one of the grid is cut into, down and across.
    fn cuts(&self) -> (usize, usize) {
        (self.row_block.div_ceil(self.row_cut), self.column_block / PANEL)
    }

    /// Number of parts. Some may have nothing in them.
    pub(super) fn parts(&self) -> usize {
        let (down, across) = self.cuts();
        self.whole + (self.row_blocks * self.column_blocks - self.whole) * down * across
    }

    /// Rows and columns of one part.
    pub(super) fn ranges(&self, part: usize) -> (Range<usize>, Range<usize>) {
        let (down, across) = self.cuts();
        let (block, cut) = match part.checked_sub(self.whole) {
            None => (part, None),
            Some(part) => (self.whole + part / (down * across), Some(part % (down * across))),
        };
        let first = (block % self.row_blocks * self.row_block, block / self.row_blocks * self.column_block);
        let within = |first: usize, length: usize, end: usize| first.min(end)..end.min(first + length);
        let rows = within(first.0, self.row_block, self.rows);
        let columns = within(first.1, self.column_block, self.columns);
        let Some(cut) = cut else { return (rows, columns) };
        let (row, column) = (cut % down * self.row_cut, cut / down * PANEL);
        (within(rows.start + row, self.row_cut, rows.end), within(columns.start + column, PANEL, columns.end))
    }
}

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
        let path = self.of_floats(Path::of(a, b.strides()));
        self.each_part(a.rows(), b.columns(), b.rows(), c, |rows, columns, c| {
            let (a, b, finish) = (a.row_range(rows), b.column_range(columns.clone()), finish.of_columns(columns));
            // SAFETY: parts do not overlap.
            unsafe { product_along(path, self.set, a, &[Side { b, finish, c }]) };
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
        self.each_part(a.rows(), b.columns(), b.rows(), c, |rows, columns, c| {
            let (a, b, finish) = (a.row_range(rows), b.column_range(columns.clone()), finish.of_columns(columns));
            // SAFETY: only a set that the machine has makes pairs, and parts do not overlap.
            unsafe { product_of_pairs(path, self.set, a, &[Side { b, finish, c }]) };
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
        let c = c.into_target();
        let partition = Partition::new(rows, columns, self.threads(), usize::MAX);
        self.each_of(&partition, rows * columns * inner.max(1), |rows, columns| {
            let c = c.offset(rows.start, columns.start);
            run(rows, columns, c);
        });
    }

    /// Runs a function for each part, of so many elements or fewer, of results of one shape, that many products in all.
    pub(in crate::cpu) fn each_small_part(
        &self,
        (rows, columns): (usize, usize),
        most: usize,
        products: usize,
        run: impl Fn(Range<usize>, Range<usize>) + Sync + Send,
    ) {
        if rows > 0 && columns > 0 {
            self.each_of(&Partition::new(rows, columns, self.threads(), most), products, run);
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
        unsafe { product_along(self.of_floats(path), self.set, a, sides) }
    }

    /// How a product of f32 is computed whose operands have this path.
    fn of_floats(&self, path: Path) -> Path {
        if self.splits && path == Path::Blocks { Path::Split } else { path }
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
