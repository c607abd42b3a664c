//! How attention lays pairs of bf16 out for the products of NEON: two values along the inner index in each word.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::aarch64::{
    uint16x4x2_t, uint16x8x2_t, vdupq_n_u16, vget_high_u16, vget_low_u16, vld1q_u16, vst1q_u16, vst2_u16, vst2q_u16,
};
use std::ops::Range;

use half::bf16;

use super::kernel::Kernel;
use super::operands::{Left, Right};
use super::{Columns, ROWS};
use crate::cpu::rounding::nearest;
use crate::cpu::simd::{Neon, NeonBf16, Vector};

/// Values of a vector.
const VALUES: usize = 8;
/// Words of one.
const WORDS: usize = 4;

// SAFETY (of each block that has no other): the caller vouches for what is read and written, and for the instructions.
impl Kernel for NeonBf16 {
    #[inline(always)]
    unsafe fn round_row(values: &[f32], to: *mut u32) {
        let (whole, rest) = values.as_chunks::<VALUES>();
        let mut to = to.cast::<u16>();
        // SAFETY: see above.
        unsafe {
            for values in whole {
                let rounded = Self::rounded(Neon::load(values.as_ptr()), Neon::load(values[WORDS..].as_ptr()));
                vst1q_u16(to, rounded);
                to = to.add(VALUES);
            }
            for value in rest {
                to.write(nearest(*value).to_bits());
                to = to.add(1);
            }
        }
    }

    #[inline(always)]
    unsafe fn lay_rows(lines: &[*const u32], values: usize, to: *mut u32, stride: usize) -> Right<u32> {
        for (number, pair) in lines.chunks(2).enumerate() {
            // SAFETY: see above.
            unsafe { pair_rows(pair[0], pair.get(1).copied(), values, to.add(number * stride)) };
        }
        Right { words: to, stride }
    }

    #[inline(always)]
    unsafe fn right(
        matrix: Columns<'_, u32>,
        rows: Range<usize>,
        values: usize,
        to: *mut u32,
        stride: usize,
    ) -> Right<u32> {
        for (number, row) in rows.clone().step_by(2).enumerate() {
            let line = |row: usize| matrix.words[row * matrix.stride..].as_ptr();
            // SAFETY: see above.
            unsafe {
                pair_rows(line(row), (row + 1 < rows.end).then(|| line(row + 1)), values, to.add(number * stride))
            };
        }
        Right { words: to, stride }
    }

    #[inline(always)]
    unsafe fn over_keys(weights: *mut f32, keys: usize, to: *mut u32) -> Left<u32> {
        // SAFETY: see above.
        unsafe {
            for key in (0..keys).step_by(2) {
                for lane in (0..ROWS).step_by(WORDS) {
                    let from = weights.add(key * ROWS + lane);
                    let odd = if key + 1 < keys { Neon::load(from.add(ROWS)) } else { Neon::splat(0.0) };
                    let halves = Self::rounded(Neon::load(from), odd);
                    // In turns.
                    let words = uint16x4x2_t(vget_low_u16(halves), vget_high_u16(halves));
                    vst2_u16(to.add(key / 2 * ROWS + lane).cast(), words);
                }
            }
        }
        Left { words: to, row_stride: 1, inner_stride: ROWS }
    }

    #[inline(always)]
    unsafe fn over_rows(weights: *mut f32, keys: usize, to: *mut u32) -> Left<u32> {
        for place in (0..keys * ROWS).step_by(VALUES) {
            // SAFETY: see above.
            unsafe {
                let (low, high) = (Neon::load(weights.add(place)), Neon::load(weights.add(place + WORDS)));
                vst1q_u16(to.add(place / 2).cast(), Self::rounded(low, high));
            }
        }
        Left { words: to, row_stride: ROWS / 2, inner_stride: 1 }
    }
}

/// The values of two rows, or of one and zeros, as pairs.
///
/// # Safety
/// So many values can be read, and words written.
#[inline(always)]
unsafe fn pair_rows(even: *const u32, odd: Option<*const u32>, values: usize, to: *mut u32) {
    let (even, odd) = (even.cast::<bf16>(), odd.map(<*const u32>::cast::<bf16>));
    let whole = values / VALUES * VALUES;
    // SAFETY: the caller vouches for it.
    unsafe {
        for place in (0..whole).step_by(VALUES) {
            let low = vld1q_u16(even.add(place).cast());
            let high = odd.map_or(vdupq_n_u16(0), |odd| vld1q_u16(odd.add(place).cast()));
            vst2q_u16(to.add(place).cast(), uint16x8x2_t(low, high));
        }
        for place in whole..values {
            let [low, high] = [even.add(place).read(), odd.map_or(bf16::ZERO, |odd| odd.add(place).read())];
            to.add(place).write(u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16);
        }
    }
}
