//! The codec of [`BlockFormat::Q8_0`], ggml's `q8_0`: value = scale · number, the number from −127 to 127.
//!
//! A block is its scale in f16 and 32 numbers of 8 bits. Numbers are chosen by the scale as it is in f32, halves away
//! from zero. Source: `quantize_row_q8_0_ref` and `dequantize_row_q8_0` of ggml's `ggml-quants.c`.

use half::f16;

use super::{BLOCK, BlockCodec, BlockFormat, f16_at, largest_magnitude, reciprocal, truncated};

/// The codec.
pub(crate) struct Q8_0;

impl BlockCodec for Q8_0 {
    const FORMAT: BlockFormat = BlockFormat::Q8_0;

    #[inline(always)]
    fn encode(x: &[f32; BLOCK], block: &mut [u8]) {
        let (scale, numbers) = block.split_at_mut(2);
        let exact = largest_magnitude(x) / 127.0;
        scale.copy_from_slice(&f16::from_f32(exact).to_le_bytes());
        let inverse = reciprocal(exact);
        numbers.iter_mut().zip(x).for_each(|(number, x)| *number = truncated((x * inverse).round(), -128.0, 127.0));
    }

    #[inline(always)]
    fn decode(block: &[u8], x: &mut [f32; BLOCK]) {
        let (scale, numbers) = (f16_at(block, 0), &block[2..]);
        x.iter_mut().zip(numbers).for_each(|(x, number)| *x = scale * f32::from(number.cast_signed()));
    }
}
