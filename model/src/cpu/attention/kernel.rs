//! What the products of attention are computed with: f32, f32 rounded to values of bf16, or pairs of bf16.
//!
//! A kernel lays operands out as its products read them. In f32 most lie so already.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::Columns;
use super::operands::{Left, Product, Right};
use crate::cpu::simd::Vector;

/// A way to multiply and sum. All of its functions want the machine to have its instructions, and what they are given
/// to be of the size that they say.
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
    /// What lies with keys in rows of [`ROWS`] as a left operand of which the keys are summed over, laid out at `to` or
    /// in place.
    unsafe fn over_keys(weights: *mut f32, keys: usize, to: *mut Self::Word) -> Left<Self::Word>;
    /// The same as a left operand with a row for each key.
    unsafe fn over_rows(weights: *mut f32, keys: usize, to: *mut Self::Word) -> Left<Self::Word>;
}
