//! Projections of what was prepared once for several of them: the product with the weight, and an adapter in f32 beside
//! it.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use profile::Work;

use super::super::operand::OperandBuffer;
use super::super::product::{View, ViewMut};
use super::super::weight::Sense;
use super::super::{Cpu, Tensor, norm};
use super::prepared::{Input, Prepared, Wanted};
use crate::adapter::{Lora, Projection};
use crate::blocks::Norm;
use crate::blocks::composed::{PostNormSaved, add_branch};
use crate::ops::{Ops, Result, Write};
use crate::parameter::Parameter;
use crate::random::Draws;

/// Whether the fused blocks compute this projection. Not with magnitudes of its own (DoRA): then a second product with
/// the weight may be in the middle of it. Nor where its product reads another input than an adapter beside it.
pub(super) fn is_covered(projection: &Projection<Cpu>) -> bool {
    projection.is_sum()
}

/// Whether the forward of a projection reads its input in f32.
pub(super) fn reads_values(projection: &Projection<Cpu>) -> bool {
    projection.lora.is_some()
}

impl Cpu {
    /// The norm of the residual stream, which is copied to `input` on the way where something is to keep it.
    pub(super) fn normed(
        &self,
        norm: &Norm<Self>,
        x: &Tensor,
        wanted: Wanted,
        input: Option<&mut Tensor>,
        inverse_rms: &mut Tensor,
    ) -> Prepared {
        let _kernel = self.profile.kernel("norm", || Work::values(2 * x.rows() * x.columns()));
        let (rows, columns) = (x.rows(), x.columns());
        let input = input.map(|input| {
            input.reshape(&self.buffers, rows, columns);
            input.target()
        });
        inverse_rms.reshape(&self.buffers, rows, 1);
        let inverse_rms = inverse_rms.target();
        self.prepared_rows(rows, columns, wanted, |row, y| {
            let x = x.view().row(row);
            if let Some(input) = input {
                // SAFETY: each row is written once.
                unsafe { input.row(row, 0..columns) }.copy_from_slice(x);
            }
            // SAFETY: as above.
            let inverse_rms = unsafe { inverse_rms.row(row, 0..1) };
            norm::forward(self.set, x, norm.weight.value.values(), norm.rms, y, inverse_rms);
        })
    }

    /// The norm of what [`Cpu::normed`] has kept, in f32.
    pub(super) fn normed_again(&self, norm: &Norm<Self>, input: &Tensor) -> Result<Tensor> {
        let mut normed = Tensor::default();
        norm.forward(self, input, &mut normed, &mut Tensor::default())?;
        Ok(normed)
    }

    /// `y (+)= Wx + bias`, and what the adapter adds; `low_rank` is kept for the backward.
    pub(super) fn project(
        &self,
        projection: &Projection<Self>,
        x: Input<'_>,
        draws: Option<Draws<'_>>,
        write: Write,
        mut y: ViewMut<'_>,
        low_rank: &mut Tensor,
    ) -> Result {
        let bias = projection.bias.as_ref().map(|bias| bias.value.values());
        self.weight_product(x.operand, &projection.matrix.weight, Sense::Forward, bias, write, y.reborrow());
        if let Some(lora) = &projection.lora {
            self.project_low(lora, x, draws, low_rank);
            self.product(lora.scaling, low_rank.view(), lora.b.value.view().transposed(), Write::Add, y);
        }
        Ok(())
    }

    /// `Ax` of an adapter, `[rows, rank]`.
    pub(super) fn project_low(&self, lora: &Lora<Self>, x: Input<'_>, draws: Option<Draws<'_>>, low_rank: &mut Tensor) {
        let dropped = self.dropped(lora, x.values(), draws);
        let x = dropped.as_ref().map_or(x.values(), Tensor::view);
        low_rank.reshape(&self.buffers, x.rows(), lora.down().rows());
        self.product(1.0, x, lora.down().view().transposed(), Write::Replace, low_rank.view_mut());
    }

    /// Projects the output of a branch and adds it to the residual stream, through the branch's norm where it has one.
    #[expect(clippy::too_many_arguments, reason = "the end of a block and what it keeps")]
    pub(super) fn add_projected(
        &self,
        projection: &Projection<Self>,
        post_norm: Option<&Norm<Self>>,
        branch: Input<'_>,
        draws: Option<Draws<'_>>,
        x: &mut Tensor,
        low_rank: &mut Tensor,
        saved: &mut PostNormSaved<Tensor>,
    ) -> Result {
        if post_norm.is_none() {
            return self.project(projection, branch, draws, Write::Add, x.view_mut(), low_rank);
        }
        let mut y = self.shaped(x.rows(), x.columns());
        self.project(projection, branch, draws, Write::Replace, y.view_mut(), low_rank)?;
        add_branch(self, post_norm, y, x, saved)
    }

    /// What dropout leaves of an adapter's input; none where it is all of it.
    fn dropped(&self, lora: &Lora<Self>, x: View<'_>, draws: Option<Draws<'_>>) -> Option<Tensor> {
        let mask = lora.mask(draws)?;
        let mut dropped = self.shaped(x.rows(), x.columns());
        self.drop_elements(x, &mask, 1.0, Write::Replace, &mut dropped);
        Some(dropped)
    }

    /// Adds the gradients of what is trained in a projection and, where `dx` is given, writes that of the input,
    /// `[rows, in]`.
    ///
    /// `x` is the projection's input in f32, and is given where something is trained.
    pub(super) fn project_backward(
        &self,
        projection: &mut Projection<Self>,
        low_rank: &Tensor,
        x: Option<View<'_>>,
        draws: Option<Draws<'_>>,
        dy: Input<'_>,
        dx: Option<(Write, &mut Tensor)>,
    ) -> Result {
        let of_low_rank = self.project_gradients(projection, low_rank, x, draws, dy, dx.is_some());
        let Some((write, dx)) = dx else { return Ok(()) };
        self.weight_product(dy.operand, &projection.matrix.weight, Sense::Backward, None, write, dx.view_mut());
        let (Some(lora), Some(of_low_rank)) = (&projection.lora, of_low_rank) else { return Ok(()) };
        let Some(mask) = lora.mask(draws) else {
            self.product(1.0, of_low_rank.view(), lora.down().view(), Write::Add, dx.view_mut());
            return Ok(());
        };
        let mut of_dropped = self.shaped(dx.rows(), dx.columns());
        self.product(1.0, of_low_rank.view(), lora.down().view(), Write::Replace, of_dropped.view_mut());
        self.dropout(&of_dropped, &mask, 1.0, Write::Add, dx)
    }

    /// Adds the gradients of what is trained in a projection. Returns that of `Ax` of its adapter, if it has one and
    /// that is needed.
    ///
    /// With `t = Ax`: `dB += s · dyᵀt`, `dt = s · dy B`, `dA += dtᵀx`; then `dx += dt A`.
    pub(super) fn project_gradients(
        &self,
        projection: &mut Projection<Self>,
        low_rank: &Tensor,
        x: Option<View<'_>>,
        draws: Option<Draws<'_>>,
        dy: Input<'_>,
        input_gradient_is_needed: bool,
    ) -> Option<Tensor> {
        let x = || x.expect("what is trained is given its input");
        if let Some((_, Some(gradient))) = projection.bias.as_mut().map(Parameter::split) {
            self.add_sums_of_columns(dy.values(), gradient);
        }
        if let (_, Some(gradient)) = projection.matrix.split() {
            self.add_weight_gradient(Some(dy.operand), dy.values, x(), gradient);
        }
        let lora = projection.lora.as_mut()?;
        let (dy, scaling) = (dy.values(), lora.scaling);
        let dropped = lora.a.is_trained().then(|| self.dropped(lora, x(), draws)).flatten();
        if let (_, Some(gradient)) = lora.b.split() {
            // Transposed: its columns are too few to fill vectors.
            let mut transposed = self.shaped(low_rank.columns(), dy.columns());
            self.product(scaling, low_rank.view().transposed(), dy, Write::Replace, transposed.view_mut());
            self.add_transposed(&transposed, gradient);
        }
        if !lora.a.is_trained() && !input_gradient_is_needed {
            return None;
        }
        let mut of_low_rank = self.shaped(dy.rows(), lora.b.value.columns());
        self.product(scaling, dy, lora.b.value.view(), Write::Replace, of_low_rank.view_mut());
        let (_, a_gradient) = lora.a.split();
        if let Some(gradient) = a_gradient {
            let x = dropped.as_ref().map_or_else(x, Tensor::view);
            self.product(1.0, of_low_rank.view().transposed(), x, Write::Add, gradient.view_mut());
        }
        Some(of_low_rank)
    }

    /// A tensor as a projection reads it.
    pub(super) fn input_of<'a>(&self, x: &'a Tensor, buffer: &'a mut OperandBuffer) -> Input<'a> {
        Input { operand: self.operand(x.view(), buffer), values: Some(x.view()) }
    }
}
