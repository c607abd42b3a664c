//! Products of bytes in registers of 512 bits, with the instruction that adds four of them to each lane.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m512i, _mm_loadu_si128, _mm512_and_si512, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32,
    _mm512_load_si512, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_slli_epi16, _mm512_srli_epi16,
    _mm512_ternarylogic_epi32,
};

use super::kernel::Bytes;
use super::{BLOCK, GroupBlock, Line, REGISTERS};
use crate::cpu::simd::{Avx512, Avx512Bf16, Multiplier, Routine, Vector, prefetch, prefetch_far};

/// How far ahead of its use memory is asked for, in bytes: a core waits for none from two pages on
/// (`cargo bench -p model --bench decode -- --weights int8 --layers 12`; one page takes a fifth longer).
const AHEAD: usize = 8192;
/// The same where several rows are computed with what is read. That is asked for to the second cache: the first follows
/// so few lines at once that loads wait behind them, a quarter of the time of eight rows (`--batch 8`).
const FAR_AHEAD: usize = 16384;

/// Moves the bits of each byte that are wanted at `to` there from `from`. Others of the byte, and of its neighbour,
/// come along.
#[inline(always)]
unsafe fn moved(bits: __m512i, from: usize, to: usize) -> __m512i {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        match (to as isize) - (from as isize) {
            4 => _mm512_slli_epi16::<4>(bits),
            3 => _mm512_slli_epi16::<3>(bits),
            2 => _mm512_slli_epi16::<2>(bits),
            1 => _mm512_slli_epi16::<1>(bits),
            0 => bits,
            -1 => _mm512_srli_epi16::<1>(bits),
            -2 => _mm512_srli_epi16::<2>(bits),
            -3 => _mm512_srli_epi16::<3>(bits),
            _ => unreachable!("no bits so far away"),
        }
    }
}

impl Bytes for Avx512Bf16 {
    type Sums = Avx512;
    type Numbers<'a> = [__m512i; REGISTERS];

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        // SAFETY: the caller vouches for it.
        unsafe { <Self as Multiplier>::compiled(routine) }
    }

    #[inline(always)]
    fn ask_for<const BITS: usize, const ROWS: usize>(block: GroupBlock<'_>) {
        let ahead = if ROWS == 1 { AHEAD } else { FAR_AHEAD };
        for line in block.lines {
            let line = std::ptr::from_ref(line).wrapping_byte_add(ahead);
            if ROWS == 1 { prefetch(line) } else { prefetch_far(line) }
        }
        prefetch(std::ptr::from_ref(block.scales).wrapping_add(ahead / (BITS * size_of::<Line>())));
    }

    #[inline(always)]
    unsafe fn numbers<const BITS: usize>(block: GroupBlock<'_>) -> [__m512i; REGISTERS] {
        /// `a | b & c`.
        const OR_AND: i32 = 0b1111_1000;
        // SAFETY: the caller vouches for the instructions; a line is 64 bytes, and aligned to as many.
        unsafe {
            let line = |index: usize| _mm512_load_si512(block.lines[index].0.as_ptr().cast());
            if BITS == 8 {
                return std::array::from_fn(line);
            }
            let halves = _mm512_set1_epi8(15);
            let mut numbers = [halves; REGISTERS];
            for (at, numbers) in numbers.chunks_exact_mut(2).enumerate() {
                let line = line(at);
                numbers[0] = _mm512_and_si512(line, halves);
                numbers[1] = _mm512_and_si512(_mm512_srli_epi16::<4>(line), halves);
            }
            let bits = BITS - 4;
            if bits > 0 {
                let mask = _mm512_set1_epi8(((1 << bits) - 1) << 4);
                for (at, numbers) in numbers.chunks_exact_mut(8 / bits).enumerate() {
                    let high = line(4 + at);
                    for (place, number) in numbers.iter_mut().enumerate() {
                        let high = moved(high, place * bits, 4);
                        *number = _mm512_ternarylogic_epi32::<OR_AND>(*number, high, mask);
                    }
                }
            }
            numbers
        }
    }

    #[inline(always)]
    unsafe fn products<const BITS: usize, const PARTS: usize, const VECTORS: usize>(
        numbers: &[__m512i; REGISTERS],
        x: &[i8; BLOCK],
        starts: [i32; PARTS],
    ) -> [[Avx512; VECTORS]; PARTS] {
        // SAFETY: the caller vouches for the instructions; a block is eight words, of which no alignment is asked.
        unsafe {
            let word = |at: usize| x.as_ptr().cast::<i32>().add(at).read_unaligned();
            let mut products = [[Avx512::splat(0.0); VECTORS]; PARTS];
            for (part, product) in products.iter_mut().enumerate() {
                let mut sums = _mm512_set1_epi32(starts[part]);
                let first = part * REGISTERS / PARTS;
                for (at, numbers) in (first..).zip(&numbers[first..first + REGISTERS / PARTS]) {
                    sums = _mm512_dpbusd_epi32(sums, *numbers, _mm512_set1_epi32(word(at)));
                }
                *product = [Avx512::of(_mm512_cvtepi32_ps(sums)); VECTORS];
            }
            products
        }
    }

    #[inline(always)]
    unsafe fn integers(from: *const i8) -> Avx512 {
        // SAFETY: the caller vouches for the instructions, and for sixteen integers.
        Avx512::of(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) })
    }
}
