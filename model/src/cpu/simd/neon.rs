//! Four lanes of NEON, with fused multiply-add.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::aarch64::*;
use std::ops::Range;

use half::{bf16, f16};

use super::{EXP2, Routine, Vector, exp2_of_fraction};

/// Four lanes. Every processor of the architecture has them.
#[derive(Clone, Copy)]
pub(crate) struct Neon(float32x4_t);

impl Neon {
    /// Of the lanes of a register.
    #[inline(always)]
    pub(in crate::cpu) fn of(lanes: float32x4_t) -> Self {
        Self(lanes)
    }

    /// As a register.
    #[inline(always)]
    pub(in crate::cpu) fn lanes(self) -> float32x4_t {
        self.0
    }
}

/// The first `count` values at a place, up to four, then zeros.
///
/// # Safety
/// So many can be read.
#[inline(always)]
unsafe fn first(from: *const f32, count: usize) -> float32x4_t {
    // SAFETY: the caller vouches for the values; others are not touched.
    unsafe {
        let (none, zero) = (vdup_n_f32(0.0), vdupq_n_f32(0.0));
        match count {
            0 => zero,
            1 => vld1q_lane_f32::<0>(from, zero),
            2 => vcombine_f32(vld1_f32(from), none),
            3 => vcombine_f32(vld1_f32(from), vld1_lane_f32::<0>(from.add(2), none)),
            _ => vld1q_f32(from),
        }
    }
}

// SAFETY (of each block that has no other): every processor of the architecture has the instructions.
impl Vector for Neon {
    const LANES: usize = 4;
    // 24 sums, the words of three vectors and of one row take 28 of 32 registers.
    const TILE_ROWS: usize = 8;
    const TILE_VECTORS: usize = 3;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller vouches for what the routine asks for; the architecture has the instructions.
        unsafe { routine.run::<Self>() }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: see above.
        Self(unsafe { vdupq_n_f32(value) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(unsafe { vld1q_f32(from) })
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(unsafe { first(from, count) })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from.cast()))) })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from.cast()))) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for the place.
        unsafe { vst1q_f32(to, self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        // SAFETY: the caller vouches for the place; other lanes are not touched.
        unsafe {
            match count {
                0 => {}
                1 => vst1q_lane_f32::<0>(to, self.0),
                2 => vst1_f32(to, vget_low_f32(self.0)),
                3 => {
                    vst1_f32(to, vget_low_f32(self.0));
                    vst1q_lane_f32::<2>(to.add(2), self.0);
                }
                _ => vst1q_f32(to, self.0),
            }
        }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { vaddq_f32(self.0, other.0) })
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { vsubq_f32(self.0, other.0) })
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { vmulq_f32(self.0, other.0) })
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { vdivq_f32(self.0, other.0) })
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { vfmaq_f32(addend.0, self.0, factor.0) })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe { vpadds_f32(vadd_f32(vget_low_f32(self.0), vget_high_f32(self.0))) }
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // The instruction for it returns what is not a number of either.
        // SAFETY: see above.
        Self(unsafe { vbslq_f32(vcgtq_f32(self.0, other.0), self.0, other.0) })
    }

    #[inline(always)]
    fn keep(self, range: Range<usize>, other: Self) -> Self {
        // SAFETY: see above; there are four numbers.
        unsafe {
            let number = vld1q_u32([0, 1, 2, 3].as_ptr());
            let from = vcgeq_u32(number, vdupq_n_u32(range.start as u32));
            let kept = vandq_u32(from, vcltq_u32(number, vdupq_n_u32(range.end as u32)));
            Self(vbslq_f32(kept, self.0, other.0))
        }
    }

    #[inline(always)]
    fn differs(self, other: Self) -> bool {
        // SAFETY: see above.
        unsafe { vminvq_u32(vceqq_f32(self.0, other.0)) == 0 }
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        // SAFETY: see above.
        unsafe {
            // At both bounds the power has the bits of zero and of infinity.
            let x = vminq_f32(vdupq_n_f32(128.0), vmaxq_f32(vdupq_n_f32(-127.0), self.0));
            let whole = vrndnq_f32(x);
            let fraction = Self(vsubq_f32(x, whole));
            let power = exp2_of_fraction(fraction, Self::splat(1.0), EXP2.map(|c| Self::splat(c)));
            let exponent = vaddq_s32(vcvtq_s32_f32(whole), vdupq_n_s32(127));
            power.mul(Self(vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))))
        }
    }

    #[inline(always)]
    unsafe fn look_up(values: &[f32; 16], codes: *const u8) -> Self {
        /// The bytes of a value.
        const BYTES: u32 = 0x0302_0100;
        // SAFETY: the caller vouches for the codes, two bytes of them, of which no alignment is asked; there are
        // sixteen values, which are four times sixteen bytes, and four shifts.
        unsafe {
            let quarter = |at: usize| vreinterpretq_u8_f32(vld1q_f32(values[4 * at..].as_ptr()));
            let table = uint8x16x4_t(quarter(0), quarter(1), quarter(2), quarter(3));
            let codes = u32::from(u16::from_le(codes.cast::<u16>().read_unaligned()));
            // The first of a byte is in its high half.
            let shifted = vshlq_u32(vdupq_n_u32(codes), vld1q_s32([-4, 0, -12, -8].as_ptr()));
            let lanes = vandq_u32(shifted, vdupq_n_u32(15));
            let bytes = vaddq_u32(vmulq_u32(lanes, vdupq_n_u32(0x0404_0404)), vdupq_n_u32(BYTES));
            Self(vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(bytes))))
        }
    }

    #[inline(always)]
    unsafe fn transpose(rows: &[*const f32], columns: usize, to: *mut f32, stride: usize) {
        // SAFETY: the caller vouches for rows and place; what is beyond the columns is neither read nor written.
        unsafe {
            for column in (0..columns).step_by(4) {
                let width = (columns - column).min(4);
                let mut square = [vdupq_n_f32(0.0); 4];
                for (line, row) in square.iter_mut().zip(rows) {
                    *line = first(row.add(column), width);
                }
                let turned = transposed(square);
                for (line, offset) in turned.into_iter().zip(column..column + width) {
                    vst1q_f32(to.add(offset * stride), line);
                }
            }
        }
    }
}

/// A square of four rows, turned: values, then pairs of them change places.
#[inline(always)]
fn transposed([a, b, c, d]: [float32x4_t; 4]) -> [float32x4_t; 4] {
    // SAFETY: every processor of the architecture has the instructions.
    unsafe {
        let [even, odd] = [vtrn1q_f32(a, b), vtrn2q_f32(a, b)].map(|pairs| vreinterpretq_f64_f32(pairs));
        let [other_even, other_odd] = [vtrn1q_f32(c, d), vtrn2q_f32(c, d)].map(|pairs| vreinterpretq_f64_f32(pairs));
        let (first, second) = (vtrn1q_f64(even, other_even), vtrn1q_f64(odd, other_odd));
        let (third, fourth) = (vtrn2q_f64(even, other_even), vtrn2q_f64(odd, other_odd));
        [first, second, third, fourth].map(|line| vreinterpretq_f32_f64(line))
    }
}
