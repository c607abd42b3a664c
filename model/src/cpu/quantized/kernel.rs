//! Products of integers, for every instruction set: rows of 8-bit numbers with a group of a weight.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::ops::Range;

use super::rows::{QuantizedRows, RowBlock};
use super::scaling::{Scale, ScaleAndOffset, Scaled, ScalesOfHalves, plus};
use super::{BLOCK, GROUP, GroupBlock, Quantized, SHARING, Scaling, Sums, TILE};
use crate::cpu::simd::{Routine, Vector};

/// Instructions that multiply bytes and sum in 32 bits. All of its functions want the machine to have them.
pub(super) trait Bytes {
    /// Sums side by side, in f32.
    type Sums: Vector;
    /// The numbers of a block of a group, as products read them.
    type Numbers<'a>;

    /// Runs a routine, compiled with the instructions.
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output;

    /// Asks for memory behind a block whose numbers have so many bits, and which so many rows are multiplied with.
    #[inline(always)]
    fn ask_for<const BITS: usize, const ROWS: usize>(_: GroupBlock<'_>) {}
    /// The numbers of a block, of so many bits.
    unsafe fn numbers<const BITS: usize>(block: GroupBlock<'_>) -> Self::Numbers<'_>;
    /// `start + Σ number · x` for each part of the block and each row of the group, in f32: `VECTORS` times as many
    /// lanes are a group.
    unsafe fn products<const BITS: usize, const PARTS: usize, const VECTORS: usize>(
        numbers: &Self::Numbers<'_>,
        x: &[i8; BLOCK],
        starts: [i32; PARTS],
    ) -> [[Self::Sums; VECTORS]; PARTS];
    /// Small integers that lie side by side, as many as there are lanes.
    unsafe fn integers(from: *const i8) -> Self::Sums;
}

/// The products of up to [`TILE`] rows with a group.
///
/// # Safety
/// The machine has the instructions.
pub(super) unsafe fn tile<B: Bytes>(x: &QuantizedRows, rows: Range<usize>, weight: &Quantized, group: usize) -> Sums {
    let tile = Tile { x, rows, weight, group };
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        match GROUP / B::Sums::LANES {
            1 => tile.of_scales::<B, 1>(),
            2 => tile.of_scales::<B, 2>(),
            _ => tile.of_scales::<B, 4>(),
        }
    }
}

/// Rows and a group.
struct Tile<'a> {
    x: &'a QuantizedRows,
    rows: Range<usize>,
    weight: &'a Quantized,
    group: usize,
}

impl<'a> Tile<'a> {
    unsafe fn of_scales<B: Bytes, const VECTORS: usize>(self) -> Sums {
        let layout = self.weight.layout;
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            match (layout.scaling(), layout.bits()) {
                (Scaling::Bf16 | Scaling::F16, 8) => self.of_rows::<B, Scale, 8, VECTORS>(),
                (Scaling::Bf16 | Scaling::F16, 4) => self.of_rows::<B, Scale, 4, VECTORS>(),
                (Scaling::WithOffset, 4) => self.of_rows::<B, ScaleAndOffset, 4, VECTORS>(),
                (Scaling::WithOffset, 5) => self.of_rows::<B, ScaleAndOffset, 5, VECTORS>(),
                (Scaling::OfHalves, 6) => self.of_rows::<B, ScalesOfHalves, 6, VECTORS>(),
                _ => unreachable!("a layout of other numbers"),
            }
        }
    }

    /// Each number of rows is a function of its own, whose sums stay in registers.
    unsafe fn of_rows<B: Bytes, S: Scaled, const BITS: usize, const VECTORS: usize>(self) -> Sums {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            match self.rows.len() {
                1 => B::compiled(self.of::<B, S, 1, BITS, VECTORS>()),
                2 => B::compiled(self.of::<B, S, 2, BITS, VECTORS>()),
                3 => B::compiled(self.of::<B, S, 3, BITS, VECTORS>()),
                4 => B::compiled(self.of::<B, S, 4, BITS, VECTORS>()),
                5 => B::compiled(self.of::<B, S, 5, BITS, VECTORS>()),
                6 => B::compiled(self.of::<B, S, 6, BITS, VECTORS>()),
                7 => B::compiled(self.of::<B, S, 7, BITS, VECTORS>()),
                _ => B::compiled(self.of::<B, S, TILE, BITS, VECTORS>()),
            }
        }
    }

    fn of<B, S, const ROWS: usize, const BITS: usize, const VECTORS: usize>(
        self,
    ) -> OfRows<'a, B, S, ROWS, BITS, VECTORS> {
        OfRows(self, PhantomData)
    }
}

/// A tile of so many rows.
struct OfRows<'a, B, S, const ROWS: usize, const BITS: usize, const VECTORS: usize>(Tile<'a>, PhantomData<(B, S)>);

impl<B: Bytes, S: Scaled, const ROWS: usize, const BITS: usize, const VECTORS: usize> Routine
    for OfRows<'_, B, S, ROWS, BITS, VECTORS>
{
    type Output = Sums;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> Sums {
        assert!(VECTORS * B::Sums::LANES == GROUP, "vectors of a group");
        let Tile { x, rows, weight, group } = self.0;
        let rows: [&[RowBlock]; ROWS] = std::array::from_fn(|row| x.row(rows.start + row));
        let mut found = [[0.0; GROUP]; TILE];
        // SAFETY: the caller vouches for the instructions; a group has as many sums.
        unsafe {
            let zero = [B::Sums::splat(0.0); VECTORS];
            let (mut sums, mut wholes) = ([zero; ROWS], [zero; 2]);
            for (index, block) in weight.group(group).enumerate() {
                if index % SHARING == 0 {
                    wholes = S::wholes::<B, VECTORS>(block, wholes);
                }
                B::ask_for::<BITS, ROWS>(block);
                let numbers = B::numbers::<BITS>(block);
                let factors = S::factors::<B, VECTORS>(block, &wholes);
                for (sums, row) in sums.iter_mut().zip(&rows) {
                    *sums = plus(*sums, S::product::<B, BITS, VECTORS>(&numbers, &factors, &row[index]));
                }
            }
            for (found, sums) in found.iter_mut().zip(sums) {
                for (vector, sum) in sums.into_iter().enumerate() {
                    sum.store(found.as_mut_ptr().add(vector * B::Sums::LANES));
                }
            }
        }
        found
    }
}
