//! The kernel in registers of 512 bits, with the instruction that adds four products of bytes to each lane.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m512i, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm512_add_ps, _mm512_and_si512, _mm512_castsi512_ps,
    _mm512_cvtepi32_ps, _mm512_cvtepu16_epi32, _mm512_dpbusd_epi32, _mm512_load_si512, _mm512_mul_ps, _mm512_set1_epi8,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_slli_epi32, _mm512_srli_epi16, _mm512_storeu_ps,
};
use std::ops::Range;

use super::rows::{QuantizedRows, RowBlocks};
use super::{Bits, GROUP, GroupBlock, Quantized, Sums, TILE};

/// How far ahead of its use memory is asked for, in bytes.
const AHEAD: usize = 4096;
/// Registers that the numbers of a block of a group take, a byte each.
const REGISTERS: usize = 8;

/// The products of up to [`TILE`] rows with a group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
pub(super) fn tile(x: &QuantizedRows, rows: Range<usize>, weight: &Quantized, group: usize) -> Sums {
    match weight.bits {
        Bits::Eight => of_rows::<true>(x, rows, weight, group),
        Bits::Four => of_rows::<false>(x, rows, weight, group),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
fn of_rows<const EIGHT: bool>(x: &QuantizedRows, rows: Range<usize>, weight: &Quantized, group: usize) -> Sums {
    match rows.len() {
        1 => of::<1, EIGHT>(x, rows.start, weight, group),
        2 => of::<2, EIGHT>(x, rows.start, weight, group),
        3 => of::<3, EIGHT>(x, rows.start, weight, group),
        4 => of::<4, EIGHT>(x, rows.start, weight, group),
        5 => of::<5, EIGHT>(x, rows.start, weight, group),
        6 => of::<6, EIGHT>(x, rows.start, weight, group),
        7 => of::<7, EIGHT>(x, rows.start, weight, group),
        _ => of::<TILE, EIGHT>(x, rows.start, weight, group),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
fn of<const M: usize, const EIGHT: bool>(x: &QuantizedRows, row: usize, weight: &Quantized, group: usize) -> Sums {
    let rows: [RowBlocks<'_>; M] = std::array::from_fn(|m| x.row(row + m));
    let mut sums = [_mm512_setzero_ps(); M];
    for (index, block) in weight.group(group).enumerate() {
        let numbers = unpacked::<EIGHT>(block);
        // SAFETY: sixteen scales are 32 bytes.
        let scales = unsafe { _mm256_loadu_si256(block.scales.as_ptr().cast()) };
        let scales = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(scales)));
        for (sum, row) in sums.iter_mut().zip(&rows) {
            // SAFETY: a block of a row is eight words, of which no alignment is asked.
            let word = |at: usize| unsafe { row.values[index].as_ptr().cast::<i32>().add(at).read_unaligned() };
            let mut product = _mm512_set1_epi32(row.starts[index]);
            for (at, numbers) in numbers.iter().enumerate() {
                product = _mm512_dpbusd_epi32(product, *numbers, _mm512_set1_epi32(word(at)));
            }
            let scales = _mm512_mul_ps(scales, _mm512_set1_ps(row.scales[index]));
            *sum = _mm512_add_ps(*sum, _mm512_mul_ps(_mm512_cvtepi32_ps(product), scales));
        }
    }
    let mut found = [[0.0; GROUP]; TILE];
    for (found, sum) in found.iter_mut().zip(sums) {
        // SAFETY: the place has sixteen lanes.
        unsafe { _mm512_storeu_ps(found.as_mut_ptr(), sum) };
    }
    found
}

/// The numbers of a block, a byte each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")]
fn unpacked<const EIGHT: bool>(block: GroupBlock<'_>) -> [__m512i; REGISTERS] {
    let line = |index: usize| {
        let line = block.lines[index].0.as_ptr();
        // SAFETY: a line is 64 bytes, and aligned to as many; asking for memory that is not there does nothing.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD).cast());
            _mm512_load_si512(line.cast())
        }
    };
    let mut numbers = [_mm512_set1_epi8(0); REGISTERS];
    if EIGHT {
        numbers.iter_mut().enumerate().for_each(|(at, numbers)| *numbers = line(at));
        return numbers;
    }
    let halves = _mm512_set1_epi8(15);
    for (at, numbers) in numbers.chunks_exact_mut(2).enumerate() {
        let line = line(at);
        numbers[0] = _mm512_and_si512(line, halves);
        numbers[1] = _mm512_and_si512(_mm512_srli_epi16::<4>(line), halves);
    }
    numbers
}
