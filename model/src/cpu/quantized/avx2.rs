//! Products of bytes in registers of 256 bits, eight rows of a weight in each: those of two bytes are added in 16 bits,
//! as many of these as fit there, and then all in 32.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m256i, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm256_abs_epi8, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256,
    _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_load_si256, _mm256_madd_epi16, _mm256_maddubs_epi16,
    _mm256_or_si256, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_setzero_si256, _mm256_sign_epi8,
    _mm256_slli_epi16, _mm256_srl_epi16, _mm256_srli_epi16, _mm256_xor_si256,
};

use super::kernel::Bytes;
use super::{BLOCK, GROUP, GroupBlock, REGISTERS};
use crate::cpu::simd::{Avx2, Routine, Vector};

/// Registers of eight rows that a group takes.
const HALVES: usize = GROUP / 8;

/// Sums of two products that 16 bits hold: the left numbers are at most 127, and those of 8 bits at most 128 (below).
const fn sums_in_16_bits(bits: usize) -> usize {
    let largest = if bits == 8 { 128 } else { (1 << bits) - 1 };
    i16::MAX as usize / (2 * 127 * largest)
}

impl Bytes for Avx2 {
    type Sums = Avx2;
    /// Those of 8 bits without their excess of 128.
    type Numbers<'a> = [[__m256i; HALVES]; REGISTERS];

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller vouches for it.
        unsafe { <Self as Vector>::compiled(routine) }
    }

    #[inline(always)]
    unsafe fn numbers<const BITS: usize>(block: GroupBlock<'_>) -> [[__m256i; HALVES]; REGISTERS] {
        // SAFETY: the caller vouches for the instructions; a line is twice 32 bytes, and aligned to as many.
        unsafe {
            let line = |index: usize, half: usize| {
                _mm256_load_si256(block.lines[index].0.as_ptr().cast::<__m256i>().add(half))
            };
            let (sign, four_bits) = (_mm256_set1_epi8(-128), _mm256_set1_epi8(15));
            let mut numbers = [[sign; HALVES]; REGISTERS];
            for (register, numbers) in numbers.iter_mut().enumerate() {
                for (half, number) in numbers.iter_mut().enumerate() {
                    if BITS == 8 {
                        *number = _mm256_xor_si256(line(register, half), sign);
                        continue;
                    }
                    let low = line(register / 2, half);
                    let low = if register % 2 == 0 { low } else { _mm256_srli_epi16::<4>(low) };
                    *number = _mm256_and_si256(low, four_bits);
                    let bits = BITS - 4;
                    if bits > 0 {
                        let mask = _mm256_set1_epi8((1 << bits) - 1);
                        let (at, place) = (4 + register * bits / 8, register * bits % 8);
                        let high = _mm256_srl_epi16(line(at, half), _mm_cvtsi32_si128(place as i32));
                        *number = _mm256_or_si256(*number, _mm256_slli_epi16::<4>(_mm256_and_si256(high, mask)));
                    }
                }
            }
            numbers
        }
    }

    #[inline(always)]
    unsafe fn products<const BITS: usize, const PARTS: usize, const VECTORS: usize>(
        numbers: &[[__m256i; HALVES]; REGISTERS],
        x: &[i8; BLOCK],
        starts: [i32; PARTS],
    ) -> [[Avx2; VECTORS]; PARTS] {
        // SAFETY: the caller vouches for the instructions; a block is eight words, of which no alignment is asked.
        unsafe {
            let x = x.as_ptr().cast::<i32>();
            let mut products = [[Avx2::splat(0.0); VECTORS]; PARTS];
            for (part, products) in products.iter_mut().enumerate() {
                // Of signed numbers the excess of 128, for which a sum begins below zero, is already gone.
                let mut sums = [_mm256_set1_epi32(if BITS == 8 { 0 } else { starts[part] }); HALVES];
                let size = REGISTERS / PARTS;
                let first = part * size;
                let together = const { sums_in_16_bits(BITS) };
                for (run, numbers) in numbers[first..first + size].chunks(together).enumerate() {
                    let mut pairs = [_mm256_setzero_si256(); HALVES];
                    for (at, numbers) in (first + run * together..).zip(numbers) {
                        let four = _mm256_set1_epi32(x.add(at).read_unaligned());
                        for (pairs, number) in pairs.iter_mut().zip(numbers) {
                            // One side is unsigned: of a signed number, which may be -128, the other takes the sign.
                            let both = if BITS == 8 {
                                _mm256_maddubs_epi16(_mm256_abs_epi8(*number), _mm256_sign_epi8(four, *number))
                            } else {
                                _mm256_maddubs_epi16(*number, four)
                            };
                            *pairs = _mm256_add_epi16(*pairs, both);
                        }
                    }
                    for (sums, pairs) in sums.iter_mut().zip(pairs) {
                        *sums = _mm256_add_epi32(*sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                    }
                }
                for (product, sums) in products.iter_mut().zip(sums) {
                    *product = Avx2::of(_mm256_cvtepi32_ps(sums));
                }
            }
            products
        }
    }

    #[inline(always)]
    unsafe fn integers(from: *const i8) -> Avx2 {
        // SAFETY: the caller vouches for the instructions, and for eight integers.
        Avx2::of(unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))) })
    }
}
