//! The optimizers over all elements of a tensor, cut over threads.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use super::product::Target;
use super::{Cpu, Tensor, pointwise};
use crate::ops::{AdamWStep, SgdStep};

impl Cpu {
    /// One AdamW update; see [`crate::ops::Ops::adamw`].
    pub(super) fn adamw_update(
        &self,
        step: &AdamWStep,
        value: &mut Tensor,
        gradient: &Tensor,
        exp_avg: &mut Tensor,
        exp_avg_sq: &mut Tensor,
    ) {
        let gradient = gradient.values();
        let (exp_avg, exp_avg_sq) = (Target::new(exp_avg.values_mut(), 1), Target::new(exp_avg_sq.values_mut(), 1));
        self.each_rows(value.values_mut(), 1, |first, value| {
            let piece = first..first + value.len();
            // SAFETY: pieces do not overlap.
            let (exp_avg, exp_avg_sq) = unsafe { (exp_avg.row(0, piece.clone()), exp_avg_sq.row(0, piece.clone())) };
            pointwise::adamw(self.set, *step, value, &gradient[piece], exp_avg, exp_avg_sq);
        });
    }

    /// One update by gradient descent; see [`crate::ops::Ops::sgd`].
    pub(super) fn sgd_update(
        &self,
        step: &SgdStep,
        value: &mut Tensor,
        gradient: &Tensor,
        momentum_buffer: &mut Tensor,
    ) {
        let gradient = gradient.values();
        let has_buffer = step.momentum != 0.0;
        let buffer = Target::new(momentum_buffer.values_mut(), 1);
        self.each_rows(value.values_mut(), 1, |first, value| {
            let piece = first..first + value.len();
            // SAFETY: pieces do not overlap.
            let buffer = if has_buffer { unsafe { buffer.row(0, piece.clone()) } } else { &mut [] };
            pointwise::sgd(self.set, *step, value, &gradient[piece], buffer);
        });
    }
}
