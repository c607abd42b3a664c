//! Products of bytes in registers of 128 bits, four rows of a weight in each: of any processor of the architecture, and
//! by instructions that add the products of four bytes to each lane.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;

use super::kernel::Bytes;
use super::portable::Numbers;
use super::{BLOCK, GROUP, GroupBlock};
use crate::cpu::simd::{Neon, Routine, Vector};

/// Registers of four rows that a group takes.
const QUARTERS: usize = GROUP / 4;

/// How the four numbers of each of four rows are multiplied with four of the left operand. All of its functions want
/// the machine to have the instructions.
pub(super) trait Quads {
    /// Whether numbers are multiplied as they are stored. Otherwise those of 8 bits become signed first.
    const ARE_UNSIGNED: bool;

    /// Runs a routine, compiled with the instructions.
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output;
    /// `sums + Σ number · x` of each row, `x` having its four numbers four times over.
    unsafe fn add(sums: int32x4_t, numbers: uint8x16_t, x: int8x16_t) -> int32x4_t;
}

impl Quads for Neon {
    const ARE_UNSIGNED: bool = false;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller vouches for it.
        unsafe { <Self as Vector>::compiled(routine) }
    }

    #[inline(always)]
    unsafe fn add(sums: int32x4_t, numbers: uint8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: every processor of the architecture has the instructions.
        unsafe {
            let numbers = vreinterpretq_s8_u8(numbers);
            // Two products are less than 2¹⁵: x has no -128.
            let (low, high) = (vmull_s8(vget_low_s8(numbers), vget_low_s8(x)), vmull_high_s8(numbers, x));
            vpadalq_s16(sums, vpaddq_s16(low, high))
        }
    }
}

/// The dot product of signed bytes.
pub(super) struct Dot;

impl Quads for Dot {
    const ARE_UNSIGNED: bool = false;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        #[target_feature(enable = "neon,dotprod")]
        unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
            // SAFETY: the caller vouches for it.
            unsafe { routine.run::<Neon>() }
        }
        // SAFETY: as above.
        unsafe { compiled(routine) }
    }

    #[inline(always)]
    unsafe fn add(sums: int32x4_t, numbers: uint8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: the caller vouches for the instructions.
        unsafe { sdot(sums, vreinterpretq_s8_u8(numbers), x) }
    }
}

/// The dot product of unsigned bytes with signed ones.
pub(super) struct MixedDot;

impl Quads for MixedDot {
    const ARE_UNSIGNED: bool = true;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        #[target_feature(enable = "neon,dotprod,i8mm")]
        unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
            // SAFETY: the caller vouches for it.
            unsafe { routine.run::<Neon>() }
        }
        // SAFETY: as above.
        unsafe { compiled(routine) }
    }

    #[inline(always)]
    unsafe fn add(sums: int32x4_t, numbers: uint8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: the caller vouches for the instructions.
        unsafe { usdot(sums, numbers, x) }
    }
}

// The intrinsics for these instructions are not stable.

/// To each lane, the products of four bytes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sums: int32x4_t, left: int8x16_t, right: int8x16_t) -> int32x4_t {
    // SAFETY: the function has the instruction, which computes with these registers alone.
    unsafe {
        asm!(
            "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sums, in(vreg) left, in(vreg) right,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// As [`sdot`], the left ones unsigned.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn usdot(mut sums: int32x4_t, left: uint8x16_t, right: int8x16_t) -> int32x4_t {
    // SAFETY: as above.
    unsafe {
        asm!(
            "usdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sums, in(vreg) left, in(vreg) right,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Products of bytes, four of each row at a time.
pub(super) struct Bytewise<Q>(PhantomData<Q>);

impl<Q: Quads> Bytes for Bytewise<Q> {
    type Sums = Neon;
    type Numbers<'a> = Numbers<'a>;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller vouches for it.
        unsafe { Q::compiled(routine) }
    }

    #[inline(always)]
    unsafe fn numbers<const BITS: usize>(block: GroupBlock<'_>) -> Numbers<'_> {
        Numbers::of::<BITS>(block)
    }

    #[inline(always)]
    unsafe fn products<const BITS: usize, const PARTS: usize, const VECTORS: usize>(
        numbers: &Numbers<'_>,
        x: &[i8; BLOCK],
        starts: [i32; PARTS],
    ) -> [[Neon; VECTORS]; PARTS] {
        // Of signed numbers the excess of 128, for which a sum begins below zero, is already gone.
        let is_signed = BITS == 8 && !Q::ARE_UNSIGNED;
        // SAFETY: the caller vouches for the instructions; a line is four times 16 bytes, and a block eight words, of
        // which no alignment is asked.
        unsafe {
            let (sign, half) = (vdupq_n_u8(if is_signed { 0x80 } else { 0 }), vdupq_n_u8(15));
            let mut products = [[Neon::splat(0.0); VECTORS]; PARTS];
            for (part, products) in products.iter_mut().enumerate() {
                let x = x.as_ptr().add(part * BLOCK / PARTS).cast::<i32>();
                let mut sums = [vdupq_n_s32(if is_signed { 0 } else { starts[part] }); QUARTERS];
                for (at, line) in numbers.part(part, PARTS).iter().enumerate() {
                    for (quarter, sums) in sums.iter_mut().enumerate() {
                        let bytes = vld1q_u8(line.0.as_ptr().add(16 * quarter));
                        *sums = if BITS == 4 {
                            let [first, second] = [x.add(2 * at), x.add(2 * at + 1)];
                            let low = Q::add(*sums, vandq_u8(bytes, half), four_times(first));
                            Q::add(low, vshrq_n_u8::<4>(bytes), four_times(second))
                        } else {
                            Q::add(*sums, veorq_u8(bytes, sign), four_times(x.add(at)))
                        };
                    }
                }
                for (product, sums) in products.iter_mut().zip(sums) {
                    *product = Neon::of(vcvtq_f32_s32(sums));
                }
            }
            products
        }
    }

    #[inline(always)]
    unsafe fn integers(from: *const i8) -> Neon {
        // SAFETY: the caller vouches for four integers, of which no alignment is asked.
        unsafe {
            let bytes = vcreate_s8(u64::from(from.cast::<u32>().read_unaligned()));
            Neon::of(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes)))))
        }
    }
}

/// The four numbers at a place, four times over.
///
/// # Safety
/// They can be read.
#[inline(always)]
unsafe fn four_times(word: *const i32) -> int8x16_t {
    // SAFETY: the caller vouches for them; no alignment is asked.
    unsafe { vreinterpretq_s8_s32(vdupq_n_s32(word.read_unaligned())) }
}
