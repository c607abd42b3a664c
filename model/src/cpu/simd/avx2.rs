//! Eight lanes of AVX2 with fused multiply-add.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::*;
use std::ops::Range;

use half::{bf16, f16};

use super::{EXP2, Routine, Vector, exp2_of_fraction};

/// Eight lanes. One exists only where the machine has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256);

impl Avx2 {
    /// Of the lanes of a register, with which the machine has shown its instructions.
    #[inline(always)]
    pub(in crate::cpu) fn of(lanes: __m256) -> Self {
        Self(lanes)
    }
}

/// All bits of the lanes of a range.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
unsafe fn lanes(range: Range<usize>) -> __m256i {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let from = _mm256_cmpgt_epi32(_mm256_set1_epi32(range.start as i32), number);
        _mm256_andnot_si256(from, _mm256_cmpgt_epi32(_mm256_set1_epi32(range.end as i32), number))
    }
}

// SAFETY (of each block that has no other): a vector is at hand, or the caller vouches that one may be made; so the
// machine has the instruction.
impl Vector for Avx2 {
    const LANES: usize = 8;
    // Twelve sums, the words of two vectors and of one row take 15 of 16 registers.
    const TILE_ROWS: usize = 6;
    const TILE_VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        #[target_feature(enable = "avx2,f16c,fma")]
        unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
            // SAFETY: the caller vouches for it.
            unsafe { routine.run::<Avx2>() }
        }
        // SAFETY: as above.
        unsafe { compiled(routine) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm256_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(unsafe { _mm256_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller vouches for the values; those of other lanes are not touched.
        Self(unsafe { _mm256_maskload_ps(from, lanes(0..count)) })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))))
        })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for the place.
        unsafe { _mm256_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        // SAFETY: the caller vouches for the place; other lanes are not touched.
        unsafe { _mm256_maskstore_ps(to, lanes(0..count), self.0) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm256_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm256_sub_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm256_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm256_div_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe {
            let four = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm256_max_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn keep(self, range: Range<usize>, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm256_blendv_ps(other.0, self.0, _mm256_castsi256_ps(lanes(range))) })
    }

    #[inline(always)]
    fn differs(self, other: Self) -> bool {
        // SAFETY: see above.
        unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NEQ_UQ>(self.0, other.0)) != 0 }
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        // SAFETY: see above.
        unsafe {
            // At both bounds the power has the bits of zero and of infinity.
            let x = _mm256_min_ps(_mm256_set1_ps(128.0), _mm256_max_ps(_mm256_set1_ps(-127.0), self.0));
            let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            let fraction = Self(_mm256_sub_ps(x, whole));
            let power = exp2_of_fraction(fraction, Self::splat(1.0), EXP2.map(|c| Self::splat(c)));
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
            power.mul(Self(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))))
        }
    }

    #[inline(always)]
    unsafe fn look_up(values: &[f32; 16], codes: *const u8) -> Self {
        // SAFETY: the caller vouches for the codes, four bytes of them, of which no alignment is asked.
        unsafe {
            let bytes = _mm_cvtsi32_si128(codes.cast::<i32>().read_unaligned());
            let half = _mm_set1_epi8(15);
            let (high, low) = (_mm_and_si128(_mm_srli_epi16::<4>(bytes), half), _mm_and_si128(bytes, half));
            let lanes = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(high, low));
            // Eight values at a time; the fourth bit chooses between them.
            let [first, second] =
                [0, 8].map(|at| _mm256_permutevar8x32_ps(_mm256_loadu_ps(values[at..].as_ptr()), lanes));
            let is_second = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(lanes));
            Self(_mm256_blendv_ps(first, second, is_second))
        }
    }
}
