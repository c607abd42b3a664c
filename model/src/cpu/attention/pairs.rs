//! How attention lays pairs of bf16 out for its products: two values along the inner index in each word.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m512i, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_storeu_epi16,
    _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_ps, _mm512_permutex2var_epi16, _mm512_permutexvar_epi16,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_storeu_si512,
};
use std::ops::Range;

use super::kernel::Kernel;
use super::operands::{Left, Product, Right};
use super::{Columns, ROWS, tile, tiles};
use crate::cpu::amx;
use crate::cpu::instructions::InstructionSet;
use crate::cpu::simd::{Avx512Bf16, as_words, first};

/// Values of a vector.
const VALUES: usize = 32;
/// Words of one.
const WORDS: usize = 16;

/// Places that take the first (or, from 16 on, the second) half of each of two vectors in turns.
const fn in_turns(first: usize) -> [u16; VALUES] {
    let mut places = [0; VALUES];
    let mut word = 0;
    while word < WORDS {
        places[2 * word] = (first + word) as u16;
        places[2 * word + 1] = (VALUES + first + word) as u16;
        word += 1;
    }
    places
}

/// Places that take the two halves of one vector in turns.
const fn halves_in_turns() -> [u16; VALUES] {
    let mut places = [0; VALUES];
    let mut word = 0;
    while word < WORDS {
        places[2 * word] = word as u16;
        places[2 * word + 1] = (WORDS + word) as u16;
        word += 1;
    }
    places
}

static LOW: [u16; VALUES] = in_turns(0);
static HIGH: [u16; VALUES] = in_turns(WORDS);
static HALVES: [u16; VALUES] = halves_in_turns();

/// # Safety
/// The machine has the instructions.
#[inline(always)]
unsafe fn places(places: &[u16; VALUES]) -> __m512i {
    // SAFETY: a vector has as many.
    unsafe { _mm512_loadu_si512(places.as_ptr().cast()) }
}

// SAFETY (of each block that has no other): the caller vouches for what is read and written, and for the instructions.
impl Kernel for Avx512Bf16 {
    #[inline(always)]
    unsafe fn product(set: InstructionSet, product: &Product<'_, u32>) {
        // SAFETY: see above; a set with tiles has the thread ready for them.
        unsafe {
            match set {
                InstructionSet::Amx => tiles::product::<amx::Registers>(product),
                InstructionSet::AmxEmulated => tiles::product::<amx::Emulated>(product),
                _ => tile::product::<Self>(product),
            }
        }
    }

    #[inline(always)]
    unsafe fn round_row(values: &[f32], to: *mut u32) {
        for place in (0..values.len()).step_by(VALUES) {
            let count = values.len() - place;
            // SAFETY: see above; masked lanes are neither read nor written.
            unsafe {
                let from = values.as_ptr().add(place);
                let low = _mm512_maskz_loadu_ps(first(count) as u16, from);
                let high = _mm512_maskz_loadu_ps(first(count.saturating_sub(WORDS)) as u16, from.wrapping_add(WORDS));
                _mm512_mask_storeu_epi16(
                    to.add(place / 2).cast(),
                    first(count),
                    as_words(_mm512_cvtne2ps_pbh(high, low)),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn lay_rows(lines: &[*const u32], values: usize, to: *mut u32, stride: usize) -> Right<u32> {
        for (number, pair) in lines.chunks(2).enumerate() {
            // SAFETY: see above.
            unsafe { pair_rows(pair[0], pair.get(1).copied(), values, to.add(number * stride)) };
        }
        Right { words: to, stride }
    }

    #[inline(always)]
    unsafe fn right(
        matrix: Columns<'_, u32>,
        rows: Range<usize>,
        values: usize,
        to: *mut u32,
        stride: usize,
    ) -> Right<u32> {
        for (number, row) in rows.clone().step_by(2).enumerate() {
            let line = |row: usize| matrix.words[row * matrix.stride..].as_ptr();
            // SAFETY: see above.
            unsafe {
                pair_rows(line(row), (row + 1 < rows.end).then(|| line(row + 1)), values, to.add(number * stride))
            };
        }
        Right { words: to, stride }
    }

    #[inline(always)]
    unsafe fn over_keys(weights: *mut f32, keys: usize, to: *mut u32) -> Left<u32> {
        // SAFETY: see above.
        unsafe {
            let halves = places(&HALVES);
            for key in (0..keys).step_by(2) {
                for lane in (0..ROWS).step_by(WORDS) {
                    let from = weights.add(key * ROWS + lane);
                    let even = _mm512_loadu_ps(from);
                    let odd = if key + 1 < keys { _mm512_loadu_ps(from.add(ROWS)) } else { _mm512_setzero_ps() };
                    let words = _mm512_permutexvar_epi16(halves, as_words(_mm512_cvtne2ps_pbh(odd, even)));
                    _mm512_storeu_si512(to.add(key / 2 * ROWS + lane).cast(), words);
                }
            }
        }
        Left { words: to, row_stride: 1, inner_stride: ROWS }
    }

    #[inline(always)]
    unsafe fn over_rows(weights: *mut f32, keys: usize, to: *mut u32) -> Left<u32> {
        for place in (0..keys * ROWS).step_by(VALUES) {
            // SAFETY: see above.
            unsafe {
                let (low, high) = (_mm512_loadu_ps(weights.add(place)), _mm512_loadu_ps(weights.add(place + WORDS)));
                _mm512_storeu_si512(to.add(place / 2).cast(), as_words(_mm512_cvtne2ps_pbh(high, low)));
            }
        }
        Left { words: to, row_stride: ROWS / 2, inner_stride: 1 }
    }
}

/// The values of two rows, or of one and zeros, as pairs, in whole vectors.
///
/// # Safety
/// The machine has the instructions, so many values can be read, and so many words, rounded up to vectors, written.
#[inline(always)]
unsafe fn pair_rows(even: *const u32, odd: Option<*const u32>, values: usize, to: *mut u32) {
    // SAFETY: the caller vouches for it; masked lanes are not read.
    unsafe {
        for place in (0..values).step_by(VALUES) {
            let mask = first(values - place);
            let load = |row: *const u32| _mm512_maskz_loadu_epi16(mask, row.add(place / 2).cast());
            let (even, odd) = (load(even), odd.map_or(_mm512_setzero_si512(), load));
            _mm512_storeu_si512(to.add(place).cast(), _mm512_permutex2var_epi16(even, places(&LOW), odd));
            if values - place > WORDS {
                let high = _mm512_permutex2var_epi16(even, places(&HIGH), odd);
                _mm512_storeu_si512(to.add(place + WORDS).cast(), high);
            }
        }
    }
}
