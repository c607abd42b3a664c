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

use std::marker::PhantomData;

pub(super) use emulation::Emulated;
pub use permission::TilesRefused;
pub(super) use permission::permission;
pub(super) use registers::Registers;

/// Rows of a tile; and words of a row.
pub(super) const SIDE: usize = 16;
/// Words of a tile.
pub(super) const TILE: usize = SIDE * SIDE;

/// The tiles of an operand: those of 16 rows (or, of a right operand, columns), and those of the next 16. Distances are
/// in bytes. A tile is packed, or a part of a matrix where it lies.
#[derive(Clone, Copy)]
pub(super) struct Strips {
    /// The first tile of the first 16.
    pub first: *const u32,
    /// How far behind it is that of the next 16.
    pub next: usize,
    /// From a row of a tile to the next.
    pub row: usize,
    /// From a tile to the next along the inner dimension.
    pub step: usize,
}

impl Strips {
    /// Packed tiles behind one another, those of the next 16 so many words behind the first.
    pub(super) fn packed(first: *const u32, next: usize) -> Self {
        Self { first, next: next * size_of::<u32>(), row: SIDE * size_of::<u32>(), step: TILE * size_of::<u32>() }
    }

    /// Those from some tile along the inner dimension on.
    pub(super) fn from(self, tile: usize) -> Self {
        Self { first: self.first.wrapping_byte_add(tile * self.step), ..self }
    }
}

/// From a row of a square's sums to the next where nothing is between them, in bytes.
pub(super) const SUMS_ROW: usize = 2 * SIDE * size_of::<f32>();

/// Two by two tiles of sums, and what is summed: the shape that loads the fewest tiles for each product, one.
#[derive(Clone, Copy)]
pub(super) struct Square {
    /// The left operand.
    pub left: Strips,
    /// The right one. It is not kept in the first-level cache: the left one is multiplied with others next.
    pub right: Strips,
    /// Of operands in two matrices, values and the rests of them: the first tile of the left and of the right rests,
    /// which lie as the values do. Of each step the products of left rests are added first, those of right rests last,
    /// and none of two rests.
    pub rests: Option<[*const u32; 2]>,
    /// Tiles along the inner dimension.
    pub steps: usize,
    /// The sums: 32 rows of 32.
    pub sums: *mut f32,
    /// From a row of them to the next, in bytes.
    pub sums_row: usize,
    /// Whether to go on with the sums that are there, rather than with zeros.
    pub go_on: bool,
}

/// One tile of sums, of 16 rows and 16 columns. Its products wait for each other, about as long as two tiles would
/// take: memory gives left operands more slowly than that.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    /// The first left tile.
    pub left: *const u32,
    /// From a row of a left tile to the next, in bytes.
    pub left_row: usize,
    /// From a left tile to the next along the inner dimension, in bytes.
    pub left_step: usize,
    /// The right tiles, packed.
    pub right: *const u32,
    /// Tiles along the inner dimension.
    pub steps: usize,
    /// Where the left operand goes on: as much as a step reads is asked for with each step, one byte after the other.
    /// Nothing is read there, and any address will do.
    pub ahead: *const u32,
    /// The sums: 16 rows of 16.
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

    /// The same, with the same bits, of a strip.
    ///
    /// # Safety
    /// As for [`Tiles::square`].
    unsafe fn strip(strip: &Strip);
}

/// The calling thread is ready for tiles, and has none in use afterwards: while it waits, nothing is saved for it.
pub(super) struct Ready<T: Tiles>(PhantomData<T>);

impl<T: Tiles> Ready<T> {
    /// # Safety
    /// As for [`Tiles::begin`].
    pub(super) unsafe fn new() -> Self {
        // SAFETY: the caller vouches for it.
        unsafe { T::begin() };
        Self(PhantomData)
    }
}

impl<T: Tiles> Drop for Ready<T> {
    fn drop(&mut self) {
        // SAFETY: whoever made this had the permission.
        unsafe { T::end() }
    }
}

#[cfg(test)]
mod tests;
