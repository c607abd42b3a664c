//! Quantised weights as right operands: widened on their way into a panel, to the bits that a product with the
//! dequantised weight reads.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use half::bf16;

use super::PairsRight;
use super::{Finish, InstructionSet, Right, Target, View, few_rows};
use crate::cpu::instructions::multiversion;
use crate::cpu::rounding::round_within_f32;
use crate::cpu::rounding::{nearest, round};
use crate::cpu::scratch::with_buffers;
use crate::ops::Compute;

/// Columns that are dequantised together for few rows.
const FEW_COLUMNS: usize = 16;

/// A weight `[out, in]` in blocks. A format in blocks is one of these, beside its codec in [`crate::weights`].
pub(in crate::cpu) trait BlockWeight: Send + Sync {
    /// Rows and columns: outputs and inputs.
    fn shape(&self) -> [usize; 2];

    /// Its size.
    fn bytes(&self) -> usize;

    /// The fingerprint of its bits.
    fn fingerprint(&self) -> u64;

    /// Row `row`, times a factor.
    fn copy_row(&self, row: usize, factor: f32, target: &mut [f32]);

    /// Dequantises a part, whose first element goes to the first of the target.
    fn widen(&self, set: InstructionSet, part: WeightBlock, target: &mut [f32]);

    /// Dequantises a part to pairs of bf16, as the set multiplies them: the two elements that make a word lie behind
    /// one another in a row where columns are contiguous, and in a column where rows are. `false` where it has no
    /// way of its own to do so, and nothing was written.
    fn widen_pairs(&self, _set: InstructionSet, _part: WeightBlock, _words: &mut [u32]) -> bool {
        false
    }

    /// Dequantises whole rows to bf16. `false` where it has no way of its own to do so, and nothing was written.
    fn widen_halves(&self, _set: InstructionSet, _rows: Range<usize>, _halves: &mut [bf16]) -> bool {
        false
    }
}

/// Some rows and columns of a weight, and how they come to lie.
#[derive(Clone)]
pub(in crate::cpu) struct WeightBlock {
    /// Rows.
    pub rows: Range<usize>,
    /// Columns.
    pub columns: Range<usize>,
    /// What lies contiguously.
    pub order: Order,
    /// From a row, or column, to the next.
    pub stride: usize,
}

/// What lies contiguously.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum Order {
    /// The elements of a row.
    Rows,
    /// The elements of a column.
    Columns,
}

/// A weight in blocks as the right operand of a product in some dtype, either way.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Widened<'a> {
    weight: &'a dyn BlockWeight,
    set: InstructionSet,
    compute: Compute,
    /// [`Order::Rows`]: the weight itself. [`Order::Columns`]: it transposed.
    order: Order,
    first_column: usize,
    columns: usize,
}

impl<'a> Widened<'a> {
    /// The weight, or it transposed, in the dtype that is computed in.
    pub(in crate::cpu) fn new(
        weight: &'a dyn BlockWeight,
        set: InstructionSet,
        compute: Compute,
        order: Order,
    ) -> Self {
        let [out_features, in_features] = weight.shape();
        let columns = match order {
            Order::Rows => in_features,
            Order::Columns => out_features,
        };
        Self { weight, set, compute, order, first_column: 0, columns }
    }

    /// Writes rows `inner` of some columns to `[inner][stride]`, in f32 and not rounded.
    fn widen(self, inner: Range<usize>, columns: Range<usize>, stride: usize, target: &mut [f32]) {
        self.weight.widen(self.set, self.part(inner, columns, stride), target);
    }

    /// The part of the weight that rows `inner` of some columns are.
    fn part(self, inner: Range<usize>, columns: Range<usize>, stride: usize) -> WeightBlock {
        assert!(columns.end <= self.columns && inner.end <= self.rows(), "a part of the operand");
        let (rows, columns) = match self.order {
            Order::Rows => (inner, self.own(&columns)),
            Order::Columns => (self.own(&columns), inner),
        };
        WeightBlock { rows, columns, order: self.order, stride }
    }

    /// The columns in blocks of those that are stored together, so that none is dequantised twice.
    fn few_columns(self) -> impl Iterator<Item = Range<usize>> {
        let ends = (self.first_column / FEW_COLUMNS + 1..).map(move |block| block * FEW_COLUMNS - self.first_column);
        let mut first = 0;
        ends.map_while(move |end| {
            let columns = first..end.min(self.columns);
            first = end;
            (!columns.is_empty()).then_some(columns)
        })
    }

    /// Writes some columns as the rows of a matrix, in f32 and not rounded.
    fn widen_columns(self, columns: &Range<usize>, values: &mut [f32]) {
        let inner = self.rows();
        let own = self.own(columns);
        let (rows, of_rows, order) = match self.order {
            Order::Columns => (own, 0..inner, Order::Rows),
            Order::Rows => (0..inner, own, Order::Columns),
        };
        self.weight.widen(self.set, WeightBlock { rows, columns: of_rows, order, stride: inner }, values);
    }

    /// Some columns, as the weight counts them.
    fn own(self, columns: &Range<usize>) -> Range<usize> {
        self.first_column + columns.start..self.first_column + columns.end
    }
}

impl Right for Widened<'_> {
    fn rows(self) -> usize {
        let [out_features, in_features] = self.weight.shape();
        match self.order {
            Order::Rows => out_features,
            Order::Columns => in_features,
        }
    }

    fn columns(self) -> usize {
        self.columns
    }

    fn column_range(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.columns, "columns {columns:?} of {}", self.columns);
        Self { first_column: self.first_column + columns.start, columns: columns.len(), ..self }
    }

    fn strides(self) -> (usize, usize) {
        let [_, in_features] = self.weight.shape();
        match self.order {
            Order::Rows => (in_features, 1),
            Order::Columns => (1, in_features),
        }
    }

    unsafe fn pack(
        self,
        set: InstructionSet,
        inner: Range<usize>,
        columns: Range<usize>,
        width: usize,
        panel: &mut [f32],
    ) {
        let (steps, count) = (inner.len(), columns.len());
        let panel = &mut panel[..steps * width];
        if count < width {
            panel.chunks_exact_mut(width).for_each(|step| step[count..].fill(0.0));
        }
        self.widen(inner, columns, width, panel);
        if self.compute == Compute::Bf16 {
            /// Values that are rounded before the next.
            const PIECE: usize = 256;
            for piece in panel.chunks_mut(PIECE) {
                let mut values = [0.0; PIECE];
                values[..piece.len()].copy_from_slice(piece);
                round_within_f32(set, &values[..piece.len()], piece);
            }
        }
    }

    unsafe fn few_rows(self, set: InstructionSet, a: View<'_>, finish: Finish<'_>, c: Target<'_>) {
        let inner = self.rows();
        with_buffers([FEW_COLUMNS * inner, FEW_COLUMNS * inner], |buffers| {
            for columns in self.few_columns() {
                // SAFETY: each buffer has as many values for each of up to so many columns, and is this closure's own.
                let [values, rounded] =
                    buffers.map(|buffer| unsafe { std::slice::from_raw_parts_mut(buffer, columns.len() * inner) });
                self.widen_columns(&columns, values);
                let values = match self.compute {
                    Compute::F32 => values,
                    Compute::Bf16 => {
                        round_within_f32(set, values, rounded);
                        rounded
                    }
                };
                let b = View::new(values, columns.len(), inner, inner).transposed();
                let (finish, c) = (finish.of_columns(columns.clone()), c.offset(0, columns.start));
                // SAFETY: the caller vouches for `c`, of which these are some columns.
                unsafe { few_rows::of_floats(set, a, b, finish, c) };
            }
        });
    }
}

impl PairsRight for Widened<'_> {
    unsafe fn pack_pairs(
        self,
        _: InstructionSet,
        inner: Range<usize>,
        columns: Range<usize>,
        width: usize,
        panel: &mut [u32],
    ) {
        /// Words that are made before the next; of columns as many as the widest panel has.
        const WORDS: usize = 16;
        const COLUMNS: usize = 48;
        assert!(columns.len() <= COLUMNS, "columns of a panel");
        let panel = &mut panel[..inner.len() * width];
        let mut values = [0.0; 2 * WORDS * COLUMNS];
        for (first, words) in inner.step_by(WORDS).zip(panel.chunks_mut(WORDS * width)) {
            let rows = 2 * first..self.rows().min(2 * first + 2 * words.len() / width);
            if columns.len() == width
                && self.weight.widen_pairs(self.set, self.part(rows.clone(), columns.clone(), width), words)
            {
                continue;
            }
            let values = &mut values[..2 * words.len()];
            // The last word of an odd number of rows has no second half, and what pads the columns is zero.
            if columns.len() < width || rows.len() * width < values.len() {
                values.fill(0.0);
            }
            self.widen(rows, columns.clone(), width, values);
            join_pairs(self.set, values, width, words);
        }
    }

    unsafe fn few_rows_of_pairs(self, set: InstructionSet, a: View<'_, bf16>, finish: Finish<'_>, c: Target<'_>) {
        let inner = self.rows();
        with_buffers([FEW_COLUMNS * inner, FEW_COLUMNS * inner.div_ceil(2)], |[values, rounded]| {
            for columns in self.few_columns() {
                let length = columns.len() * inner;
                // SAFETY: there are as many values, and halves, for each of up to so many columns; any bits are a value
                // of each type. Both are this closure's own.
                let (values, rounded) = unsafe {
                    let rounded = std::slice::from_raw_parts_mut(rounded.cast::<bf16>(), length);
                    (std::slice::from_raw_parts_mut(values, length), rounded)
                };
                let is_looked_up =
                    self.order == Order::Columns && self.weight.widen_halves(self.set, self.own(&columns), rounded);
                if !is_looked_up {
                    self.widen_columns(&columns, values);
                    round(set, values, rounded);
                }
                let b = View::new(rounded, columns.len(), inner, inner).transposed();
                let (finish, c) = (finish.of_columns(columns.clone()), c.offset(0, columns.start));
                // SAFETY: the caller vouches for `c`, of which these are some columns, and for the machine.
                unsafe { few_rows::of_pairs(set, a, b, finish, c) };
            }
        });
    }
}

multiversion! {
    /// Rounds two rows after the other to the halves of a row of words.
    fn join_pairs(values: &[f32], width: usize, words: &mut [u32]) {
        for (rows, words) in values.chunks_exact(2 * width).zip(words.chunks_exact_mut(width)) {
            let (low, high) = rows.split_at(width);
            for ((word, low), high) in words.iter_mut().zip(low).zip(high) {
                *word = u32::from(nearest(*low).to_bits()) | u32::from(nearest(*high).to_bits()) << 16;
            }
        }
    }
}
