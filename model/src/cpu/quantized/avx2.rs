//! The kernel in registers of 256 bits: bytes widened to 16 bits, whose products are added in pairs.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m128i, __m256i, _mm_and_si128, _mm_loadu_si128, _mm_set1_epi8, _mm_set1_epi32, _mm_srli_epi16, _mm256_add_epi32,
    _mm256_add_ps, _mm256_castsi256_ps, _mm256_cvtepi8_epi16, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi16,
    _mm256_cvtepu16_epi32, _mm256_hadd_epi32, _mm256_madd_epi16, _mm256_mul_ps, _mm256_permute4x64_epi64,
    _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256, _mm256_slli_epi32, _mm256_storeu_ps,
};
use std::ops::Range;

use super::rows::{QuantizedRows, RowBlocks};
use super::{Bits, GROUP, GroupBlock, Quantized, Sums, TILE};

/// Registers of four rows that a group takes.
const QUARTERS: usize = GROUP / 4;

/// The products of up to [`TILE`] rows with a group.
#[target_feature(enable = "avx2,fma")]
pub(super) fn tile(x: &QuantizedRows, rows: Range<usize>, weight: &Quantized, group: usize) -> Sums {
    let mut found = [[0.0; GROUP]; TILE];
    for (row, found) in rows.zip(&mut found) {
        let sums = match weight.bits {
            Bits::Eight => of_row::<true>(x.row(row), weight, group),
            Bits::Four => of_row::<false>(x.row(row), weight, group),
        };
        // SAFETY: the place has sixteen lanes.
        unsafe {
            _mm256_storeu_ps(found.as_mut_ptr(), sums[0]);
            _mm256_storeu_ps(found.as_mut_ptr().add(8), sums[1]);
        }
    }
    found
}

#[target_feature(enable = "avx2,fma")]
fn of_row<const EIGHT: bool>(row: RowBlocks<'_>, weight: &Quantized, group: usize) -> [std::arch::x86_64::__m256; 2] {
    let mut sums = [_mm256_setzero_ps(); 2];
    for (index, block) in weight.group(group).enumerate() {
        let products = products::<EIGHT>(&row.values[index], block);
        let factor = _mm256_set1_ps(row.scales[index]);
        for (half, (sum, product)) in sums.iter_mut().zip(products).enumerate() {
            let product = _mm256_add_epi32(product, _mm256_set1_epi32(row.starts[index]));
            // SAFETY: eight of the sixteen scales are 16 bytes.
            let scales = unsafe { _mm_loadu_si128(block.scales.as_ptr().add(8 * half).cast()) };
            let scales = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(scales)));
            let scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(product), _mm256_mul_ps(scales, factor));
            *sum = _mm256_add_ps(*sum, scaled);
        }
    }
    sums
}

/// The products of a block with one of each row of a group, eight rows to a register.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn products<const EIGHT: bool>(x: &[i8; super::BLOCK], block: GroupBlock<'_>) -> [__m256i; 2] {
    // Of each four rows, the sums of even and of odd pairs.
    let mut pairs = [_mm256_setzero_si256(); QUARTERS];
    // SAFETY: a block is eight words, of which no alignment is asked.
    let word = |at: usize| unsafe { x.as_ptr().cast::<i32>().add(at).read_unaligned() };
    let four = |at: usize| _mm256_cvtepi8_epi16(_mm_set1_epi32(word(at)));
    for (at, line) in block.lines.iter().enumerate() {
        for (quarter, pairs) in pairs.iter_mut().enumerate() {
            // SAFETY: a line is four times 16 bytes.
            let bytes = unsafe { _mm_loadu_si128(line.0.as_ptr().add(16 * quarter).cast()) };
            let add = |pairs: __m256i, bytes: __m128i, x: __m256i| {
                _mm256_add_epi32(pairs, _mm256_madd_epi16(_mm256_cvtepu8_epi16(bytes), x))
            };
            *pairs = if EIGHT {
                add(*pairs, bytes, four(at))
            } else {
                let halves = _mm_set1_epi8(15);
                let low = add(*pairs, _mm_and_si128(bytes, halves), four(2 * at));
                add(low, _mm_and_si128(_mm_srli_epi16::<4>(bytes), halves), four(2 * at + 1))
            };
        }
    }
    // Adding neighbours leaves the rows 0 1 4 5 2 3 6 7.
    let rows = |a, b| _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_hadd_epi32(a, b));
    [rows(pairs[0], pairs[1]), rows(pairs[2], pairs[3])]
}
