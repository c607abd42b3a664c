//! Intel AMX: whether this process may use its tiles, and products in them behind a seam that has two sides, the tile
//! registers and an emulation of their bits ([`Tiles`]).
//!
//! A *tile* is 16 rows of 16 words: 1 KiB. A left tile has in each row 16 pairs of bf16 along the inner dimension of a
//! product; a right one has a row for each pair, and a word for each column. Operands are laid out tile by tile, zeros
//! beyond their edges, so that every product is of whole tiles.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

mod emulation;
mod permission;
mod registers;

pub(super) use emulation::Emulated;
pub use permission::TilesRefused;
pub(super) use permission::permission;
pub(super) use registers::Registers;

/// Rows of a tile; and words of a row.
pub(super) const SIDE: usize = 16;
/// Words of a tile.
pub(super) const TILE: usize = SIDE * SIDE;

/// Two by two tiles of sums, and what is summed: the shape that loads the fewest tiles for each product, one.
#[derive(Clone, Copy)]
pub(super) struct Square {
    /// The first of the left tiles of the upper 16 rows; the others of these rows follow it.
    pub left: *const u32,
    /// How far behind it, in words, is the one of the lower 16 rows.
    pub left_stride: usize,
    /// The first of the right tiles of the first 16 columns; the others of these columns follow it.
    pub right: *const u32,
    /// How far behind it, in words, is the one of the next 16 columns.
    pub right_stride: usize,
    /// Tiles along the inner dimension.
    pub steps: usize,
    /// The sums: 32 rows of 32.
    pub sums: *mut f32,
    /// Whether to go on with the sums that are there, rather than with zeros.
    pub go_on: bool,
}

/// What multiplies tiles. Each element is summed over tiles along the inner dimension, ascending, from +0.
pub(super) trait Tiles {
    /// Makes the calling thread ready; to be called before products, and again after foreign code may have used tiles.
    ///
    /// # Safety
    /// The process has the permission to use tiles.
    unsafe fn begin();

    /// Leaves nothing that would have to be saved when the thread is switched.
    ///
    /// # Safety
    /// As for [`Tiles::begin`].
    unsafe fn end();

    /// Products of bf16, summed in f32.
    ///
    /// # Safety
    /// The thread is ready; all tiles may be read and the sums written.
    unsafe fn square(square: &Square);
}

#[cfg(test)]
mod tests;
