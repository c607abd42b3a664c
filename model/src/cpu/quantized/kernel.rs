//! Products of integers, for every instruction set: rows of 8-bit numbers with a group of a weight.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::ops::Range;

use super::rows::{QuantizedRows, RowBlocks};
use super::{BLOCK, Bits, GROUP, GroupBlock, Quantized, ScaleType, Sums, TILE};
use crate::cpu::simd::{Multiplier, Routine, Vector};

/// Instructions that multiply bytes and sum in 32 bits. All of its functions want the machine to have them.
pub(super) trait Bytes: Multiplier {
    /// The numbers of a block of a group, as products read them.
    type Numbers<'a>;

    /// The numbers of a block, of 8 bits or of 4.
    unsafe fn numbers<const EIGHT: bool>(block: GroupBlock<'_>) -> Self::Numbers<'_>;
    /// `start + Σ number · x` for each row of the group, in f32: `VECTORS` times as many lanes are a group.
    unsafe fn products<const EIGHT: bool, const VECTORS: usize>(
        numbers: &Self::Numbers<'_>,
        x: &[i8; BLOCK],
        start: i32,
    ) -> [Self::Sums; VECTORS];
}

/// The products of up to [`TILE`] rows with a group.
///
/// # Safety
/// The machine has the instructions.
pub(super) unsafe fn tile<B: Bytes>(x: &QuantizedRows, rows: Range<usize>, weight: &Quantized, group: usize) -> Sums {
    let tile = Tile { x, rows, weight, group };
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        match (weight.bits, B::Sums::LANES) {
            (Bits::Eight, GROUP) => tile.of_vectors::<B, true, 1>(),
            (Bits::Four, GROUP) => tile.of_vectors::<B, false, 1>(),
            (Bits::Eight, _) => tile.of_vectors::<B, true, 2>(),
            (Bits::Four, _) => tile.of_vectors::<B, false, 2>(),
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
    /// Each number of rows is a function of its own, whose sums stay in registers.
    unsafe fn of_vectors<B: Bytes, const EIGHT: bool, const VECTORS: usize>(self) -> Sums {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            match self.rows.len() {
                1 => B::compiled(self.of::<B, 1, EIGHT, VECTORS>()),
                2 => B::compiled(self.of::<B, 2, EIGHT, VECTORS>()),
                3 => B::compiled(self.of::<B, 3, EIGHT, VECTORS>()),
                4 => B::compiled(self.of::<B, 4, EIGHT, VECTORS>()),
                5 => B::compiled(self.of::<B, 5, EIGHT, VECTORS>()),
                6 => B::compiled(self.of::<B, 6, EIGHT, VECTORS>()),
                7 => B::compiled(self.of::<B, 7, EIGHT, VECTORS>()),
                _ => B::compiled(self.of::<B, TILE, EIGHT, VECTORS>()),
            }
        }
    }

    fn of<B, const ROWS: usize, const EIGHT: bool, const VECTORS: usize>(self) -> OfRows<'a, B, ROWS, EIGHT, VECTORS> {
        OfRows(self, PhantomData)
    }
}

/// A tile of so many rows.
struct OfRows<'a, B, const ROWS: usize, const EIGHT: bool, const VECTORS: usize>(Tile<'a>, PhantomData<B>);

impl<B: Bytes, const ROWS: usize, const EIGHT: bool, const VECTORS: usize> Routine
    for OfRows<'_, B, ROWS, EIGHT, VECTORS>
{
    type Output = Sums;

    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> Sums {
        assert!(VECTORS * B::Sums::LANES == GROUP, "vectors of a group");
        let Tile { x, rows, weight, group } = self.0;
        let rows: [RowBlocks<'_>; ROWS] = std::array::from_fn(|row| x.row(rows.start + row));
        let mut found = [[0.0; GROUP]; TILE];
        // SAFETY: the caller vouches for the instructions; a group has as many scales and sums.
        unsafe {
            let mut sums = [[B::Sums::splat(0.0); VECTORS]; ROWS];
            for (index, block) in weight.group(group).enumerate() {
                let numbers = B::numbers::<EIGHT>(block);
                let scales: [B::Sums; VECTORS] = std::array::from_fn(|vector| {
                    let scales = block.scales.as_ptr().add(vector * B::Sums::LANES);
                    match block.scale_type {
                        ScaleType::Bf16 => B::Sums::load_bf16(scales.cast()),
                        ScaleType::F16 => B::Sums::load_f16(scales.cast()),
                    }
                });
                for (sums, row) in sums.iter_mut().zip(&rows) {
                    let products = B::products::<EIGHT, VECTORS>(&numbers, &row.values[index], row.starts[index]);
                    let factor = B::Sums::splat(row.scales[index]);
                    for ((sum, product), scale) in sums.iter_mut().zip(products).zip(scales) {
                        *sum = sum.add(product.mul(scale.mul(factor)));
                    }
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
