//! Products of few rows in tiles: the rows of the weight are those of left tiles, where they lie, and what they are
//! multiplied with is right tiles, a few kilobytes. The sums come out with rows and columns exchanged.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{_mm512_load_ps, _mm512_setzero_ps};
use std::ops::Range;

use half::bf16;

use super::super::blocks::{blocks_of, with_words};
use super::super::kernel::store;
use super::super::pack::avx512::pack_pairs;
use super::super::{Finish, Target, View};
use crate::cpu::amx::{Ready, SIDE, Strip, TILE, Tiles};
use crate::cpu::simd::{Avx512, Avx512Bf16, Multiplier, Routine, Vector, transposed};

/// Values of a row of a tile.
const VALUES: usize = 2 * SIDE;

/// `c (+)= scale · a · b (+ bias)` of up to 16 rows, the rows of `a` and the columns of `b` lying contiguously.
///
/// # Safety
/// The machine has [`Avx512Bf16`]'s instructions and the process the permission to use `T`, and nobody else may touch
/// these elements of `c` meanwhile.
pub(super) unsafe fn product<T: Tiles>(a: View<'_, bf16>, b: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>) {
    assert!(
        a.rows() <= SIDE && a.columns() == b.rows() && b.row_stride() == 1,
        "few rows, columns that lie contiguously"
    );
    let (weight, steps) = (b.transposed(), b.rows().div_ceil(VALUES));
    with_words((2 * steps + 1) * TILE, |buffer| {
        // SAFETY: the buffer has as many words; the caller vouches for operands, results, machine and permission.
        unsafe {
            let (right, left) = (buffer, buffer.add(steps * TILE));
            let sums = left.add(steps * TILE).cast::<f32>();
            let words = b.rows().div_ceil(2);
            pack_pairs(a.transposed(), 0..words, 0..a.rows(), right);
            right.add(words * SIDE).write_bytes(0, steps * TILE - words * SIDE);
            let _ready = Ready::<T>::new();
            for columns in blocks_of(b.columns(), SIDE) {
                let is_last = columns.end == b.columns();
                Rows { weight: weight.row_range(columns.clone()), is_last, right, left, sums }.multiply::<T>();
                let (rows, c) = (a.rows(), c.offset(0, columns.start));
                let finish = finish.of_columns(columns.clone());
                Avx512Bf16::compiled(Finished { sums, rows, columns: columns.len(), finish, c });
            }
        }
    });
}

/// Up to 16 rows of the weight.
struct Rows<'a> {
    weight: View<'a, bf16>,
    /// Whether no others come behind them.
    is_last: bool,
    right: *const u32,
    /// Room for packed tiles.
    left: *mut u32,
    sums: *mut f32,
}

impl Rows<'_> {
    /// Their products with all that is in the right tiles.
    ///
    /// # Safety
    /// As for [`product`].
    unsafe fn multiply<T: Tiles>(&self) {
        let (rows, inner) = (self.weight.rows(), self.weight.columns());
        let steps = inner.div_ceil(VALUES);
        // Tiles that are whole lie as they should; the others are packed, filled up with zeros.
        let whole = if rows == SIDE { inner / VALUES } else { 0 };
        let row = self.weight.row_stride() * size_of::<bf16>();
        let first = self.weight.row(0).as_ptr().cast::<u32>();
        // The machine does not follow sixteen rows at once by itself: the next ones are asked for, in the order in
        // which their bytes lie.
        let ahead = if self.is_last { first } else { first.wrapping_byte_add(SIDE * row) };
        let (left_step, right, sums) = (VALUES * size_of::<bf16>(), self.right, self.sums);
        let in_place = Strip { left: first, left_row: row, left_step, right, steps: whole, ahead, sums, go_on: false };
        // SAFETY: the tiles are whole or packed, for which there is room, and the caller vouches for the rest.
        unsafe {
            // Sums of nothing are zero.
            T::strip(&in_place);
            if whole < steps {
                self.pack(whole..steps);
                T::strip(&Strip {
                    left: self.left,
                    ahead: self.left,
                    left_row: SIDE * size_of::<u32>(),
                    left_step: TILE * size_of::<u32>(),
                    right: right.add(whole * TILE),
                    steps: steps - whole,
                    go_on: true,
                    ..in_place
                });
            }
        }
    }

    /// Packs some tiles of all rows.
    ///
    /// # Safety
    /// There is room for them.
    unsafe fn pack(&self, tiles: Range<usize>) {
        // SAFETY: the caller vouches for the room, and a word holds two values.
        unsafe {
            self.left.write_bytes(0, tiles.len() * TILE);
            for row in 0..self.weight.rows() {
                let values = &self.weight.row(row)[tiles.start * VALUES..];
                for (tile, values) in values.chunks(VALUES).enumerate() {
                    let line = self.left.add(tile * TILE + row * SIDE);
                    std::ptr::copy_nonoverlapping(values.as_ptr(), line.cast(), values.len());
                }
            }
        }
    }
}

/// The sums of a tile whose columns are rows of the result, and what becomes of them.
struct Finished<'a> {
    sums: *const f32,
    rows: usize,
    columns: usize,
    finish: Finish<'a>,
    c: Target<'a>,
}

impl Routine for Finished<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let bias = self.finish.bias.map_or(std::ptr::null(), <[f32]>::as_ptr);
        // SAFETY: the sums are of a tile; the caller vouches for the machine and for these elements of the result.
        unsafe {
            // In a loop of this function: what a function of the library calls is compiled without the instructions.
            let mut lines = [_mm512_setzero_ps(); SIDE];
            for (number, line) in lines.iter_mut().enumerate() {
                *line = _mm512_load_ps(self.sums.add(number * SIDE));
            }
            for (row, sums) in transposed(lines).into_iter().enumerate().take(self.rows) {
                let c = self.c.row(row, 0..self.columns).as_mut_ptr();
                store(Avx512::of(sums), self.columns, &self.finish, bias, c);
            }
        }
    }
}
