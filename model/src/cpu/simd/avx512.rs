//! Sixteen lanes of AVX-512.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::*;
use std::ops::Range;

use half::{bf16, f16};

use super::{EXP2, Routine, Vector, exp2_of_fraction};

/// Sixteen lanes. One exists only where the machine has AVX-512F.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

impl Avx512 {
    /// Of the lanes of a register, with which the machine has shown its instructions.
    #[inline(always)]
    pub(in crate::cpu) fn of(lanes: __m512) -> Self {
        Self(lanes)
    }

    /// As a register.
    #[inline(always)]
    pub(in crate::cpu) fn lanes(self) -> __m512 {
        self.0
    }
}

/// A mask of the first lanes.
#[inline(always)]
fn first(count: usize) -> __mmask16 {
    ((1u32 << count) - 1) as __mmask16
}

// SAFETY (of each block that has no other): a vector is at hand, or the caller vouches that one may be made; so the
// machine has the instruction.
impl Vector for Avx512 {
    const LANES: usize = 16;
    // 24 sums, the words of three vectors and of one row take 28 of 32 registers.
    const TILE_ROWS: usize = 8;
    const TILE_VECTORS: usize = 3;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma")]
        unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
            // SAFETY: the caller vouches for it.
            unsafe { routine.run::<Avx512>() }
        }
        // SAFETY: as above.
        unsafe { compiled(routine) }
    }

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(unsafe { _mm512_loadu_ps(from) })
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> Self {
        // SAFETY: the caller vouches for the values; those of other lanes are not touched.
        Self(unsafe { _mm512_maskz_loadu_ps(first(count), from) })
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))))
        })
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const f16) -> Self {
        // SAFETY: the caller vouches for the values.
        Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller vouches for the place.
        unsafe { _mm512_storeu_ps(to, self.0) }
    }

    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, count: usize) {
        // SAFETY: the caller vouches for the place; other lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(to, first(count), self.0) }
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_add_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_sub_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_mul_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn div(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_div_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
    }

    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_add_ps(self.0) }
    }

    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see above.
        Self(unsafe { _mm512_max_ps(self.0, other.0) })
    }

    #[inline(always)]
    fn keep(self, lanes: Range<usize>, other: Self) -> Self {
        let mask = first(lanes.end) & !first(lanes.start);
        // SAFETY: see above.
        Self(unsafe { _mm512_mask_blend_ps(mask, other.0, self.0) })
    }

    #[inline(always)]
    fn differs(self, other: Self) -> bool {
        // SAFETY: see above.
        unsafe { _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(self.0, other.0) != 0 }
    }

    #[inline(always)]
    fn exp2(self) -> Self {
        // SAFETY: see above.
        unsafe {
            let whole = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
            let power = exp2_of_fraction(self.sub(Self(whole)), Self::splat(1.0), EXP2.map(|c| Self::splat(c)));
            Self(_mm512_scalef_ps(power.0, whole))
        }
    }

    #[inline(always)]
    unsafe fn look_up(values: &[f32; 16], codes: *const u8) -> Self {
        // SAFETY: the caller vouches for the codes, eight bytes of them.
        unsafe {
            let bytes = _mm_loadl_epi64(codes.cast());
            let half = _mm_set1_epi8(15);
            let (high, low) = (_mm_and_si128(_mm_srli_epi16::<4>(bytes), half), _mm_and_si128(bytes, half));
            let lanes = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(high, low));
            Self(_mm512_permutexvar_ps(lanes, _mm512_loadu_ps(values.as_ptr())))
        }
    }

    #[inline(always)]
    unsafe fn transpose(rows: &[*const f32], columns: usize, to: *mut f32, stride: usize) {
        // SAFETY: the caller vouches for rows and place; lanes beyond the columns are neither read nor written.
        unsafe {
            let mut square = [Self::splat(0.0); 16];
            for column in (0..columns).step_by(16) {
                let width = (columns - column).min(16);
                for (line, row) in square.iter_mut().zip(rows) {
                    *line = Self::load_first(row.add(column), width);
                }
                let turned = transposed(square.map(|line| line.0));
                for (line, offset) in turned.into_iter().zip(column..column + width) {
                    Self(line).store(to.add(offset * stride));
                }
            }
        }
    }
}

/// A square of 16 rows, turned: pairs of values, then of pairs, then of quarters of a vector change places.
///
/// # Safety
/// The machine has AVX-512F.
#[inline(always)]
pub(in crate::cpu) unsafe fn transposed(rows: [__m512; 16]) -> [__m512; 16] {
    let mut a = rows;
    let mut b = rows;
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        for i in 0..8 {
            a[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
            a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
        }
        let pairs = |x, y| (_mm512_castps_pd(x), _mm512_castps_pd(y));
        for i in 0..4 {
            for half in 0..2 {
                let (x, y) = pairs(a[4 * i + half], a[4 * i + half + 2]);
                b[4 * i + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
                b[4 * i + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
            }
        }
        // b[4i + j] holds in quarter q the values of rows 4i..4i+4 in column 4q + j.
        for j in 0..4 {
            let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(b[j], b[4 + j]);
            let high = _mm512_shuffle_f32x4::<0b10_00_10_00>(b[8 + j], b[12 + j]);
            a[j] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, high);
            a[8 + j] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, high);
            let low = _mm512_shuffle_f32x4::<0b11_01_11_01>(b[j], b[4 + j]);
            let high = _mm512_shuffle_f32x4::<0b11_01_11_01>(b[8 + j], b[12 + j]);
            a[4 + j] = _mm512_shuffle_f32x4::<0b10_00_10_00>(low, high);
            a[12 + j] = _mm512_shuffle_f32x4::<0b11_01_11_01>(low, high);
        }
    }
    a
}
