//! Products of integers, for every instruction set: rows of 8-bit numbers with a group of a weight.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::ops::Range;

use super::rows::{QuantizedRows, RowBlocks};
use super::{BLOCK, Bits, GROUP, GroupBlock, Quantized, Sums, TILE};
use crate::cpu::simd::{Routine, Vector};

/// Instructions that multiply bytes and sum in 32 bits. All of its functions want the machine to have them.
pub(super) trait Bytes {
    /// What the products of blocks are summed in.
    type Sums: Vector;
    /// The numbers of a block of a group, as products read them.
    type Numbers<'a>;

    /// Runs a routine, compiled with the instructions.
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output;
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
    let mut sums = [[0.0; GROUP]; TILE];
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        B::compiled(Tile::<B> { x, rows, weight, group, sums: &mut sums, instructions: PhantomData });
    }
    sums
}

struct Tile<'a, B> {
    x: &'a QuantizedRows,
    rows: Range<usize>,
    weight: &'a Quantized,
    group: usize,
    sums: &'a mut Sums,
    instructions: PhantomData<B>,
}

impl<B: Bytes> Routine for Tile<'_, B> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            match (self.weight.bits, B::Sums::LANES) {
                (Bits::Eight, GROUP) => self.of_rows::<true, 1>(),
                (Bits::Four, GROUP) => self.of_rows::<false, 1>(),
                (Bits::Eight, _) => self.of_rows::<true, 2>(),
                (Bits::Four, _) => self.of_rows::<false, 2>(),
            }
        }
    }
}

impl<B: Bytes> Tile<'_, B> {
    #[inline(always)]
    unsafe fn of_rows<const EIGHT: bool, const VECTORS: usize>(self) {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            match self.rows.len() {
                1 => self.of::<1, EIGHT, VECTORS>(),
                2 => self.of::<2, EIGHT, VECTORS>(),
                3 => self.of::<3, EIGHT, VECTORS>(),
                4 => self.of::<4, EIGHT, VECTORS>(),
                5 => self.of::<5, EIGHT, VECTORS>(),
                6 => self.of::<6, EIGHT, VECTORS>(),
                7 => self.of::<7, EIGHT, VECTORS>(),
                _ => self.of::<TILE, EIGHT, VECTORS>(),
            }
        }
    }

    /// So many rows.
    #[inline(always)]
    unsafe fn of<const ROWS: usize, const EIGHT: bool, const VECTORS: usize>(self) {
        assert!(VECTORS * B::Sums::LANES == GROUP, "vectors of a group");
        let rows: [RowBlocks<'_>; ROWS] = std::array::from_fn(|row| self.x.row(self.rows.start + row));
        // SAFETY: the caller vouches for the instructions; a group has as many scales and sums.
        unsafe {
            let mut sums = [[B::Sums::splat(0.0); VECTORS]; ROWS];
            for (index, block) in self.weight.group(self.group).enumerate() {
                let numbers = B::numbers::<EIGHT>(block);
                let scales: [B::Sums; VECTORS] = std::array::from_fn(|vector| {
                    B::Sums::load_bf16(block.scales.as_ptr().add(vector * B::Sums::LANES))
                });
                for (sums, row) in sums.iter_mut().zip(&rows) {
                    let products = B::products::<EIGHT, VECTORS>(&numbers, &row.values[index], row.starts[index]);
                    let factor = B::Sums::splat(row.scales[index]);
                    for ((sum, product), scale) in sums.iter_mut().zip(products).zip(scales) {
                        *sum = sum.add(product.mul(scale.mul(factor)));
                    }
                }
            }
            for (found, sums) in self.sums.iter_mut().zip(sums) {
                for (vector, sum) in sums.into_iter().enumerate() {
                    sum.store(found.as_mut_ptr().add(vector * B::Sums::LANES));
                }
            }
        }
    }
}
