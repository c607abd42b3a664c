//! Values of f32 as two of bf16, whose products in tiles have about 16 bits ([`crate::ops::MatmulPrecision::High`]):
//! the nearest one, and the nearest to what that leaves.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use half::bf16;

use super::super::{Cpu, Tensor};
use super::{Element, Path, View};
use crate::cpu::instructions::multiversion;
use crate::cpu::rounding::nearest;

/// A left operand, split.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct SplitView<'a> {
    /// The nearest values, and the rests.
    pub(super) halves: [View<'a, bf16>; 2],
}

impl SplitView<'_> {
    /// Rows of the operand.
    pub(in crate::cpu) fn rows(self) -> usize {
        self.halves[0].rows()
    }

    /// Columns of the operand: the inner dimension.
    pub(in crate::cpu) fn columns(self) -> usize {
        self.halves[0].columns()
    }

    /// Some of its rows.
    pub(in crate::cpu) fn row_range(self, rows: Range<usize>) -> Self {
        Self { halves: self.halves.map(|half| half.row_range(rows.clone())) }
    }
}

/// Words from one row of so many values to the next: whole lines of the cache, of which neighbouring rows do not lie in
/// the same places of the first level.
fn row_words(columns: usize) -> usize {
    const LINE: usize = 16;
    let lines = columns.div_ceil(2).div_ceil(LINE);
    LINE * (lines + (6 - lines % 4) % 4)
}

impl Cpu {
    /// Whether a product of f32 with a weight, or one that is a weight's gradient, is one of split operands.
    pub(in crate::cpu) fn splits(&self, path: Path) -> bool {
        self.of_high_precision && path == Path::Blocks
    }

    /// Splits a left operand, over the threads.
    pub(in crate::cpu) fn split<'a>(&self, a: View<'_>, buffer: &'a mut Tensor) -> SplitView<'a> {
        let lies_in_rows = a.column_stride() == 1;
        let values = if lies_in_rows { a } else { a.transposed() };
        let (rows, columns, words) = (values.rows(), values.columns(), row_words(values.columns()));
        buffer.reshape(&self.buffers, 2 * rows, words);
        let target = buffer.target();
        self.each_block(rows, columns, |block| {
            for row in block {
                // SAFETY: each row is written once.
                let [high, rest] = [row, rows + row].map(|row| halves_mut(unsafe { target.row(row, 0..words) }));
                high[columns..].fill(bf16::ZERO);
                rest[columns..].fill(bf16::ZERO);
                split_row(self.set, values.row(row), high, rest);
            }
        });
        let (high, rest) = buffer.values().split_at(rows * words);
        let halves = [high, rest].map(|words_of_half| {
            // SAFETY: any bits are a bf16.
            let halves = View::new(unsafe { words_of_half.align_to().1 }, rows, columns, 2 * words);
            if lies_in_rows { halves } else { halves.transposed() }
        });
        SplitView { halves }
    }
}

fn halves_mut(words: &mut [f32]) -> &mut [bf16] {
    // SAFETY: any bits are a value of each type.
    unsafe { words.align_to_mut().1 }
}

/// A value in two. Of one whose nearest bf16 is not finite nothing is left; times zero that is no number, so that a
/// product which overflows in f32 may be none here.
#[inline(always)]
fn split(value: f32) -> [bf16; 2] {
    let high = nearest(value);
    let left = value - high.widen();
    [high, if left.is_finite() { nearest(left) } else { bf16::ZERO }]
}

multiversion! {
    /// Splits values.
    fn split_row(values: &[f32], high: &mut [bf16], rest: &mut [bf16]) {
        for ((value, high), rest) in values.iter().zip(high).zip(rest) {
            [*high, *rest] = split(*value);
        }
    }
}
