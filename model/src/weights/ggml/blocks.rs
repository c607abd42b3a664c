//! ggml's blocks of 32 with 5 bits per value: `q5_0` and `q5_1`.
//!
//! The lower four bits lie as in `q4_0`, the fifth bits of all values in 32 bits of their own. Source:
//! `quantize_row_q5_0_ref` and `quantize_row_q5_1_ref` of ggml's `ggml-quants.c`.

use half::f16;

use crate::weights::{BLOCK, BlockDecoder, f16_at, largest, reciprocal};

/// Packs 32 numbers of 5 bits: their fifth bits, and two of the rest to a byte.
fn pack(numbers: &[u8; BLOCK], fifth_bits: &mut [u8], nibbles: &mut [u8]) {
    let fifth = numbers.iter().enumerate().fold(0u32, |bits, (at, number)| bits | u32::from(number >> 4 & 1) << at);
    fifth_bits.copy_from_slice(&fifth.to_le_bytes());
    let (first, second) = numbers.split_at(BLOCK / 2);
    for ((byte, first), second) in nibbles.iter_mut().zip(first).zip(second) {
        *byte = first & 15 | (second & 15) << 4;
    }
}

#[inline(always)]
fn unpack(fifth_bits: &[u8], nibbles: &[u8]) -> [u8; BLOCK] {
    let fifth = u32::from_le_bytes([fifth_bits[0], fifth_bits[1], fifth_bits[2], fifth_bits[3]]);
    let mut numbers = [0; BLOCK];
    let (first, second) = numbers.split_at_mut(BLOCK / 2);
    for (at, ((first, second), byte)) in first.iter_mut().zip(second).zip(nibbles).enumerate() {
        *first = byte & 15 | ((fifth >> at & 1) << 4) as u8;
        *second = byte >> 4 | ((fifth >> (at + BLOCK / 2) & 1) << 4) as u8;
    }
    numbers
}

/// Value = scale · (number − 16).
pub(super) fn encode_q5_0(x: &[f32; BLOCK], block: &mut [u8]) {
    let exact = largest(x) / -16.0;
    let inverse = reciprocal(exact);
    let numbers = x.map(|x| ((x * inverse + 16.5) as u8).min(31));
    block[..2].copy_from_slice(&f16::from_f32(exact).to_le_bytes());
    let (fifth_bits, nibbles) = block[2..].split_at_mut(4);
    pack(&numbers, fifth_bits, nibbles);
}

#[inline(always)]
pub(super) fn decode_q5_0(block: &[u8], x: &mut [f32; BLOCK]) {
    let scale = f16_at(block, 0);
    *x = unpack(&block[2..6], &block[6..]).map(|number| scale * (f32::from(number) - 16.0));
}

/// Value = scale · number + least.
pub(super) fn encode_q5_1(x: &[f32; BLOCK], block: &mut [u8]) {
    let least = x.iter().fold(f32::MAX, |least, &x| if x < least { x } else { least });
    let most = x.iter().fold(f32::MIN, |most, &x| if x > most { x } else { most });
    let exact = (most - least) / 31.0;
    let inverse = reciprocal(exact);
    let numbers = x.map(|x| ((x - least) * inverse + 0.5) as u8);
    block[..2].copy_from_slice(&f16::from_f32(exact).to_le_bytes());
    block[2..4].copy_from_slice(&f16::from_f32(least).to_le_bytes());
    let (fifth_bits, nibbles) = block[4..].split_at_mut(4);
    pack(&numbers, fifth_bits, nibbles);
}

#[inline(always)]
pub(super) fn decode_q5_1(block: &[u8], x: &mut [f32; BLOCK]) {
    let (scale, least) = (f16_at(block, 0), f16_at(block, 2));
    *x = unpack(&block[4..8], &block[8..]).map(|number| scale * f32::from(number) + least);
}

/// The blocks of `q5_0` and `q5_1`, as products read them.
pub(crate) struct Q5_0;
pub(crate) struct Q5_1;

impl BlockDecoder for Q5_0 {
    const BLOCK_BYTES: usize = 22;
    const PARTS: usize = 1;

    #[inline(always)]
    fn decode_part(block: &[u8], _: usize, x: &mut [f32; BLOCK]) {
        decode_q5_0(block, x);
    }
}

impl BlockDecoder for Q5_1 {
    const BLOCK_BYTES: usize = 24;
    const PARTS: usize = 1;

    #[inline(always)]
    fn decode_part(block: &[u8], _: usize, x: &mut [f32; BLOCK]) {
        decode_q5_1(block, x);
    }
}
