//! Eight lanes as an array: what every machine can do, and what the other vectors are compared with.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::array::from_fn;
use std::ops::Range;

use half::{bf16, f16};

use super::{EXP2, Routine, Vector, exp2_of_fraction};
use crate::cpu::product::Element;

/// Eight lanes.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 8]);

impl Portable {
    #[inline(always)]
    fn each(self, other: Self, operation: impl Fn(f32, f32) -> f32) -> Self {
        Self(from_fn(|lane| operation(self.0[lane], other.0[lane])))
    }
}

impl Vector for Portable {
    const LANES: usize = 8;
    const TILE_ROWS: usize = 4;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller vouches for it.
        unsafe { routine.run::<Self>() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; 8])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(from_fn(|lane| unsafe { *from.add(lane) }))
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller vouches for so many values.
        Self(from_fn(|lane| if lane < count { unsafe { *from.add(lane) } } else { 0.0 }))
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(from_fn(|lane| unsafe { (*from.add(lane)).widen() }))
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(from_fn(|lane| unsafe { (*from.add(lane)).widen() }))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for the place.
        unsafe { self.store_first(to, Self::LANES) }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        for (lane, value) in self.0.into_iter().take(count).enumerate() {
            // SAFETY: the caller vouches for so many places.
            unsafe { *to.add(lane) = value };
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.each(other, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.each(other, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.each(other, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.each(other, |a, b| a / b)
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        self.mul(factor).add(addend)
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.each(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn keep(self, lanes: Range<usize>, other: Self) -> Self {
        Self(from_fn(|lane| if lanes.contains(&lane) { self.0[lane] } else { other.0[lane] }))
    }

    #[inline(always)]
    fn differs(self, other: Self) -> bool {
        self.0 != other.0
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        /// Adding it rounds to an integer, which is then found in the low bits.
        const ROUND: f32 = 12_582_912.0;
        // At both bounds the power has the bits of zero and of infinity.
        let x = self.0.map(|x| x.clamp(-127.0, 128.0));
        let shifted = x.map(|x| x + ROUND);
        let fraction = Self(from_fn(|lane| x[lane] - (shifted[lane] - ROUND)));
        let splat = |value| Self([value; 8]);
        let power = exp2_of_fraction(fraction, splat(1.0), EXP2.map(splat));
        let scale = shifted.map(|shifted| f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000)));
        power.mul(Self(scale))
    }
}
