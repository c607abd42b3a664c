//! What several products read: computed row by row, and rounded once for all of them while a row is in cache.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use half::bf16;

use super::super::operand::{Operand, OperandBuffer, OperandTarget};
use super::super::product::{Target, View};
use super::super::{Cpu, Tensor};
use crate::ops::Compute;

/// Rows that a thread does one after the other have about so many values.
const BLOCK_VALUES: usize = 8192;

/// Which forms of a matrix are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// What products with weights read.
    Operand,
    /// That, and the values in f32, which adapters and the gradients of weights read.
    OperandAndValues,
}

impl Wanted {
    /// The values too, if something reads them.
    pub(super) fn with_values(are_read: bool) -> Self {
        if are_read { Self::OperandAndValues } else { Self::Operand }
    }
}

/// The left operand of a projection, forward or backward.
#[derive(Clone, Copy)]
pub(super) struct Input<'a> {
    /// What products with weights read.
    pub operand: Operand<'a>,
    /// In f32, where something reads them.
    pub values: Option<View<'a>>,
}

impl<'a> Input<'a> {
    /// The values in f32, which were wanted.
    pub(super) fn values(self) -> View<'a> {
        self.values.expect("what reads the values has wanted them")
    }

    /// Some of its rows.
    pub(super) fn row_range(self, rows: Range<usize>) -> Self {
        let values = self.values.map(|values| values.row_range(rows.clone()));
        Self { operand: self.operand.row_range(rows), values }
    }
}

/// A matrix in the forms that products read.
#[derive(Default)]
pub(super) struct Prepared {
    /// In f32; empty where only the rounded form is wanted.
    values: Tensor,
    /// Rounded; none where f32 is computed in.
    rounded: Option<OperandBuffer>,
}

impl Prepared {
    /// As a projection reads it.
    pub(super) fn input(&self) -> Input<'_> {
        let values = (!self.values.values().is_empty()).then(|| self.values.view());
        let operand = match &self.rounded {
            Some(rounded) => rounded.operand(),
            None => Operand::F32(self.values.view()),
        };
        Input { operand, values }
    }
}

/// Where several threads write the rows of a [`Prepared`].
#[derive(Clone, Copy)]
pub(super) struct PreparedTarget<'a> {
    columns: usize,
    values: Option<Target<'a>>,
    rounded: Option<OperandTarget<'a>>,
}

impl<'a> PreparedTarget<'a> {
    /// Writes a row that `produce` computes.
    ///
    /// # Safety
    /// Nobody else touches this row meanwhile.
    unsafe fn produce(self, row: usize, scratch: &mut Vec<f32>, produce: impl FnOnce(&mut [f32])) {
        let values = match self.values {
            // SAFETY: the caller vouches for the row.
            Some(values) => unsafe { values.row(row, 0..self.columns) },
            None => {
                scratch.resize(self.columns, 0.0);
                &mut scratch[..]
            }
        };
        produce(values);
        if let Some(rounded) = self.rounded {
            // SAFETY: as above.
            unsafe { rounded.write(row, 0, values) };
        }
    }

    /// Columns of a row where they are wanted in bf16 alone and two of them are a word: the caller rounds them.
    ///
    /// # Safety
    /// Nobody else touches these columns meanwhile, nor those of the same words.
    pub(super) unsafe fn halves(self, row: usize, columns: Range<usize>) -> Option<&'a mut [bf16]> {
        match (self.values, self.rounded) {
            // SAFETY: the caller vouches for the row.
            (None, Some(rounded)) => unsafe { rounded.halves(row, columns) },
            _ => None,
        }
    }

    /// Writes columns of a row, from one on.
    ///
    /// # Safety
    /// Nobody else touches this row meanwhile.
    pub(super) unsafe fn write(self, row: usize, first_column: usize, values: &[f32]) {
        if let Some(target) = self.values {
            // SAFETY: the caller vouches for the row.
            unsafe { target.row(row, first_column..first_column + values.len()) }.copy_from_slice(values);
        }
        if let Some(rounded) = self.rounded {
            // SAFETY: as above.
            unsafe { rounded.write(row, first_column, values) };
        }
    }
}

impl Cpu {
    /// Gives a prepared matrix a shape and its rows a place.
    pub(super) fn prepared_target<'a>(
        &self,
        rows: usize,
        columns: usize,
        wanted: Wanted,
        prepared: &'a mut Prepared,
    ) -> PreparedTarget<'a> {
        let Prepared { values, rounded } = prepared;
        *rounded = (self.compute == Compute::Bf16).then(OperandBuffer::default);
        let rounded = rounded.as_mut().map(|rounded| self.operand_target(rows, columns, rounded));
        let in_f32 = rounded.is_none() || wanted == Wanted::OperandAndValues;
        let values = in_f32.then(|| {
            values.reshape(&self.buffers, rows, columns);
            values.target()
        });
        PreparedTarget { columns, values, rounded }
    }

    /// A matrix of which `produce` computes each row, over the threads.
    pub(super) fn prepared_rows(
        &self,
        rows: usize,
        columns: usize,
        wanted: Wanted,
        produce: impl Fn(usize, &mut [f32]) + Sync + Send,
    ) -> Prepared {
        let mut prepared = Prepared::default();
        let target = self.prepared_target(rows, columns, wanted, &mut prepared);
        self.each_block(rows, columns, |rows| {
            let mut scratch = Vec::new();
            for row in rows {
                // SAFETY: each row is written once.
                unsafe { target.produce(row, &mut scratch, |values| produce(row, values)) };
            }
        });
        prepared
    }

    /// Runs a function for blocks of rows of so many columns, over the threads.
    pub(in crate::cpu) fn each_block(&self, rows: usize, columns: usize, run: impl Fn(Range<usize>) + Sync + Send) {
        let block = (BLOCK_VALUES / columns.max(1)).max(1);
        self.each(rows.div_ceil(block), rows * columns, |part| run(part * block..rows.min((part + 1) * block)));
    }
}
