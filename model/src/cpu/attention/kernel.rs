//! What the products of attention are computed with: f32, f32 rounded to values of bf16, or pairs of bf16.
//!
//! A kernel lays operands out as its products read them. In f32 most lie so already.

use std::marker::PhantomData;
use std::ops::Range;

use super::tile::{Left, Product, Right, tiles};
use super::{Columns, ROWS};
use crate::cpu::product::Element;
use crate::cpu::rounding::nearest;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512};
use crate::cpu::simd::{Portable, Vector};

/// A way to multiply and sum. All of its functions want the machine to have its instructions, and what they are given to be of
/// the size that they say.
pub(super) trait Kernel {
    /// Sums, and what softmax computes with.
    type Vector: Vector;
    /// What is read of an operand at a time, of 32 bits.
    type Word: Copy;
    /// As many words as a vector has lanes.
    type Words: Copy;
    /// Values of a word, side by side along the inner index of a product.
    const VALUES: usize;

    /// The word at a place, in each lane.
    unsafe fn splat(word: *const Self::Word) -> Self::Words;
    /// Words that lie side by side.
    unsafe fn load(from: *const Self::Word) -> Self::Words;
    /// The first `count` of them, zero in the other lanes.
    unsafe fn load_first(from: *const Self::Word, count: usize) -> Self::Words;
    /// `sum + left · right`.
    unsafe fn multiply_add(left: Self::Words, right: Self::Words, sum: Self::Vector) -> Self::Vector;
    /// Computes a product.
    unsafe fn product(product: &Product<'_, Self::Word>);

    /// The words of a row of values.
    unsafe fn round_row(values: &[f32], to: *mut Self::Word);
    /// Up to as many lines as a vector has lanes, as columns [`ROWS`] apart; lanes without a line are zero.
    unsafe fn transpose(lines: &[*const Self::Word], words: usize, to: *mut Self::Word);
    /// Lines of as many values, the rows of a right operand, `stride` apart.
    unsafe fn lay_rows(
        lines: &[*const Self::Word],
        values: usize,
        to: *mut Self::Word,
        stride: usize,
    ) -> Right<Self::Word>;
    /// Some rows of a matrix as a right operand, laid out at `to` where they do not lie so.
    unsafe fn right(
        matrix: Columns<'_, Self::Word>,
        rows: Range<usize>,
        values: usize,
        to: *mut Self::Word,
        stride: usize,
    ) -> Right<Self::Word>;
    /// What lies with keys in rows of [`ROWS`] as a left operand of which the keys are summed over, laid out at `to` or in place.
    unsafe fn over_keys(weights: *mut f32, keys: usize, to: *mut Self::Word) -> Left<Self::Word>;
    /// The same as a left operand with a row for each key.
    unsafe fn over_rows(weights: *mut f32, keys: usize, to: *mut Self::Word) -> Left<Self::Word>;
}

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

/// Defines a function that runs a generic kernel on operands in whatever form they are in, with the instructions that its first
/// argument names.
///
/// The argument must be a set that the machine has; [`crate::cpu::Cpu`] makes sure of it, and of the instructions for pairs where
/// there are some.
macro_rules! for_each_form {
    ($visibility:vis unsafe fn $name:ident($($argument:ident: $kind:ty),* $(,)?) = $kernel:ident) => {
        $visibility unsafe fn $name(
            set: $crate::cpu::instructions::InstructionSet,
            qkv: $crate::cpu::attention::Qkv<'_>,
            $($argument: $kind),*
        ) {
            use $crate::cpu::attention::kernel::{Floats, Tile};
            use $crate::cpu::attention::{Operands, Qkv};
            use $crate::cpu::simd::vectorised;

            #[inline(always)]
            unsafe fn exact<V: Tile>(operands: Operands<'_, f32>, $($argument: $kind),*) {
                // SAFETY: the caller vouches for the arguments and the instructions.
                unsafe { $kernel::<Floats<V, false>>(operands, $($argument),*) }
            }

            #[inline(always)]
            unsafe fn rounded<V: Tile>(operands: Operands<'_, f32>, $($argument: $kind),*) {
                // SAFETY: as above.
                unsafe { $kernel::<Floats<V, true>>(operands, $($argument),*) }
            }

            vectorised! { unsafe fn in_f32(operands: Operands<'_, f32>, $($argument: $kind),*) = exact }
            vectorised! { unsafe fn in_rounded_f32(operands: Operands<'_, f32>, $($argument: $kind),*) = rounded }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")]
            unsafe fn in_pairs(operands: Operands<'_, u32>, $($argument: $kind),*) {
                // SAFETY: as above.
                unsafe { $kernel::<$crate::cpu::attention::pairs::Pairs>(operands, $($argument),*) }
            }

            // SAFETY: the caller vouches for it all.
            unsafe {
                match qkv {
                    Qkv::F32(operands) => in_f32(set, operands, $($argument),*),
                    Qkv::Rounded(operands) => in_rounded_f32(set, operands, $($argument),*),
                    #[cfg(target_arch = "x86_64")]
                    Qkv::Pairs(operands) => in_pairs(operands, $($argument),*),
                }
            }
        }
    };
}

pub(super) use for_each_form;
