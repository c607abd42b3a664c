//! The codec of [`BlockFormat::Q4_0`], ggml's `q4_0`: value = scale · (number − 8), the number from 0 to 15.
//!
//! A block is its scale in f16 and 16 bytes, of which the lower halves are the numbers of the first 16 values and the
//! upper ones those of the others. The value of largest magnitude becomes 0, which is −8 times the scale. Source:
//! `quantize_row_q4_0_ref` and `dequantize_row_q4_0` of ggml's `ggml-quants.c`.

use half::f16;

use super::{BLOCK, BlockCodec, BlockFormat, f16_at, largest, reciprocal, truncated};

/// The codec.
pub(crate) struct Q4_0;

impl BlockCodec for Q4_0 {
    const FORMAT: BlockFormat = BlockFormat::Q4_0;

    #[inline(always)]
    fn encode(x: &[f32; BLOCK], block: &mut [u8]) {
        let (scale, numbers) = block.split_at_mut(2);
        let exact = largest(x) / -8.0;
        scale.copy_from_slice(&f16::from_f32(exact).to_le_bytes());
        let inverse = reciprocal(exact);
        let (first, second) = x.split_at(BLOCK / 2);
        let number = |x: f32| truncated(x * inverse + 8.5, 0.0, 15.0);
        for ((numbers, first), second) in numbers.iter_mut().zip(first).zip(second) {
            *numbers = number(*first) | number(*second) << 4;
        }
    }

    #[inline(always)]
    fn decode(block: &[u8], x: &mut [f32; BLOCK]) {
        let (scale, numbers) = (f16_at(block, 0), &block[2..]);
        let (first, second) = x.split_at_mut(BLOCK / 2);
        let value = |number: u8| scale * (f32::from(number) - 8.0);
        for ((numbers, first), second) in numbers.iter().zip(first).zip(second) {
            (*first, *second) = (value(numbers & 15), value(numbers >> 4));
        }
    }
}
