//! Pairs of bf16 in registers of 512 bits.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16, _mm512_reduce_add_ps,
    _mm512_setzero_ps,
};

use half::bf16;

use super::Lanes;

/// Sums of products of 32 bf16 with 32 others, two to a lane.
#[derive(Clone, Copy)]
pub(super) struct PairSums(__m512);

impl PairSums {
    #[inline(always)]
    unsafe fn some(from: *const bf16, count: usize) -> __m512i {
        // SAFETY: the caller vouches for the numbers and the machine; what the mask leaves out is not touched.
        unsafe { _mm512_maskz_loadu_epi16((1u32 << count) - 1, from.cast()) }
    }
}

impl Lanes for PairSums {
    type Left = bf16;
    type Right = bf16;
    type Loaded = __m512i;
    const WIDTH: usize = 32;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller vouches for the machine.
        Self(unsafe { _mm512_setzero_ps() })
    }

    #[inline(always)]
    unsafe fn left(from: *const bf16) -> __m512i {
        // SAFETY: the caller vouches for the numbers and the machine.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn left_part(from: *const bf16, count: usize) -> __m512i {
        // SAFETY: as above.
        unsafe { Self::some(from, count) }
    }

    #[inline(always)]
    unsafe fn right(from: *const bf16) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn right_part(from: *const bf16, count: usize) -> __m512i {
        // SAFETY: as above.
        unsafe { Self::some(from, count) }
    }

    #[inline(always)]
    unsafe fn add_products(self, left: __m512i, right: __m512i) -> Self {
        // SAFETY: the caller vouches for the machine, and the two types are the same bits.
        unsafe {
            let left = std::mem::transmute::<__m512i, __m512bh>(left);
            Self(_mm512_dpbf16_ps(self.0, left, std::mem::transmute::<__m512i, __m512bh>(right)))
        }
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: the caller vouches for the machine.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
}
