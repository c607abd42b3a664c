//! How the result of a product is cut into parts for threads.

use std::ops::Range;

use crate::ops::FEW_ROWS;

/// What computes a product, which decides how it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum Grain {
    /// Vectors, in panels of columns.
    Vectors,
    /// Squares of tiles.
    Tiles {
        /// What a thread spends on reading a row of a part, in columns.
        of_row: usize,
    },
}

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

/// Rows, and columns, of a square of tiles.
const SQUARE: usize = 32;
/// What a thread spends in tiles on packing a column of a part, in rows.
const TILES_OF_COLUMN: usize = 60;
/// And on a row of it, in columns: one that is read where it lies, or nearly so, and one that is packed from columns.
pub(super) const ROW_IN_PLACE: usize = 16;
pub(super) const ROW_ACROSS: usize = 100;
/// And on a part, in rows times columns.
const TILES_OF_PART: usize = 2000;

impl Partition {
    /// The grid of parts, of about `most` elements or fewer, of which the threads are done first.
    ///
    /// Columns that are in several parts are packed for each; and few large parts may leave threads idle.
    pub(super) fn new(grain: Grain, (rows, columns): (usize, usize), threads: usize, most: usize) -> Self {
        match grain {
            Grain::Vectors => Self::of_vectors(rows, columns, threads, most),
            Grain::Tiles { of_row } => Self::of_tiles((rows, columns), of_row, threads, most),
        }
    }

    fn of_vectors(rows: usize, columns: usize, threads: usize, most: usize) -> Self {
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

    /// Equal parts of whole squares, the fewest and squarest that keep the threads busy: of small ones, packing is
    /// most.
    fn of_tiles((rows, columns): (usize, usize), of_row: usize, threads: usize, most: usize) -> Self {
        let most = most.max(SQUARE * SQUARE);
        // One, two, three, four, six, eight, twelve … of equal blocks of whole squares.
        let powers = if most < rows * columns { 10 } else { threads.ilog2() + 4 };
        let blocks = |extent: usize| {
            let numbers = (0..powers).flat_map(|power| [1 << power, 3 << power >> 1]);
            let squares = extent.div_ceil(SQUARE).max(1);
            numbers.take_while(move |number| *number <= squares).map(move |number| squares.div_ceil(number) * SQUARE)
        };
        let fits = |(row_block, column_block): &(usize, usize)| row_block * column_block <= most;
        let grids =
            blocks(rows).flat_map(|row_block| blocks(columns).map(move |column_block| (row_block, column_block)));
        let cost = |&(row_block, column_block): &(usize, usize)| {
            let part = column_block * (row_block + TILES_OF_COLUMN) + row_block * of_row + TILES_OF_PART;
            let parts = rows.div_ceil(row_block) * columns.div_ceil(column_block);
            let waiting = if threads > 1 { part / SHARE_OF_WAITING } else { 0 };
            parts.div_ceil(threads) * part + waiting
        };
        let (row_block, column_block) = grids.filter(fits).min_by_key(cost).unwrap_or((SQUARE, SQUARE));
        let (row_blocks, column_blocks) = (rows.div_ceil(row_block).max(1), columns.div_ceil(column_block).max(1));
        let whole = row_blocks * column_blocks;
        Self { rows, columns, row_block, column_block, row_blocks, column_blocks, whole, row_cut: row_block }
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
