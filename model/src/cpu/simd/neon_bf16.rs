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

/// To each sum of a square of two rows and two columns, the products of four values: of the first pair, then of the
/// second.
#[inline]
#[target_feature(enable = "neon,bf16")]
fn bfmmla(mut sums: float32x4_t, left: uint32x4_t, right: uint32x4_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe {
        asm!(
            "bfmmla {0:v}.4s, {1:v}.8h, {2:v}.8h",
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
    /// Adds to a square of sums, row by row, the products of two pairs of each of two rows with those of two columns.
    ///
    /// # Safety
    /// The machine has the instructions.
    #[inline(always)]
    pub(in crate::cpu) unsafe fn multiply_add_square(left: uint32x4_t, right: uint32x4_t, sums: Neon) -> Neon {
        // SAFETY: the caller vouches for the instructions.
        Neon::of(unsafe { bfmmla(sums.lanes(), left, right) })
    }

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

#[cfg(test)]
pub(in crate::cpu) mod tests {
    use super::*;
    use crate::cpu::InstructionSet;
    use crate::cpu::product::Element;
    use crate::cpu::rounding::nearest;

    /// `a + b`, rounded to an f32 to odd; what is denormal is zero.
    fn add_to_odd(a: f32, b: f32) -> f32 {
        let (a, b) = (f64::from(flushed(a)), f64::from(flushed(b)));
        let sum = a + b;
        // What rounding to f64 has left, exactly.
        let of_b = sum - a;
        let rest = (a - (sum - of_b)) + (b - of_b);
        let mut bits = sum.to_bits();
        // Rounded to odd twice is rounded to odd once.
        if rest != 0.0 && bits & 1 == 0 {
            bits = if (rest > 0.0) == (sum > 0.0) { bits + 1 } else { bits - 1 };
        }
        let dropped = (1 << 29) - 1;
        let inexact = bits & dropped != 0;
        let truncated = f64::from_bits(bits & !dropped) as f32;
        flushed(if inexact { f32::from_bits(truncated.to_bits() | 1) } else { truncated })
    }

    /// Zero for what is denormal.
    fn flushed(x: f32) -> f32 {
        if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
    }

    /// What the instruction computes in a lane.
    pub(in crate::cpu) fn pair(sum: f32, left: [bf16; 2], right: [bf16; 2]) -> f32 {
        let product = |at: usize| flushed(flushed(left[at].widen()) * flushed(right[at].widen()));
        add_to_odd(sum, add_to_odd(product(0), product(1)))
    }

    /// Numbers that neither overflow nor are denormal in a product of f32, but for some; and sums that are about as
    /// large as products, or cancel.
    struct Numbers(u64);

    impl Numbers {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            self.0 >> 33
        }

        fn exponent(&mut self) -> u16 {
            let near = 119 + (self.next() % 16) as u16;
            [near, near, near, 60 + (self.next() % 8) as u16, 0][(self.next() % 5) as usize]
        }

        fn bf16(&mut self) -> bf16 {
            bf16::from_bits(self.next() as u16 & 0x807f | self.exponent() << 7)
        }
    }

    fn available() -> bool {
        let available = InstructionSet::NeonBf16.is_available();
        if !available {
            eprintln!("skipped: this machine has no products of bf16");
        }
        available
    }

    #[test]
    fn products_of_pairs_are_rounded_to_odd_twice() {
        if !available() {
            return;
        }
        let mut numbers = Numbers(7);
        let mut inexact = 0;
        for round in 0..50_000 {
            let [left, right] = [(); 2].map(|()| [(); 8].map(|()| numbers.bf16()));
            let pairs = |values: [bf16; 8], lane: usize| [values[2 * lane], values[2 * lane + 1]];
            let sums: [f32; 4] = std::array::from_fn(|lane| match round % 4 {
                0 => 0.0,
                // It all but cancels what is added.
                1 => -pair(0.0, pairs(left, lane), pairs(right, lane)) * (1.0 + (numbers.next() % 3) as f32 / 64.0),
                _ => f32::from_bits(numbers.next() as u32 & 0x807f_ffff | u32::from(numbers.exponent()) << 23),
            });
            let mut found = [0.0; 4];
            // SAFETY: the machine has the instructions; there are eight values and four sums.
            unsafe {
                let [left, right] = [&left, &right].map(|values| NeonBf16::load_values(values.as_ptr()));
                NeonBf16::multiply_add(left, right, Neon::load(sums.as_ptr())).store(found.as_mut_ptr());
            }
            for lane in 0..4 {
                let [left, right] = [left, right].map(|values| pairs(values, lane));
                let expected = pair(sums[lane], left, right);
                assert_eq!(found[lane], expected, "{} + {left:?} · {right:?}", sums[lane]);
                let exact = (0..2).map(|at| f64::from(left[at].widen()) * f64::from(right[at].widen())).sum::<f64>();
                inexact += usize::from(f64::from(expected) != f64::from(sums[lane]) + exact);
            }
        }
        assert!(inexact > 50_000, "{inexact} of 200 000 are rounded");
    }

    #[test]
    fn rounding_is_that_of_every_set() {
        if !available() {
            return;
        }
        for high in (0..1u32 << 16).step_by(8) {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let values: [f32; 8] = std::array::from_fn(|lane| f32::from_bits((high + lane as u32) << 16 | low));
                let mut found = [0; 8];
                // SAFETY: the machine has the instructions; there are eight values.
                unsafe {
                    let rounded = NeonBf16::rounded(Neon::load(values.as_ptr()), Neon::load(values[4..].as_ptr()));
                    vst1q_u16(found.as_mut_ptr(), rounded);
                }
                assert_eq!(found, values.map(|value| nearest(value).to_bits()), "{high:x} {low:x}");
            }
        }
    }
}
