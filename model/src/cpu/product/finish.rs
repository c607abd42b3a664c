//! What becomes of the sums of a product.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use super::Target;
use crate::ops::Write;

/// What becomes of sums: `c (+)= scale · sum (+ bias)`.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Finish<'a> {
    /// Factor on the sums.
    pub scale: f32,
    /// A number for each column.
    pub bias: Option<&'a [f32]>,
    /// Whether the result is added to what is there.
    pub write: Write,
}

impl Finish<'_> {
    /// That of some columns.
    pub(in crate::cpu) fn of_columns(self, columns: Range<usize>) -> Self {
        Self { bias: self.bias.map(|bias| &bias[columns]), ..self }
    }

    /// That of sums over a later block of the inner dimension.
    pub(super) fn later(self) -> Self {
        Self { bias: None, write: Write::Add, ..self }
    }

    /// Finishes the sums of some columns of one row.
    #[inline(always)]
    pub(in crate::cpu) fn row(self, sums: &[f32], target: &mut [f32]) {
        match self.write {
            Write::Replace => target.iter_mut().zip(sums).for_each(|(element, sum)| *element = self.scale * sum),
            Write::Add => target.iter_mut().zip(sums).for_each(|(element, sum)| *element += self.scale * sum),
        }
        if let Some(bias) = self.bias {
            target.iter_mut().zip(bias).for_each(|(element, bias)| *element += bias);
        }
    }

    /// Finishes sums of nothing.
    ///
    /// # Safety
    /// Nobody else may read or write these elements meanwhile.
    pub(super) unsafe fn nothing(self, rows: usize, columns: usize, c: Target<'_>) {
        for row in 0..rows {
            // SAFETY: the caller vouches for them.
            self.row(&vec![0.0; columns], unsafe { c.row(row, 0..columns) });
        }
    }
}
