//! What sums of integers are multiplied with, for every instruction set: scales of blocks, quantised ones, and offsets.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use super::kernel::Bytes;
use super::rows::RowBlocks;
use super::{GroupBlock, Scaling, small};
use crate::cpu::simd::Vector;

/// Two numbers for each row of a group.
pub(super) type Pair<V, const VECTORS: usize> = [[V; VECTORS]; 2];

/// How sums of integers and the scales of a block make its product. Nothing is fused, so that every set rounds alike. All
/// functions want the machine to have the instructions.
pub(super) trait Scaled {
    /// What [`super::SHARING`] blocks share, given that of those before.
    #[inline(always)]
    unsafe fn wholes<B: Bytes, const VECTORS: usize>(
        _: GroupBlock<'_>,
        none: Pair<B::Sums, VECTORS>,
    ) -> Pair<B::Sums, VECTORS> {
        none
    }

    /// What a block's sums of integers are multiplied with.
    unsafe fn factors<B: Bytes, const VECTORS: usize>(
        block: GroupBlock<'_>,
        wholes: &Pair<B::Sums, VECTORS>,
    ) -> Pair<B::Sums, VECTORS>;

    /// The product of block `index` with a row.
    unsafe fn product<B: Bytes, const BITS: usize, const VECTORS: usize>(
        numbers: &B::Numbers<'_>,
        factors: &Pair<B::Sums, VECTORS>,
        row: RowBlocks<'_>,
        index: usize,
    ) -> [B::Sums; VECTORS];
}

/// [`Scaling::Bf16`] and [`Scaling::F16`].
pub(super) struct Scale;

impl Scaled for Scale {
    #[inline(always)]
    unsafe fn factors<B: Bytes, const VECTORS: usize>(
        block: GroupBlock<'_>,
        _: &Pair<B::Sums, VECTORS>,
    ) -> Pair<B::Sums, VECTORS> {
        // SAFETY: the caller vouches for the instructions; a group has as many scales.
        let scales = std::array::from_fn(|vector| unsafe {
            let scales = block.scales.as_ptr().add(vector * B::Sums::LANES);
            match block.layout.scaling() {
                Scaling::Bf16 => B::Sums::load_bf16(scales.cast()),
                _ => B::Sums::load_f16(scales.cast()),
            }
        });
        [scales; 2]
    }

    #[inline(always)]
    unsafe fn product<B: Bytes, const BITS: usize, const VECTORS: usize>(
        numbers: &B::Numbers<'_>,
        [scales, _]: &Pair<B::Sums, VECTORS>,
        row: RowBlocks<'_>,
        index: usize,
    ) -> [B::Sums; VECTORS] {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let [products] = B::products::<BITS, 1, VECTORS>(numbers, &row.values[index], [row.starts[index]]);
            let factor = B::Sums::splat(row.scales[index]);
            std::array::from_fn(|vector| products[vector].mul(scales[vector].mul(factor)))
        }
    }
}

/// [`Scaling::WithOffset`].
pub(super) struct ScaleAndOffset;

impl Scaled for ScaleAndOffset {
    #[inline(always)]
    unsafe fn wholes<B: Bytes, const VECTORS: usize>(
        block: GroupBlock<'_>,
        _: Pair<B::Sums, VECTORS>,
    ) -> Pair<B::Sums, VECTORS> {
        // SAFETY: the caller vouches for the instructions.
        [0, 1].map(|which| unsafe { floats::<B, VECTORS>(block, which) })
    }

    #[inline(always)]
    unsafe fn factors<B: Bytes, const VECTORS: usize>(
        block: GroupBlock<'_>,
        wholes: &Pair<B::Sums, VECTORS>,
    ) -> Pair<B::Sums, VECTORS> {
        // SAFETY: the caller vouches for the instructions.
        [0, 1].map(|which| unsafe { scaled_integers::<B, VECTORS>(block, which, &wholes[which]) })
    }

    #[inline(always)]
    unsafe fn product<B: Bytes, const BITS: usize, const VECTORS: usize>(
        numbers: &B::Numbers<'_>,
        [scales, offsets]: &Pair<B::Sums, VECTORS>,
        row: RowBlocks<'_>,
        index: usize,
    ) -> [B::Sums; VECTORS] {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            // The numbers are as they are stored, so that a sum begins with nothing.
            let [products] = B::products::<BITS, 1, VECTORS>(numbers, &row.values[index], [0]);
            let (factor, sum) = (B::Sums::splat(row.scales[index]), B::Sums::splat(row.sums[index]));
            std::array::from_fn(|vector| products[vector].mul(scales[vector].mul(factor)).sub(offsets[vector].mul(sum)))
        }
    }
}

/// [`Scaling::OfHalves`].
pub(super) struct ScalesOfHalves;

impl Scaled for ScalesOfHalves {
    #[inline(always)]
    unsafe fn wholes<B: Bytes, const VECTORS: usize>(
        block: GroupBlock<'_>,
        _: Pair<B::Sums, VECTORS>,
    ) -> Pair<B::Sums, VECTORS> {
        // SAFETY: the caller vouches for the instructions.
        [unsafe { floats::<B, VECTORS>(block, 0) }; 2]
    }

    #[inline(always)]
    unsafe fn factors<B: Bytes, const VECTORS: usize>(
        block: GroupBlock<'_>,
        [whole, _]: &Pair<B::Sums, VECTORS>,
    ) -> Pair<B::Sums, VECTORS> {
        // SAFETY: the caller vouches for the instructions.
        [0, 1].map(|half| unsafe { scaled_integers::<B, VECTORS>(block, half, whole) })
    }

    #[inline(always)]
    unsafe fn product<B: Bytes, const BITS: usize, const VECTORS: usize>(
        numbers: &B::Numbers<'_>,
        scales: &Pair<B::Sums, VECTORS>,
        row: RowBlocks<'_>,
        index: usize,
    ) -> [B::Sums; VECTORS] {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let starts = [row.starts[2 * index], row.starts[2 * index + 1]];
            let products = B::products::<BITS, 2, VECTORS>(numbers, &row.values[index], starts);
            let factor = B::Sums::splat(row.scales[index]);
            std::array::from_fn(|vector| {
                let [first, second] = [0, 1].map(|half| products[half][vector].mul(scales[half][vector]));
                first.add(second).mul(factor)
            })
        }
    }
}

/// Floats that blocks share, for each row of a group.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn floats<B: Bytes, const VECTORS: usize>(block: GroupBlock<'_>, which: usize) -> [B::Sums; VECTORS] {
    let wholes = block.wholes[which].as_ptr();
    // SAFETY: the caller vouches for the instructions; a group has as many.
    std::array::from_fn(|vector| unsafe { B::Sums::load_f16(wholes.add(vector * B::Sums::LANES).cast()) })
}

/// Small integers of a block times floats, for each row of a group: exact, they have 19 bits at most.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn scaled_integers<B: Bytes, const VECTORS: usize>(
    block: GroupBlock<'_>,
    which: usize,
    floats: &[B::Sums; VECTORS],
) -> [B::Sums; VECTORS] {
    let integers = small(block.scales)[which].as_ptr();
    // SAFETY: the caller vouches for the instructions; a group has as many.
    std::array::from_fn(|vector| unsafe { B::integers(integers.add(vector * B::Sums::LANES)).mul(floats[vector]) })
}
