//! Attention's products in f32, exact or of values rounded to bf16.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;
use std::ops::Range;

use super::kernel::Kernel;
use super::operands::{Left, Product, Right};
use super::tile::tiles;
use super::{Columns, ROWS};
use crate::cpu::product::Element;
use crate::cpu::rounding::nearest;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512};
use crate::cpu::simd::{Portable, Vector};

/// Products of f32, of which `ROUNDED` has what is multiplied rounded to values of bf16.
pub(super) struct Floats<V, const ROUNDED: bool>(PhantomData<V>);

/// Vectors of f32 with the tile that suits their number of registers.
pub(super) trait Tile: Vector {
    /// As [`Kernel::product`].
    ///
    /// # Safety
    /// As there.
    unsafe fn product(product: &Product<'_, f32>);
}

/// Implements [`Tile`] for a vector with tiles of so many rows and vectors.
macro_rules! tile {
    ($vector:ty, $rows:literal x $vectors:literal, $(#[$features:meta])?) => {
        impl Tile for $vector {
            #[inline(always)]
            unsafe fn product(product: &Product<'_, f32>) {
                $(#[$features])?
                unsafe fn compiled(product: &Product<'_, f32>) {
                    // SAFETY: the caller vouches for instructions and elements.
                    unsafe { tiles::<Floats<$vector, false>, $rows, $vectors>(product) }
                }
                // SAFETY: as above.
                unsafe { compiled(product) }
            }
        }
    };
}

tile!(Portable, 4 x 2,);
#[cfg(target_arch = "x86_64")]
tile!(Avx2, 6 x 2, #[target_feature(enable = "avx2,fma")]);
#[cfg(target_arch = "x86_64")]
tile!(Avx512, 8 x 2, #[target_feature(enable = "avx512f,avx512vl,avx2,fma")]);

// SAFETY (of each block that has no other): the caller vouches for what is read and written, and for the instructions.
impl<V: Tile, const ROUNDED: bool> Kernel for Floats<V, ROUNDED> {
    type Vector = V;
    type Word = f32;
    type Words = V;
    const VALUES: usize = 1;

    #[inline(always)]
    unsafe fn splat(word: *const f32) -> V {
        // SAFETY: see above.
        unsafe { V::splat(*word) }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> V {
        // SAFETY: see above.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    unsafe fn load_first(from: *const f32, count: usize) -> V {
        // SAFETY: see above.
        unsafe { V::load_first(from, count) }
    }

    #[inline(always)]
    unsafe fn multiply_add(left: V, right: V, sum: V) -> V {
        left.mul_add(right, sum)
    }

    #[inline(always)]
    unsafe fn product(product: &Product<'_, f32>) {
        // SAFETY: see above.
        unsafe { V::product(product) }
    }

    #[inline(always)]
    unsafe fn round_row(values: &[f32], to: *mut f32) {
        // SAFETY: see above.
        let to = unsafe { std::slice::from_raw_parts_mut(to, values.len()) };
        to.copy_from_slice(values);
        if ROUNDED {
            round(to);
        }
    }

    #[inline(always)]
    unsafe fn transpose(lines: &[*const f32], words: usize, to: *mut f32) {
        // SAFETY: see above.
        unsafe { V::transpose(lines, words, to, ROWS) }
    }

    #[inline(always)]
    unsafe fn lay_rows(lines: &[*const f32], values: usize, to: *mut f32, stride: usize) -> Right<f32> {
        for (row, line) in lines.iter().enumerate() {
            // SAFETY: see above.
            unsafe { std::ptr::copy_nonoverlapping(*line, to.add(row * stride), values) };
        }
        Right { words: to, stride }
    }

    #[inline(always)]
    unsafe fn right(matrix: Columns<'_, f32>, rows: Range<usize>, _: usize, _: *mut f32, _: usize) -> Right<f32> {
        matrix.right(rows.start)
    }

    #[inline(always)]
    unsafe fn over_keys(weights: *mut f32, keys: usize, _: *mut f32) -> Left<f32> {
        // SAFETY: see above.
        unsafe { round_weights::<ROUNDED>(weights, keys) };
        Left { words: weights, row_stride: 1, inner_stride: ROWS }
    }

    #[inline(always)]
    unsafe fn over_rows(weights: *mut f32, keys: usize, _: *mut f32) -> Left<f32> {
        // SAFETY: see above.
        unsafe { round_weights::<ROUNDED>(weights, keys) };
        Left { words: weights, row_stride: ROWS, inner_stride: 1 }
    }
}

/// Rounds the rows of so many keys in place.
///
/// # Safety
/// They may be written.
#[inline(always)]
unsafe fn round_weights<const ROUNDED: bool>(weights: *mut f32, keys: usize) {
    if ROUNDED {
        // SAFETY: the caller vouches for them.
        round(unsafe { std::slice::from_raw_parts_mut(weights, keys * ROWS) });
    }
}

#[inline(always)]
fn round(values: &mut [f32]) {
    values.iter_mut().for_each(|value| *value = nearest(*value).widen());
}
