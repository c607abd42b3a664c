//! Lanes in registers of 512 bits.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m512, __m512bh, __m512i, _mm256_loadu_si256, _mm512_castsi512_ps, _mm512_cvtepu16_epi32, _mm512_dpbf16_ps,
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_ps,
    _mm512_reduce_add_ps, _mm512_setzero_ps, _mm512_slli_epi32,
};
use std::marker::PhantomData;

use half::bf16;

use super::Lanes;

/// Numbers that are widened to sixteen f32.
pub(super) trait Widen: Copy {
    /// Sixteen of them.
    ///
    /// # Safety
    /// So many must lie there, and the machine must have AVX-512.
    unsafe fn sixteen(from: *const Self) -> __m512;

    /// `count` of them, with zeros after them.
    ///
    /// # Safety
    /// As above.
    unsafe fn some(from: *const Self, count: usize) -> __m512;
}

impl Widen for f32 {
    #[inline(always)]
    unsafe fn sixteen(from: *const f32) -> __m512 {
        // SAFETY: the caller vouches for the numbers and the machine.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn some(from: *const f32, count: usize) -> __m512 {
        // SAFETY: as above; what the mask leaves out is not touched.
        unsafe { _mm512_maskz_loadu_ps(((1u32 << count) - 1) as u16, from) }
    }
}

impl Widen for bf16 {
    #[inline(always)]
    unsafe fn sixteen(from: *const bf16) -> __m512 {
        // SAFETY: the caller vouches for the numbers and the machine.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())))) }
    }

    #[inline(always)]
    unsafe fn some(from: *const bf16, count: usize) -> __m512 {
        let mut values = [bf16::ZERO; 16];
        // SAFETY: as above, of `count` numbers, fewer than sixteen.
        unsafe {
            std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), count);
            Self::sixteen(values.as_ptr())
        }
    }
}

/// Sums of products with sixteen numbers of type `T`.
pub(super) struct Sixteen<T>(__m512, PhantomData<T>);

impl<T> Clone for Sixteen<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Sixteen<T> {}

impl<T: Widen> Lanes for Sixteen<T> {
    type Left = f32;
    type Right = T;
    type Loaded = __m512;
    const WIDTH: usize = 16;

    #[inline(always)]
    fn zero() -> Self {
        // SAFETY: made only where the machine has AVX-512.
        Self(unsafe { _mm512_setzero_ps() }, PhantomData)
    }

    #[inline(always)]
    unsafe fn left(from: *const f32) -> __m512 {
        // SAFETY: the caller vouches for the numbers and the machine.
        unsafe { f32::sixteen(from) }
    }

    #[inline(always)]
    unsafe fn left_part(from: *const f32, count: usize) -> __m512 {
        // SAFETY: as above.
        unsafe { f32::some(from, count) }
    }

    #[inline(always)]
    unsafe fn right(from: *const T) -> __m512 {
        // SAFETY: as above.
        unsafe { T::sixteen(from) }
    }

    #[inline(always)]
    unsafe fn right_part(from: *const T, count: usize) -> __m512 {
        // SAFETY: as above.
        unsafe { T::some(from, count) }
    }

    #[inline(always)]
    unsafe fn add_products(self, left: __m512, right: __m512) -> Self {
        // SAFETY: the caller vouches for the machine.
        Self(unsafe { _mm512_fmadd_ps(left, right, self.0) }, PhantomData)
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: as above.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }
}

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
    fn zero() -> Self {
        // SAFETY: made only where the machine has AVX-512.
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
