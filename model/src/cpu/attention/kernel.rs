//! What the products inside attention ask of a way to multiply: how rows of values come to lie as its products read
//! them. In f32 most lie so already.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::operands::{Left, Product, Right};
use super::{Columns, ROWS, tile};
use crate::cpu::instructions::InstructionSet;
use crate::cpu::simd::{Multiplier, Vector};

/// A way to multiply and sum, and to lay operands out for it. All of its functions want the machine to have its
/// instructions, and what they are given to be of the size that they say.
pub(super) trait Kernel: Multiplier {
    /// Computes a product with the instructions of a set, which are these or more.
    #[inline(always)]
    unsafe fn product(_set: InstructionSet, product: &Product<'_, Self::Word>) {
        // SAFETY: the caller vouches for it.
        unsafe { tile::product::<Self>(product) }
    }
    /// The words of a row of values.
    unsafe fn round_row(values: &[f32], to: *mut Self::Word);
    /// Up to as many lines as a vector has lanes, as columns [`ROWS`] apart; lanes without a line are zero.
    #[inline(always)]
    unsafe fn transpose(lines: &[*const Self::Word], words: usize, to: *mut Self::Word) {
        /// As many as the widest vector has lanes.
        const MOST: usize = 16;
        let mut of_floats = [std::ptr::null(); MOST];
        of_floats.iter_mut().zip(lines).for_each(|(line, words)| *line = words.cast());
        // SAFETY: the caller vouches for it; words are moved bit by bit.
        unsafe { Self::Sums::transpose(&of_floats[..lines.len()], words, to.cast(), ROWS) }
    }
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
    /// What lies with keys in rows of [`ROWS`] as a left operand of which the keys are summed over, laid out at `to` or
    /// in place.
    unsafe fn over_keys(weights: *mut f32, keys: usize, to: *mut Self::Word) -> Left<Self::Word>;
    /// The same as a left operand with a row for each key.
    unsafe fn over_rows(weights: *mut f32, keys: usize, to: *mut Self::Word) -> Left<Self::Word>;
}
