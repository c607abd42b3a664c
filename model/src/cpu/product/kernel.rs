//! The innermost loop of a product, for each set of vector instructions: a tile of the result, its sums kept in
//! registers.
//!
//! The right operand comes in a panel: some of its columns, and for each step along the inner dimension as many words
//! side by side as the tile is wide. A word is an f32 or a pair of bf16. The left operand is read where it lies, a word
//! of each row at each step.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m256, __m256i, __m512, __m512bh, __m512i, _MM_HINT_ET0, _mm_prefetch, _mm256_add_ps, _mm256_cmpgt_epi32,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_maskload_ps, _mm256_maskstore_ps, _mm256_mul_ps, _mm256_set1_epi32,
    _mm256_set1_ps, _mm256_setr_epi32, _mm256_setzero_ps, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps,
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_storeu_ps, _mm512_maskz_loadu_ps, _mm512_mul_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
};

use super::Finish;
use crate::ops::Write;

/// A tile of a product and its operands.
pub(super) struct Tile<'a, W> {
    /// The first word of the first row of the left operand.
    pub a: *const W,
    /// How far apart its rows are.
    pub row_stride: usize,
    /// How far apart its words are along the inner dimension.
    pub step: usize,
    /// Number of steps along the inner dimension.
    pub inner: usize,
    /// The panel.
    pub panel: *const W,
    /// How far apart its steps are.
    pub panel_step: usize,
    /// The first element of the result.
    pub c: *mut f32,
    /// How far apart its rows are.
    pub c_stride: usize,
    /// Columns of the result: no more than the panel has, less than a vector fewer.
    pub columns: usize,
    /// What becomes of the sums.
    pub finish: Finish<'a>,
}

/// Instructions that multiply words and sum in f32. All of its functions are unsafe for want of the instructions.
pub(super) trait Kernel: Sized {
    /// A word of an operand.
    type Word: Copy + Send + Sync;
    /// Words side by side.
    type Words: Copy;
    /// Sums side by side.
    type Sums: Copy;
    /// Lanes of a vector.
    const LANES: usize;
    /// Rows of a tile, at most.
    const ROWS: usize;
    /// Vectors in a row of a tile, at most.
    const VECTORS: usize;

    /// Asks for the elements at a place, which need not be ones.
    #[inline(always)]
    fn prefetch(c: *const f32) {
        // SAFETY: a prefetch of any address does no harm, and every machine of the architecture has it.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(c.cast()) }
    }
    /// Sums of nothing.
    unsafe fn zero() -> Self::Sums;
    /// The words at a place.
    unsafe fn load(words: *const Self::Word) -> Self::Words;
    /// The word at a place, in each lane.
    unsafe fn broadcast(word: *const Self::Word) -> Self::Words;
    /// `sums + a · b`.
    unsafe fn multiply_add(sums: Self::Sums, a: Self::Words, b: Self::Words) -> Self::Sums;
    /// Finishes the first `lanes` of some sums, the bias at a place or none at null.
    unsafe fn store(sums: Self::Sums, lanes: usize, finish: &Finish<'_>, bias: *const f32, c: *mut f32);
    /// A tile of so many rows and vectors, no more than there are at most.
    unsafe fn tile(rows: usize, vectors: usize, tile: &Tile<'_, Self::Word>);
}

/// A tile of `R` rows and `V` vectors.
///
/// # Safety
/// The machine has the instructions, and all that the tile names may be read and, of the result, written.
#[inline(always)]
unsafe fn fixed<K: Kernel, const R: usize, const V: usize>(tile: &Tile<'_, K::Word>) {
    // SAFETY: the caller vouches for the instructions and the operands.
    unsafe {
        let mut sums = [[K::zero(); V]; R];
        for row in 0..R {
            for vector in 0..V {
                K::prefetch(tile.c.wrapping_add(row * tile.c_stride + vector * K::LANES));
            }
        }
        let (mut a, mut panel) = (tile.a, tile.panel);
        for _ in 0..tile.inner {
            let mut words = [K::load(panel); V];
            for (vector, words) in words.iter_mut().enumerate().skip(1) {
                *words = K::load(panel.add(vector * K::LANES));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let word = K::broadcast(a.add(row * tile.row_stride));
                for (sums, words) in sums.iter_mut().zip(words) {
                    *sums = K::multiply_add(*sums, word, words);
                }
            }
            a = a.wrapping_add(tile.step);
            panel = panel.wrapping_add(tile.panel_step);
        }
        let bias = tile.finish.bias.map_or(std::ptr::null(), <[f32]>::as_ptr);
        for (row, sums) in sums.into_iter().enumerate() {
            let c = tile.c.add(row * tile.c_stride);
            for (vector, sums) in sums.into_iter().enumerate() {
                let first = vector * K::LANES;
                let lanes = (tile.columns - first).min(K::LANES);
                K::store(sums, lanes, &tile.finish, bias.wrapping_add(first), c.add(first));
            }
        }
    }
}

/// [`Kernel::tile`] by [`fixed`], compiled with some instructions for each number of rows and vectors.
macro_rules! tiles {
    ($features:literal: $($rows:literal)* x $vectors:tt) => {
        unsafe fn tile(rows: usize, vectors: usize, tile: &Tile<'_, Self::Word>) {
            #[target_feature(enable = $features)]
            unsafe fn compiled<K: Kernel, const R: usize, const V: usize>(tile: &Tile<'_, K::Word>) {
                // SAFETY: the caller vouches for it.
                unsafe { fixed::<K, R, V>(tile) }
            }
            // SAFETY: as above.
            unsafe { tiles!(@match rows, vectors, tile, $($rows)* x $vectors) }
        }
    };
    (@match $row:ident, $vector:ident, $tile:ident, $($rows:literal)* x $vectors:tt) => {
        match $row {
            $($rows => tiles!(@vectors $vector, $tile, $rows x $vectors),)*
            _ => unreachable!("a tile of {} rows", $row),
        }
    };
    (@vectors $vector:ident, $tile:ident, $rows:literal x ($($vectors:literal)*)) => {
        match $vector {
            $($vectors => compiled::<Self, $rows, $vectors>($tile),)*
            _ => unreachable!("a tile of {} vectors", $vector),
        }
    };
}

/// Implements what two kernels of 512-bit vectors have in common.
macro_rules! sums_of_512_bits {
    () => {
        type Sums = __m512;
        const LANES: usize = 16;
        // 24 sums, the words of three vectors and of one row take 28 of 32 registers.
        const ROWS: usize = 8;
        const VECTORS: usize = 3;

        #[inline(always)]
        unsafe fn zero() -> __m512 {
            // SAFETY: the caller vouches for the instructions.
            unsafe { _mm512_setzero_ps() }
        }

        #[inline(always)]
        unsafe fn store(sums: __m512, lanes: usize, finish: &Finish<'_>, bias: *const f32, c: *mut f32) {
            // SAFETY: the caller vouches for the instructions, and masked lanes are not touched.
            unsafe {
                let mask = (0xffff_u32 >> (Self::LANES - lanes)) as u16;
                let scale = _mm512_set1_ps(finish.scale);
                let mut result = match finish.write {
                    Write::Replace => _mm512_mul_ps(scale, sums),
                    Write::Add => _mm512_fmadd_ps(scale, sums, _mm512_maskz_loadu_ps(mask, c)),
                };
                if finish.bias.is_some() {
                    result = _mm512_add_ps(result, _mm512_maskz_loadu_ps(mask, bias));
                }
                _mm512_mask_storeu_ps(c, mask, result);
            }
        }

        tiles!("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma": 1 2 3 4 5 6 7 8 x (1 2 3));
    };
}

/// Products of f32 in vectors of 512 bits.
pub(super) struct Avx512;

impl Kernel for Avx512 {
    type Word = f32;
    type Words = __m512;

    #[inline(always)]
    unsafe fn load(words: *const f32) -> __m512 {
        // SAFETY: the caller vouches for it.
        unsafe { _mm512_loadu_ps(words) }
    }

    #[inline(always)]
    unsafe fn broadcast(word: *const f32) -> __m512 {
        // SAFETY: the caller vouches for it.
        unsafe { _mm512_set1_ps(*word) }
    }

    #[inline(always)]
    unsafe fn multiply_add(sums: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: the caller vouches for the instructions.
        unsafe { _mm512_fmadd_ps(a, b, sums) }
    }

    sums_of_512_bits!();
}

/// Products of pairs of bf16 in vectors of 512 bits.
pub(super) struct Avx512Bf16;

impl Kernel for Avx512Bf16 {
    type Word = u32;
    type Words = __m512bh;

    #[inline(always)]
    unsafe fn load(words: *const u32) -> __m512bh {
        // SAFETY: the caller vouches for it.
        as_pairs(unsafe { _mm512_loadu_si512(words.cast()) })
    }

    #[inline(always)]
    unsafe fn broadcast(word: *const u32) -> __m512bh {
        // SAFETY: the caller vouches for it.
        as_pairs(unsafe { _mm512_set1_epi32((*word).cast_signed()) })
    }

    #[inline(always)]
    unsafe fn multiply_add(sums: __m512, a: __m512bh, b: __m512bh) -> __m512 {
        // SAFETY: the caller vouches for the instructions.
        unsafe { _mm512_dpbf16_ps(sums, a, b) }
    }

    sums_of_512_bits!();
}

/// Words as pairs, in another type of vector.
#[inline(always)]
fn as_pairs(words: __m512i) -> __m512bh {
    // SAFETY: both types are 512 bits long, and every bit pattern is a value of each.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}

/// Products of f32 in vectors of 256 bits.
pub(super) struct Avx2;

impl Kernel for Avx2 {
    type Word = f32;
    type Words = __m256;
    type Sums = __m256;
    const LANES: usize = 8;
    // Twelve sums, the words of two vectors and of one row take 15 of 16 registers.
    const ROWS: usize = 6;
    const VECTORS: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: the caller vouches for the instructions.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load(words: *const f32) -> __m256 {
        // SAFETY: the caller vouches for it.
        unsafe { _mm256_loadu_ps(words) }
    }

    #[inline(always)]
    unsafe fn broadcast(word: *const f32) -> __m256 {
        // SAFETY: the caller vouches for it.
        unsafe { _mm256_set1_ps(*word) }
    }

    #[inline(always)]
    unsafe fn multiply_add(sums: __m256, a: __m256, b: __m256) -> __m256 {
        // SAFETY: the caller vouches for the instructions.
        unsafe { _mm256_fmadd_ps(a, b, sums) }
    }

    #[inline(always)]
    unsafe fn store(sums: __m256, lanes: usize, finish: &Finish<'_>, bias: *const f32, c: *mut f32) {
        // SAFETY: the caller vouches for the instructions, and masked lanes are not touched.
        unsafe {
            let mask = first_lanes(lanes);
            let scale = _mm256_set1_ps(finish.scale);
            let mut result = match finish.write {
                Write::Replace => _mm256_mul_ps(scale, sums),
                Write::Add => _mm256_fmadd_ps(scale, sums, _mm256_maskload_ps(c, mask)),
            };
            if finish.bias.is_some() {
                result = _mm256_add_ps(result, _mm256_maskload_ps(bias, mask));
            }
            _mm256_maskstore_ps(c, mask, result);
        }
    }

    tiles!("avx2,fma": 1 2 3 4 5 6 x (1 2));
}

/// All bits of the first lanes.
#[inline(always)]
unsafe fn first_lanes(lanes: usize) -> __m256i {
    // SAFETY: the caller vouches for the instructions.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(lanes as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}
