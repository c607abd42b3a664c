//! Products of pairs of bf16, summed in f32, by the instruction of ARM for them (FEAT_BF16).
//!
//! Its rounding is its own: the products of a pair are exact, their sum is rounded, and so is the sum of that with what
//! was there, both to odd: of the two neighbours of what is not an f32 the one whose last bit is set. What is denormal,
//! of a pair or of a sum, is zero. All processors do the same as long as nobody has set the bit `EBF` of the control
//! register, which no system does.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::aarch64::*;
use std::arch::asm;

use half::bf16;

use super::{Loads, Multiplier, Neon, Routine, Vector};

/// Pairs of bf16 in vectors of 128 bits.
pub(in crate::cpu) struct NeonBf16;

// The intrinsics for these instructions are not stable.

/// To each lane, the products of a pair.
#[inline]
#[target_feature(enable = "neon,bf16")]
fn bfdot(mut sums: float32x4_t, left: uint32x4_t, right: uint32x4_t) -> float32x4_t {
    // SAFETY: the function has the instruction, which computes with these registers alone.
    unsafe {
        asm!(
            "bfdot {0:v}.4s, {1:v}.8h, {2:v}.8h",
            inout(vreg) sums, in(vreg) left, in(vreg) right,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// The nearest bf16 of eight values, of two equally near ones the even.
#[inline]
#[target_feature(enable = "neon,bf16")]
fn bfcvtn(low: float32x4_t, high: float32x4_t) -> uint16x8_t {
    let rounded: uint16x8_t;
    // SAFETY: as above.
    unsafe {
        asm!(
            "bfcvtn {0:v}.4h, {1:v}.4s",
            "bfcvtn2 {0:v}.8h, {2:v}.4s",
            out(vreg) rounded, in(vreg) low, in(vreg) high,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    rounded
}

impl NeonBf16 {
    /// Two vectors, rounded to bf16 as [`crate::cpu::rounding::nearest`] does, side by side.
    ///
    /// # Safety
    /// The machine has the instructions.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn rounded(low: Neon, high: Neon) -> uint16x8_t {
        // SAFETY: the caller vouches for the instructions.
        unsafe { bfcvtn(low.lanes(), high.lanes()) }
    }
}

// SAFETY (of each block that has no other): the caller vouches for the instructions, and for what is read.
impl Multiplier for NeonBf16 {
    type Sums = Neon;
    type Word = u32;
    type Words = uint32x4_t;
    const VALUES: usize = 2;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        #[target_feature(enable = "neon,bf16")]
        unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
            // SAFETY: see above.
            unsafe { routine.run::<Neon>() }
        }
        // SAFETY: see above.
        unsafe { compiled(routine) }
    }

    #[inline(always)]
    unsafe fn splat(word: *const u32) -> uint32x4_t {
        // SAFETY: see above.
        unsafe { vld1q_dup_u32(word) }
    }

    #[inline(always)]
    unsafe fn load(from: *const u32) -> uint32x4_t {
        // SAFETY: see above.
        unsafe { vld1q_u32(from) }
    }

    #[inline(always)]
    unsafe fn load_first(from: *const u32, count: usize) -> uint32x4_t {
        // SAFETY: see above; the bits are those of the words.
        unsafe { vreinterpretq_u32_f32(Neon::load_first(from.cast(), count).lanes()) }
    }

    #[inline(always)]
    unsafe fn multiply_add(left: uint32x4_t, right: uint32x4_t, sums: Neon) -> Neon {
        // SAFETY: see above.
        Neon::of(unsafe { bfdot(sums.lanes(), left, right) })
    }
}

impl Loads<bf16> for NeonBf16 {
    #[inline(always)]
    unsafe fn load_values(from: *const bf16) -> uint32x4_t {
        // SAFETY: see above.
        unsafe { vreinterpretq_u32_u16(vld1q_u16(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_first_values(from: *const bf16, count: usize) -> uint32x4_t {
        // SAFETY: see above; a vector is half as many values as are made.
        unsafe { vreinterpretq_u32_u16(vld1q_u16(super::first_values(from, count).as_ptr().cast())) }
    }
}
