//! The codec of [`super::BlockFormat::Int8`]: value = scale · number, the number from −127 to 127.
//!
//! The scale is rounded to bf16 before the numbers are chosen, so that rounding it costs nothing; rounded up, or the
//! largest number would lie beyond the range.

use half::bf16;

use super::{BLOCK, degenerate, largest_magnitude, numbers_of, widened};

/// Quantises a block; returns its scale. Where the scale is zero or not a number, the numbers are left as they were.
#[inline(always)]
pub(crate) fn encode(x: &[f32; BLOCK], numbers: &mut [i8; BLOCK]) -> bf16 {
    let largest = largest_magnitude(x);
    if let Some(scale) = degenerate(largest) {
        return scale;
    }
    let exact = largest / 127.0;
    let below = bf16::from_bits((exact.to_bits() >> 16) as u16);
    let scale = if widened(below) < exact { bf16::from_bits(below.to_bits() + 1) } else { below };
    numbers_of(x, scale, -127.0, 127.0, numbers);
    scale
}
