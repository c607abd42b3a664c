//! How attention lays values of f32 out for its products, exact or rounded to bf16.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::kernel::Kernel;
use super::operands::{Left, Right};
use super::{Columns, ROWS};
use crate::cpu::product::Element;
use crate::cpu::rounding::nearest;
use crate::cpu::simd::{Floats, Vector};

// SAFETY (of each block that has no other): the caller vouches for what is read and written, and for the instructions.
impl<V: Vector, const ROUNDED: bool> Kernel for Floats<V, ROUNDED> {
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
