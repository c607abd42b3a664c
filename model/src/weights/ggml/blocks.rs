//! ggml's blocks of 32 with 5 bits per value: `q5_0` and `q5_1`.
//!
//! The lower four bits lie as in `q4_0`, the fifth bits of all values in 32 bits of their own. Source:
//! `quantize_row_q5_0_ref` and `quantize_row_q5_1_ref` of ggml's `ggml-quants.c`.

use half::f16;

use crate::weights::{BLOCK, BlockDecoder, f16_at, largest, reciprocal, truncated};

/// Packs 32 numbers of 5 bits: their fifth bits, and two of the rest to a byte.
#[inline(always)]
fn pack(numbers: &[u8; BLOCK], fifth_bits: &mut [u8], nibbles: &mut [u8]) {
    /// Moves the lowest bit of byte `i` to bit `56 + i`.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    for (bits, numbers) in fifth_bits.iter_mut().zip(numbers.as_chunks::<8>().0) {
        let fifths = u64::from_le_bytes(*numbers) >> 4 & 0x0101_0101_0101_0101;
        *bits = (fifths.wrapping_mul(GATHER) >> 56) as u8;
    }
    let (first, second) = numbers.split_at(BLOCK / 2);
    for ((byte, first), second) in nibbles.iter_mut().zip(first).zip(second) {
        *byte = first & 15 | (second & 15) << 4;
    }
}

/// Eight numbers at a time, a byte of a word each: a loop over single ones would be taken apart by the compiler, and
/// put together again across blocks.
#[inline(always)]
fn unpack(fifth_bits: &[u8], nibbles: &[u8]) -> [u8; BLOCK] {
    const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    let mut numbers = [0; BLOCK];
    let (first, second) = numbers.split_at_mut(BLOCK / 2);
    let words = first.as_chunks_mut::<8>().0.iter_mut().zip(second.as_chunks_mut::<8>().0);
    for (at, ((first, second), bytes)) in words.zip(nibbles.as_chunks::<8>().0).enumerate() {
        let bytes = u64::from_le_bytes(*bytes);
        *first = (bytes & LOW | fifths(fifth_bits[at])).to_le_bytes();
        *second = (bytes >> 4 & LOW | fifths(fifth_bits[at + 2])).to_le_bytes();
    }
    numbers
}

/// Eight bits, each as the fifth of a byte of its own.
#[inline(always)]
fn fifths(bits: u8) -> u64 {
    /// Of each byte one bit: that of its number.
    const OWN: u64 = 0x8040_2010_0804_0201;
    let own = (u64::from(bits) * 0x0101_0101_0101_0101) & OWN;
    // A byte that is not zero carries into its highest bit, and never beyond.
    (own + 0x7f7f_7f7f_7f7f_7f7f) >> 3 & 0x1010_1010_1010_1010
}

/// Value = scale · (number − 16).
#[inline(always)]
pub(super) fn encode_q5_0(x: &[f32; BLOCK], block: &mut [u8]) {
    let exact = largest(x) / -16.0;
    let inverse = reciprocal(exact);
    let numbers = x.map(|x| truncated(x * inverse + 16.5, 0.0, 31.0));
    block[..2].copy_from_slice(&f16::from_f32(exact).to_le_bytes());
    let (fifth_bits, nibbles) = block[2..].split_at_mut(4);
    pack(&numbers, fifth_bits, nibbles);
}

#[inline(always)]
pub(super) fn decode_q5_0(block: &[u8], x: &mut [f32; BLOCK]) {
    let scale = f16_at(block, 0);
    let numbers = unpack(&block[2..6], &block[6..]);
    x.iter_mut().zip(&numbers).for_each(|(x, number)| *x = scale * (f32::from(*number) - 16.0));
}

/// Value = scale · number + least.
#[inline(always)]
pub(super) fn encode_q5_1(x: &[f32; BLOCK], block: &mut [u8]) {
    let least = x.iter().fold(f32::MAX, |least, &x| if x < least { x } else { least });
    let most = x.iter().fold(f32::MIN, |most, &x| if x > most { x } else { most });
    let exact = (most - least) / 31.0;
    let inverse = reciprocal(exact);
    let numbers = x.map(|x| truncated((x - least) * inverse + 0.5, 0.0, 255.0));
    block[..2].copy_from_slice(&f16::from_f32(exact).to_le_bytes());
    block[2..4].copy_from_slice(&f16::from_f32(least).to_le_bytes());
    let (fifth_bits, nibbles) = block[4..].split_at_mut(4);
    pack(&numbers, fifth_bits, nibbles);
}

#[inline(always)]
pub(super) fn decode_q5_1(block: &[u8], x: &mut [f32; BLOCK]) {
    let (scale, least) = (f16_at(block, 0), f16_at(block, 2));
    let numbers = unpack(&block[4..8], &block[8..]);
    x.iter_mut().zip(&numbers).for_each(|(x, number)| *x = scale * f32::from(*number) + least);
}

/// The blocks of `q5_0` and `q5_1`, as products read them.
pub(crate) struct Q5_0;
pub(crate) struct Q5_1;

impl BlockDecoder for Q5_0 {
    const BLOCK_BYTES: usize = 22;
    const PARTS: usize = 1;

    type Header = ();

    #[inline(always)]
    fn header(_: &[u8]) {}

    #[inline(always)]
    fn decode_part(block: &[u8], (): &(), _: usize, x: &mut [f32; BLOCK]) {
        decode_q5_0(block, x);
    }
}

impl BlockDecoder for Q5_1 {
    const BLOCK_BYTES: usize = 24;
    const PARTS: usize = 1;

    type Header = ();

    #[inline(always)]
    fn header(_: &[u8]) {}

    #[inline(always)]
    fn decode_part(block: &[u8], (): &(), _: usize, x: &mut [f32; BLOCK]) {
        decode_q5_1(block, x);
    }
}
