//! Products of words, summed in f32. A word is a value or, of bf16, a pair of them along the inner dimension of a
//! product: what matrix products, those of few rows and those inside attention are written over.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::marker::PhantomData;

use super::{Routine, Vector};
use crate::cpu::product::Element;

/// Instructions that multiply words and sum in f32. All of its functions want the machine to have them, and so many
/// words or values to be where they are read.
pub(in crate::cpu) trait Multiplier: Sized {
    /// Sums side by side.
    type Sums: Vector;
    /// What is read of an operand at a time, of 32 bits.
    type Word: Copy + Send + Sync;
    /// As many words as there are sums.
    type Words: Copy;
    /// Values of a word, side by side along the inner dimension.
    const VALUES: usize;
    /// Words of a vector.
    const LANES: usize = Self::Sums::LANES;

    /// Runs a routine, compiled with the instructions.
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output;
    /// The word at a place, in each lane.
    unsafe fn splat(word: *const Self::Word) -> Self::Words;
    /// Words that lie side by side.
    unsafe fn load(from: *const Self::Word) -> Self::Words;
    /// The first `count` of them, zero in the other lanes.
    unsafe fn load_first(from: *const Self::Word, count: usize) -> Self::Words;
    /// `left · right + sums`.
    unsafe fn multiply_add(left: Self::Words, right: Self::Words, sums: Self::Sums) -> Self::Sums;
}

/// Instructions that also read values of a type where they lie.
pub(in crate::cpu) trait Loads<T>: Multiplier {
    /// The values of a vector, side by side.
    unsafe fn load_values(from: *const T) -> Self::Words;
    /// The first `count` of them, then zeros.
    unsafe fn load_first_values(from: *const T, count: usize) -> Self::Words;
}

/// Products of f32, of which `ROUNDED` has attention round what it multiplies to values of bf16.
pub(in crate::cpu) struct Floats<V, const ROUNDED: bool = false>(PhantomData<V>);

// SAFETY (of each block): the caller vouches for the instructions, and for what is read.
impl<V: Vector, const ROUNDED: bool> Multiplier for Floats<V, ROUNDED> {
    type Sums = V;
    type Word = f32;
    type Words = V;
    const VALUES: usize = 1;

    #[inline(always)]
    unsafe fn compiled<R: Routine>(routine: R) -> R::Output {
        // SAFETY: see above.
        unsafe { V::compiled(routine) }
    }

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
    unsafe fn multiply_add(left: V, right: V, sums: V) -> V {
        left.mul_add(right, sums)
    }
}

impl<V: Vector, T: Element> Loads<T> for Floats<V> {
    #[inline(always)]
    unsafe fn load_values(from: *const T) -> V {
        // SAFETY: see above.
        unsafe { T::load(from) }
    }

    #[inline(always)]
    unsafe fn load_first_values(from: *const T, count: usize) -> V {
        // SAFETY: see above.
        unsafe { T::load_first(from, count) }
    }
}
