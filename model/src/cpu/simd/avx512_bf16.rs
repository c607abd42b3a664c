//! Products of pairs of bf16, summed in f32: AVX-512 with BF16, and with products of bytes, which come together.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_epi32,
    _mm512_set1_epi32,
};

use half::bf16;

use super::{Avx512, Loads, Multiplier, Routine};

/// Pairs of bf16 in vectors of 512 bits.
pub(in crate::cpu) struct Avx512Bf16;

/// A mask of the first lanes, all of them where there are fewer.
#[inline(always)]
pub(in crate::cpu) fn first(count: usize) -> u32 {
    if count >= 32 { u32::MAX } else { (1 << count) - 1 }
}

/// Bits of a vector as pairs.
#[inline(always)]
fn as_pairs(words: __m512i) -> __m512bh {
    // SAFETY: both types are 512 bits long, and every bit pattern is a value of each.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}

/// Pairs as bits.
#[inline(always)]
pub(in crate::cpu) fn as_words(pairs: __m512bh) -> __m512i {
    // SAFETY: as above.
    unsafe { std::mem::transmute::<__m512bh, __m512i>(pairs) }
}

// SAFETY (of each block that has no other): the caller vouches for the instructions, and for what is read.
impl Multiplier for Avx512Bf16 {
    type Sums = Avx512;
    type Word = u32;
    type Words = __m512bh;
    const VALUES: usize = 2;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni,avx2,fma")]
        unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
            // SAFETY: see above.
            unsafe { routine.run::<Avx512>() }
        }
        // SAFETY: see above.
        unsafe { compiled(routine) }
    }

    #[inline(always)]
    unsafe fn splat(word: *const u32) -> __m512bh {
        // SAFETY: see above.
        as_pairs(unsafe { _mm512_set1_epi32((*word).cast_signed()) })
    }

    #[inline(always)]
    unsafe fn load(from: *const u32) -> __m512bh {
        // SAFETY: see above.
        as_pairs(unsafe { _mm512_loadu_si512(from.cast()) })
    }

    #[inline(always)]
    unsafe fn load_first(from: *const u32, count: usize) -> __m512bh {
        // SAFETY: see above; masked lanes are not read.
        as_pairs(unsafe { _mm512_maskz_loadu_epi32(first(count) as u16, from.cast()) })
    }

    #[inline(always)]
    unsafe fn multiply_add(left: __m512bh, right: __m512bh, sums: Avx512) -> Avx512 {
        // SAFETY: see above.
        Avx512::of(unsafe { _mm512_dpbf16_ps(sums.lanes(), left, right) })
    }
}

impl Loads<bf16> for Avx512Bf16 {
    #[inline(always)]
    unsafe fn load_values(from: *const bf16) -> __m512bh {
        // SAFETY: see above.
        as_pairs(unsafe { _mm512_loadu_si512(from.cast()) })
    }

    #[inline(always)]
    unsafe fn load_first_values(from: *const bf16, count: usize) -> __m512bh {
        // SAFETY: see above; masked values are not read.
        as_pairs(unsafe { _mm512_maskz_loadu_epi16(first(count), from.cast()) })
    }
}
