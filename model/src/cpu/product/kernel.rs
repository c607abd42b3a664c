//! The innermost loop of a product, for each set of vector instructions: a tile of the result, its sums kept in
//! registers.
//!
//! The right operand comes in a panel: some of its columns, and for each step along the inner dimension as many words
//! side by side as the tile is wide. A word is an f32 or a pair of bf16. The left operand is read where it lies, a word
//! of each row at each step.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::arch::x86_64::{
    __m512bh, __m512i, _MM_HINT_ET0, _mm_prefetch, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32,
};

use std::marker::PhantomData;

use super::Finish;
use crate::cpu::simd::{self, Vector};
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

/// Instructions that multiply words and sum in f32. Its functions are unsafe: the CPU must have them.
pub(super) trait Kernel: Sized {
    /// A word of an operand.
    type Word: Copy + Send + Sync;
    /// Words side by side.
    type Words: Copy;
    /// Sums side by side.
    type Sums: Vector;
    /// Lanes of a vector.
    const LANES: usize = Self::Sums::LANES;
    /// Rows of a tile, at most.
    const ROWS: usize;
    /// Vectors in a row of a tile, at most.
    const VECTORS: usize;

    /// The words at a place.
    unsafe fn load(words: *const Self::Word) -> Self::Words;
    /// The word at a place, in each lane.
    unsafe fn broadcast(word: *const Self::Word) -> Self::Words;
    /// `sums + a · b`.
    unsafe fn multiply_add(sums: Self::Sums, a: Self::Words, b: Self::Words) -> Self::Sums;
    /// A tile of so many rows and vectors, no more than there are at most.
    unsafe fn tile(rows: usize, vectors: usize, tile: &Tile<'_, Self::Word>);
}

/// Asks for the elements of a result, which need not be ones, to write them.
#[inline(always)]
fn prefetch(c: *const f32) {
    // SAFETY: a prefetch of any address does no harm, and every machine of the architecture has it.
    unsafe { _mm_prefetch::<_MM_HINT_ET0>(c.cast()) }
}

/// Finishes the first `lanes` of some sums, the bias at a place or none at null.
///
/// # Safety
/// The machine has the instructions, and so many elements may be read and, of the result, written.
#[inline(always)]
unsafe fn store<V: Vector>(sums: V, lanes: usize, finish: &Finish<'_>, bias: *const f32, c: *mut f32) {
    // SAFETY: the caller vouches for it.
    unsafe {
        let scale = V::splat(finish.scale);
        let mut result = match finish.write {
            Write::Replace => scale.mul(sums),
            Write::Add => scale.mul_add(sums, V::load_first(c, lanes)),
        };
        if finish.bias.is_some() {
            result = result.add(V::load_first(bias, lanes));
        }
        result.store_first(c, lanes);
    }
}

/// A tile of `R` rows and `V` vectors.
///
/// # Safety
/// The machine has the instructions, and all that the tile names may be read and, of the result, written.
#[inline(always)]
unsafe fn fixed<K: Kernel, const R: usize, const V: usize>(tile: &Tile<'_, K::Word>) {
    // SAFETY: the caller vouches for the instructions and the operands.
    unsafe {
        let mut sums = [[K::Sums::splat(0.0); V]; R];
        for row in 0..R {
            for vector in 0..V {
                prefetch(tile.c.wrapping_add(row * tile.c_stride + vector * K::LANES));
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
                store(sums, lanes, &tile.finish, bias.wrapping_add(first), c.add(first));
            }
        }
    }
}

/// [`Kernel::tile`] of a kernel by [`fixed`], compiled with some instructions for each number of rows and vectors.
macro_rules! tiles {
    ($kernel:ty, $features:literal: $($rows:literal)* x $vectors:tt) => {
        unsafe fn tile(rows: usize, vectors: usize, tile: &Tile<'_, <$kernel as Kernel>::Word>) {
            #[target_feature(enable = $features)]
            unsafe fn compiled<K: Kernel, const R: usize, const V: usize>(tile: &Tile<'_, K::Word>) {
                // SAFETY: the caller vouches for it.
                unsafe { fixed::<K, R, V>(tile) }
            }
            // SAFETY: as above.
            unsafe { tiles!(@match $kernel, rows, vectors, tile, $($rows)* x $vectors) }
        }
    };
    (@match $kernel:ty, $row:ident, $vector:ident, $tile:ident, $($rows:literal)* x $vectors:tt) => {
        match $row {
            $($rows => tiles!(@vectors $kernel, $vector, $tile, $rows x $vectors),)*
            _ => unreachable!("a tile of {} rows", $row),
        }
    };
    (@vectors $kernel:ty, $vector:ident, $tile:ident, $rows:literal x ($($vectors:literal)*)) => {
        match $vector {
            $($vectors => compiled::<$kernel, $rows, $vectors>($tile),)*
            _ => unreachable!("a tile of {} vectors", $vector),
        }
    };
}

/// Vectors of f32 with the tiles that suit their number of registers.
pub(super) trait FloatTiles: Vector {
    /// As [`Kernel::ROWS`].
    const ROWS: usize;
    /// As [`Kernel::VECTORS`].
    const VECTORS: usize;

    /// As [`Kernel::tile`].
    ///
    /// # Safety
    /// As there.
    unsafe fn tile(rows: usize, vectors: usize, tile: &Tile<'_, f32>);
}

impl FloatTiles for simd::Avx512 {
    // 24 sums, the words of three vectors and of one row take 28 of 32 registers.
    const ROWS: usize = 8;
    const VECTORS: usize = 3;

    tiles!(Floats<Self>, "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma": 1 2 3 4 5 6 7 8 x (1 2 3));
}

impl FloatTiles for simd::Avx2 {
    // Twelve sums, the words of two vectors and of one row take 15 of 16 registers.
    const ROWS: usize = 6;
    const VECTORS: usize = 2;

    tiles!(Floats<Self>, "avx2,fma": 1 2 3 4 5 6 x (1 2));
}

/// Products of f32 in vectors.
pub(super) struct Floats<V>(PhantomData<V>);

impl<V: FloatTiles> Kernel for Floats<V> {
    type Word = f32;
    type Words = V;
    type Sums = V;
    const ROWS: usize = V::ROWS;
    const VECTORS: usize = V::VECTORS;

    #[inline(always)]
    unsafe fn load(words: *const f32) -> V {
        // SAFETY: the caller vouches for it.
        unsafe { V::load(words) }
    }

    #[inline(always)]
    unsafe fn broadcast(word: *const f32) -> V {
        // SAFETY: the caller vouches for it.
        unsafe { V::splat(*word) }
    }

    #[inline(always)]
    unsafe fn multiply_add(sums: V, a: V, b: V) -> V {
        a.mul_add(b, sums)
    }

    #[inline(always)]
    unsafe fn tile(rows: usize, vectors: usize, tile: &Tile<'_, f32>) {
        // SAFETY: the caller vouches for it.
        unsafe { V::tile(rows, vectors, tile) }
    }
}

/// Products of pairs of bf16 in vectors of 512 bits.
pub(super) struct Avx512Bf16;

impl Kernel for Avx512Bf16 {
    type Word = u32;
    type Words = __m512bh;
    type Sums = simd::Avx512;
    const ROWS: usize = <simd::Avx512 as FloatTiles>::ROWS;
    const VECTORS: usize = <simd::Avx512 as FloatTiles>::VECTORS;

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
    unsafe fn multiply_add(sums: simd::Avx512, a: __m512bh, b: __m512bh) -> simd::Avx512 {
        // SAFETY: the caller vouches for the instructions.
        simd::Avx512::of(unsafe { _mm512_dpbf16_ps(sums.lanes(), a, b) })
    }

    tiles!(Self, "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma": 1 2 3 4 5 6 7 8 x (1 2 3));
}

/// Words as pairs, in another type of vector.
#[inline(always)]
fn as_pairs(words: __m512i) -> __m512bh {
    // SAFETY: both types are 512 bits long, and every bit pattern is a value of each.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(words) }
}
