//! Products of bytes in registers of 256 bits: bytes widened to 16 bits, whose products are added in pairs.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m128i, __m256i, _mm_and_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_set1_epi8, _mm_set1_epi32, _mm_srli_epi16,
    _mm256_add_epi32, _mm256_cvtepi8_epi16, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi16,
    _mm256_hadd_epi32, _mm256_madd_epi16, _mm256_permute4x64_epi64, _mm256_set1_epi32, _mm256_setzero_si256,
};

use super::kernel::Bytes;
use super::portable::Numbers;
use super::{BLOCK, GROUP, GroupBlock};
use crate::cpu::simd::{Avx2, Routine, Vector};

/// Registers of four rows that a group takes.
const QUARTERS: usize = GROUP / 4;

impl Bytes for Avx2 {
    type Sums = Avx2;
    type Numbers<'a> = Numbers<'a>;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller vouches for it.
        unsafe { <Self as Vector>::compiled(routine) }
    }

    #[inline(always)]
    unsafe fn numbers<const BITS: usize>(block: GroupBlock<'_>) -> Numbers<'_> {
        Numbers::of::<BITS>(block)
    }

    #[inline(always)]
    unsafe fn products<const BITS: usize, const PARTS: usize, const VECTORS: usize>(
        numbers: &Numbers<'_>,
        x: &[i8; BLOCK],
        starts: [i32; PARTS],
    ) -> [[Avx2; VECTORS]; PARTS] {
        // SAFETY: the caller vouches for the instructions; a line is four times 16 bytes, and a block eight words, of
        // which no alignment is asked.
        unsafe {
            let add = |pairs: __m256i, bytes: __m128i, x: __m256i| {
                _mm256_add_epi32(pairs, _mm256_madd_epi16(_mm256_cvtepu8_epi16(bytes), x))
            };
            let mut products = [[Avx2::splat(0.0); VECTORS]; PARTS];
            for (part, products) in products.iter_mut().enumerate() {
                let x = x.as_ptr().add(part * BLOCK / PARTS).cast::<i32>();
                let four = |at: usize| _mm256_cvtepi8_epi16(_mm_set1_epi32(x.add(at).read_unaligned()));
                // Of each four rows, the sums of even and of odd pairs.
                let mut pairs = [_mm256_setzero_si256(); QUARTERS];
                for (at, line) in numbers.part(part, PARTS).iter().enumerate() {
                    for (quarter, pairs) in pairs.iter_mut().enumerate() {
                        let bytes = _mm_loadu_si128(line.0.as_ptr().add(16 * quarter).cast());
                        *pairs = if BITS == 4 {
                            let halves = _mm_set1_epi8(15);
                            let low = add(*pairs, _mm_and_si128(bytes, halves), four(2 * at));
                            add(low, _mm_and_si128(_mm_srli_epi16::<4>(bytes), halves), four(2 * at + 1))
                        } else {
                            add(*pairs, bytes, four(at))
                        };
                    }
                }
                for (half, product) in products.iter_mut().enumerate() {
                    // Adding neighbours leaves the rows 0 1 4 5 2 3 6 7.
                    let rows = _mm256_hadd_epi32(pairs[2 * half], pairs[2 * half + 1]);
                    let rows = _mm256_permute4x64_epi64::<0b11_01_10_00>(rows);
                    let sums = _mm256_add_epi32(rows, _mm256_set1_epi32(starts[part]));
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
