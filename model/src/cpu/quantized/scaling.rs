//! What sums of integers are multiplied with, for every instruction set: scales of blocks, quantised ones, and offsets.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use super::kernel::Bytes;
use super::rows::RowBlock;
use super::{GROUP, GroupBlock, Scales, Scaling, small};
use crate::cpu::simd::Vector;

/// Two numbers for each row of a group.
pub(super) type Pair<V, const VECTORS: usize> = [[V; VECTORS]; 2];

/// How sums of integers and the scales of a block make its product. Nothing is fused, so that every set rounds alike.
/// All functions want the machine to have the instructions.
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

    /// The product of a block with one of a row.
    unsafe fn product<B: Bytes, const BITS: usize, const VECTORS: usize>(
        numbers: &B::Numbers<'_>,
        factors: &Pair<B::Sums, VECTORS>,
        x: &RowBlock,
    ) -> [B::Sums; VECTORS];
}

// In what follows loops stand where closures would: what is not inlined before its caller is compiled without the
// instructions.

/// [`Scaling::Bf16`] and [`Scaling::F16`].
pub(super) struct Scale;

impl Scaled for Scale {
    #[inline(always)]
    unsafe fn factors<B: Bytes, const VECTORS: usize>(
        block: GroupBlock<'_>,
        _: &Pair<B::Sums, VECTORS>,
    ) -> Pair<B::Sums, VECTORS> {
        // SAFETY: the caller vouches for the instructions; a group has as many scales.
        unsafe {
            let mut found = [B::Sums::splat(0.0); VECTORS];
            for (vector, found) in found.iter_mut().enumerate() {
                let scales = block.scales.as_ptr().add(vector * B::Sums::LANES);
                *found = match block.layout.scaling() {
                    Scaling::Bf16 => B::Sums::load_bf16(scales.cast()),
                    _ => B::Sums::load_f16(scales.cast()),
                };
            }
            [found; 2]
        }
    }

    #[inline(always)]
    unsafe fn product<B: Bytes, const BITS: usize, const VECTORS: usize>(
        numbers: &B::Numbers<'_>,
        [scales, _]: &Pair<B::Sums, VECTORS>,
        x: &RowBlock,
    ) -> [B::Sums; VECTORS] {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let [products] = B::products::<BITS, 1, VECTORS>(numbers, &x.numbers, [x.starts[0]]);
            times(products, times(*scales, [B::Sums::splat(x.scale); VECTORS]))
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
        unsafe { [floats::<B, VECTORS>(&block.wholes[0]), floats::<B, VECTORS>(&block.wholes[1])] }
    }

    #[inline(always)]
    unsafe fn factors<B: Bytes, const VECTORS: usize>(
        block: GroupBlock<'_>,
        [scale, offset]: &Pair<B::Sums, VECTORS>,
    ) -> Pair<B::Sums, VECTORS> {
        let [scales, offsets] = small(block.scales);
        // SAFETY: the caller vouches for the instructions.
        unsafe { [times(integers::<B, VECTORS>(scales), *scale), times(integers::<B, VECTORS>(offsets), *offset)] }
    }

    #[inline(always)]
    unsafe fn product<B: Bytes, const BITS: usize, const VECTORS: usize>(
        numbers: &B::Numbers<'_>,
        [scales, offsets]: &Pair<B::Sums, VECTORS>,
        x: &RowBlock,
    ) -> [B::Sums; VECTORS] {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            // The numbers are as they are stored, so that a sum begins with nothing.
            let [products] = B::products::<BITS, 1, VECTORS>(numbers, &x.numbers, [0]);
            let scaled = times(products, times(*scales, [B::Sums::splat(x.scale); VECTORS]));
            minus(scaled, times(*offsets, [B::Sums::splat(x.sum); VECTORS]))
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
        unsafe { [floats::<B, VECTORS>(&block.wholes[0]); 2] }
    }

    #[inline(always)]
    unsafe fn factors<B: Bytes, const VECTORS: usize>(
        block: GroupBlock<'_>,
        [whole, _]: &Pair<B::Sums, VECTORS>,
    ) -> Pair<B::Sums, VECTORS> {
        let [first, second] = small(block.scales);
        // SAFETY: the caller vouches for the instructions.
        unsafe { [times(integers::<B, VECTORS>(first), *whole), times(integers::<B, VECTORS>(second), *whole)] }
    }

    #[inline(always)]
    unsafe fn product<B: Bytes, const BITS: usize, const VECTORS: usize>(
        numbers: &B::Numbers<'_>,
        scales: &Pair<B::Sums, VECTORS>,
        x: &RowBlock,
    ) -> [B::Sums; VECTORS] {
        // SAFETY: the caller vouches for the instructions.
        unsafe {
            let [first, second] = B::products::<BITS, 2, VECTORS>(numbers, &x.numbers, x.starts);
            let both = plus(times(first, scales[0]), times(second, scales[1]));
            times(both, [B::Sums::splat(x.scale); VECTORS])
        }
    }
}

/// Floats that blocks share, for each row of a group.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn floats<B: Bytes, const VECTORS: usize>(wholes: &Scales) -> [B::Sums; VECTORS] {
    // SAFETY: the caller vouches for the instructions; a group has as many.
    unsafe {
        let mut found = [B::Sums::splat(0.0); VECTORS];
        for (vector, found) in found.iter_mut().enumerate() {
            *found = B::Sums::load_f16(wholes.as_ptr().add(vector * B::Sums::LANES).cast());
        }
        found
    }
}

/// Small integers of a block, for each row of a group. They are multiplied with floats of 11 bits, so that these
/// products are exact.
///
/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn integers<B: Bytes, const VECTORS: usize>(integers: &[i8; GROUP]) -> [B::Sums; VECTORS] {
    // SAFETY: the caller vouches for the instructions; a group has as many.
    unsafe {
        let mut found = [B::Sums::splat(0.0); VECTORS];
        for (vector, found) in found.iter_mut().enumerate() {
            *found = B::integers(integers.as_ptr().add(vector * B::Sums::LANES));
        }
        found
    }
}

#[inline(always)]
fn times<V: Vector, const VECTORS: usize>(mut a: [V; VECTORS], b: [V; VECTORS]) -> [V; VECTORS] {
    for (a, b) in a.iter_mut().zip(b) {
        *a = a.mul(b);
    }
    a
}

#[inline(always)]
pub(super) fn plus<V: Vector, const VECTORS: usize>(mut a: [V; VECTORS], b: [V; VECTORS]) -> [V; VECTORS] {
    for (a, b) in a.iter_mut().zip(b) {
        *a = a.add(b);
    }
    a
}

#[inline(always)]
fn minus<V: Vector, const VECTORS: usize>(mut a: [V; VECTORS], b: [V; VECTORS]) -> [V; VECTORS] {
    for (a, b) in a.iter_mut().zip(b) {
        *a = a.sub(b);
    }
    a
}
