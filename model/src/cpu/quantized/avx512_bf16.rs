//! Products of bytes in registers of 512 bits, with the instruction that adds four of them to each lane.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m512i, _mm512_and_si512, _mm512_cvtepi32_ps, _mm512_dpbusd_epi32, _mm512_load_si512, _mm512_set1_epi8,
    _mm512_set1_epi32, _mm512_srli_epi16,
};

use super::kernel::Bytes;
use super::{BLOCK, GroupBlock};
use crate::cpu::simd::{Avx512, Avx512Bf16, prefetch};

/// How far ahead of its use memory is asked for, in bytes: two pages, the least at which a core waits for no memory
/// (`cargo bench -p model --bench decode -- --weights int8 --layers 12`; one page takes a fifth longer).
const AHEAD: usize = 8192;
/// Registers that the numbers of a block of a group take, a byte each.
const REGISTERS: usize = 8;

impl Bytes for Avx512Bf16 {
    type Numbers<'a> = [__m512i; REGISTERS];

    #[inline(always)]
    unsafe fn numbers<const EIGHT: bool>(block: GroupBlock<'_>) -> [__m512i; REGISTERS] {
        // SAFETY: the caller vouches for the instructions; a line is 64 bytes, and aligned to as many.
        unsafe {
            let line = |index: usize| {
                let line = block.lines[index].0.as_ptr();
                prefetch(line.wrapping_add(AHEAD));
                _mm512_load_si512(line.cast())
            };
            if EIGHT {
                return std::array::from_fn(line);
            }
            let halves = _mm512_set1_epi8(15);
            let mut numbers = [halves; REGISTERS];
            for (at, numbers) in numbers.chunks_exact_mut(2).enumerate() {
                let line = line(at);
                numbers[0] = _mm512_and_si512(line, halves);
                numbers[1] = _mm512_and_si512(_mm512_srli_epi16::<4>(line), halves);
            }
            numbers
        }
    }

    #[inline(always)]
    unsafe fn products<const EIGHT: bool, const VECTORS: usize>(
        numbers: &[__m512i; REGISTERS],
        x: &[i8; BLOCK],
        start: i32,
    ) -> [Avx512; VECTORS] {
        // SAFETY: the caller vouches for the instructions; a block is eight words, of which no alignment is asked.
        unsafe {
            let word = |at: usize| x.as_ptr().cast::<i32>().add(at).read_unaligned();
            let mut product = _mm512_set1_epi32(start);
            for (at, numbers) in numbers.iter().enumerate() {
                product = _mm512_dpbusd_epi32(product, *numbers, _mm512_set1_epi32(word(at)));
            }
            [Avx512::of(_mm512_cvtepi32_ps(product)); VECTORS]
        }
    }
}
