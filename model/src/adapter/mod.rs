//! A projection: a weight, perhaps a bias, perhaps a low-rank adapter on top. This is where LoRA enters.
//!
//! Adapters as files, and their settings, are in [`crate::peft`].

mod dora;
mod lora;
mod token_rows;

pub use dora::Dora;
pub(crate) use dora::row_norms;
pub use lora::{Dropout, Lora};
pub use token_rows::{EmbeddingRows, TokenRows};

use std::collections::BTreeMap;

use crate::blocks::{AdapterRows, OfRows};
use crate::ops::{Linear, Ops, Result, Write};
use crate::parameter::{Matrix, Parameter};
use crate::random::Draws;
use crate::weights::FakeQuantization;

/// `y = Wx + bias (+ adapter)`.
pub struct Projection<B: Ops> {
    /// W.
    pub matrix: Matrix<B>,
    /// The bias, `[1, out]`.
    pub bias: Option<Parameter<B>>,
    /// The adapter.
    pub lora: Option<Lora<B>>,
    /// Adapters by number, each of which some rows of a pass may have.
    pub residents: BTreeMap<usize, Lora<B>>,
    /// That of the weight, where the layer stands in for one of few bits: the weight that products read is on its
    /// grids then, and they read the input moved to the 8-bit grids of its tokens. An adapter reads the input as
    /// it is.
    ///
    /// Source: torchao's `FakeQuantizedLinear`, torchtune's `QATLoRALinear`.
    pub fake_quantization: Option<FakeQuantization>,
}

/// What a projection's backward needs besides its input.
pub struct ProjectionSaved<T> {
    /// `Ax`, `[rows, rank]`; empty without an adapter.
    pub low_rank: T,
    /// `Wx + s·B(Ax)`, `[rows, out]`, of a DoRA adapter; else empty.
    pub direction: T,
}

impl<T: Default> Default for ProjectionSaved<T> {
    fn default() -> Self {
        Self { low_rank: T::default(), direction: T::default() }
    }
}

/// A projection, where its result goes, and what its backward needs.
pub type OfProjection<'a, B> =
    (&'a Projection<B>, &'a mut <B as Ops>::Tensor, &'a mut ProjectionSaved<<B as Ops>::Tensor>);

impl<B: Ops> Projection<B> {
    /// One without adapters.
    pub fn new(matrix: Matrix<B>, bias: Option<Parameter<B>>) -> Self {
        Self { matrix, bias, lora: None, residents: BTreeMap::new(), fake_quantization: None }
    }

    /// The module's own name: `q_proj` of `model.layers.0.self_attn.q_proj.weight`.
    pub fn module(&self) -> &str {
        self.path().rsplit_once('.').map_or(self.path(), |(_, module)| module)
    }

    /// The module's full name: `model.layers.0.self_attn.q_proj`.
    pub fn path(&self) -> &str {
        self.matrix.name.strip_suffix(".weight").unwrap_or(&self.matrix.name)
    }

    /// Whether the backward reads the input: something here is trained.
    pub fn is_trained(&self) -> bool {
        self.lora.as_ref().is_some_and(Lora::is_trained)
            || self.matrix.is_trained()
            || self.bias.as_ref().is_some_and(Parameter::is_trained)
    }

    /// Prepares what follows from trained values again, after they changed.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn refresh(&mut self, ops: &B) -> Result {
        self.matrix.refresh(ops, self.fake_quantization)?;
        match &mut self.lora {
            Some(lora) => lora.refresh(ops, &self.matrix),
            None => Ok(()),
        }
    }

    /// `y (+)= Wx + bias`, and what the adapters add; with draws, dropout acts on the adapter's input.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn forward(
        &self,
        ops: &B,
        x: &B::Tensor,
        OfRows { draws, adapters }: OfRows<'_>,
        write: Write,
        y: &mut B::Tensor,
        saved: &mut ProjectionSaved<B::Tensor>,
    ) -> Result {
        self.forward_all(ops, x, draws, write, y, saved)?;
        self.add_residents(ops, x, adapters, y)
    }

    /// [`Projection::forward`] of several projections of one input, which replace their results: their products are
    /// computed together where nothing comes between a product and the next.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn forward_each<const COUNT: usize>(
        ops: &B,
        x: &B::Tensor,
        of_rows: OfRows<'_>,
        mut each: [OfProjection<'_, B>; COUNT],
    ) -> Result {
        if !each.iter().all(|(projection, ..)| projection.is_sum()) {
            let mut each = each.into_iter();
            return each
                .try_for_each(|(projection, y, saved)| projection.forward(ops, x, of_rows, Write::Replace, y, saved));
        }
        let products = each.iter_mut().map(|(projection, y, _)| Linear {
            weight: &projection.matrix.weight,
            bias: projection.bias.as_ref().map(|bias| &bias.value),
            y: &mut **y,
        });
        ops.linear_each(x, products.collect())?;
        each.into_iter().try_for_each(|(projection, y, saved)| {
            projection.add_adapter(ops, x, of_rows.draws, y, saved)?;
            projection.add_residents(ops, x, of_rows.adapters, y)
        })
    }

    /// Whether the result is a product of the input with the weight and what adapters add to it: with no magnitudes of
    /// its own (DoRA), and no product that reads another input than an adapter beside it.
    pub(crate) fn is_sum(&self) -> bool {
        self.fake_quantization.is_none() && self.lora.as_ref().is_none_or(|lora| lora.dora.is_none())
    }

    /// What the rows have in common: all but what residents add.
    fn forward_all(
        &self,
        ops: &B,
        x: &B::Tensor,
        draws: Option<Draws<'_>>,
        write: Write,
        y: &mut B::Tensor,
        saved: &mut ProjectionSaved<B::Tensor>,
    ) -> Result {
        let bias = self.bias.as_ref().map(|bias| &bias.value);
        let mut moved = B::Tensor::default();
        let input = match self.fake_quantization {
            None => x,
            Some(_) => {
                ops.fake_quantize_rows(x, &mut moved)?;
                &moved
            }
        };
        if let Some(lora) = &self.lora
            && let Some(dora) = &lora.dora
        {
            return dora.forward(ops, (&self.matrix, bias, lora), x, draws, write, (y, saved));
        }
        ops.linear(input, &self.matrix.weight, bias, write, y)?;
        self.add_adapter(ops, x, draws, y, saved)
    }

    /// `y +=` what the adapter of all rows adds, if there is one.
    fn add_adapter(
        &self,
        ops: &B,
        x: &B::Tensor,
        draws: Option<Draws<'_>>,
        y: &mut B::Tensor,
        saved: &mut ProjectionSaved<B::Tensor>,
    ) -> Result {
        let Some(lora) = &self.lora else { return Ok(()) };
        match lora.mask(draws) {
            None => lora.forward(ops, x, y, saved),
            Some(mask) => {
                let mut dropped = B::Tensor::default();
                ops.dropout(x, &mask, 1.0, Write::Replace, &mut dropped)?;
                lora.forward(ops, &dropped, y, saved)
            }
        }
    }

    /// `y +=` what adapters of some rows add.
    fn add_residents(&self, ops: &B, x: &B::Tensor, adapters: &[AdapterRows], y: &mut B::Tensor) -> Result {
        for AdapterRows { rows, adapter } in adapters {
            if let Some(lora) = self.residents.get(adapter) {
                ops.add_low_rank(x, rows.clone(), (&lora.a.value, &lora.b.value, lora.scaling), y)?;
            }
        }
        Ok(())
    }

    /// Adds the gradients of what is trained here and, where `dx` is given, writes that of the input. `draws` are the
    /// forward's.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn backward(
        &mut self,
        ops: &B,
        saved: &ProjectionSaved<B::Tensor>,
        x: &B::Tensor,
        draws: Option<Draws<'_>>,
        dy: &B::Tensor,
        mut dx: Option<(Write, &mut B::Tensor)>,
    ) -> Result {
        if let Some((_, Some(gradient))) = self.bias.as_mut().map(Parameter::split) {
            ops.add_column_sums(dy, gradient)?;
        }
        let Self { matrix, lora, fake_quantization, .. } = self;
        let of_product = match fake_quantization {
            None => Matrix::backward,
            Some(_) => Matrix::backward_on_grids,
        };
        let Some(lora) = lora else { return of_product(matrix, ops, x, dy, dx) };
        if lora.dora.is_some() {
            return dora::backward(ops, matrix, lora, saved, (x, draws), dy, dx);
        }
        of_product(matrix, ops, x, dy, dx.as_mut().map(|(write, dx)| (*write, &mut **dx)))?;
        let into = dx.map(|(_, dx)| dx);
        let Some(mask) = lora.mask(draws) else {
            return lora.backward(ops, saved, x, dy, into.map(|dx| (Write::Add, dx)));
        };
        let [mut dropped, mut of_dropped] = <[B::Tensor; 2]>::default();
        ops.dropout(x, &mask, 1.0, Write::Replace, &mut dropped)?;
        let of_input = into.is_some().then_some((Write::Replace, &mut of_dropped));
        lora.backward(ops, saved, &dropped, dy, of_input)?;
        match into {
            Some(dx) => ops.dropout(&of_dropped, &mask, 1.0, Write::Add, dx),
            None => Ok(()),
        }
    }
}

impl<B: Ops> Matrix<B> {
    /// The backward of `y = Wx`: adds W's gradient where it is trained and, where `dx` is given, writes that of the
    /// input.
    fn backward(&mut self, ops: &B, x: &B::Tensor, dy: &B::Tensor, dx: Option<(Write, &mut B::Tensor)>) -> Result {
        let (weight, gradient) = self.split();
        if let Some(gradient) = gradient {
            ops.weight_gradient(dy, x, gradient)?;
        }
        match dx {
            Some((write, dx)) => ops.linear_backward(dy, weight, write, dx),
            None => Ok(()),
        }
    }

    /// The same where the product read its input moved to the grids of tokens: the gradient passes as if it had not
    /// been, but where the end of a range held a value back. That of W still has the elements which its own grids
    /// hold back; see [`crate::parameter::Matrix::hold_back`].
    fn backward_on_grids(
        &mut self,
        ops: &B,
        x: &B::Tensor,
        dy: &B::Tensor,
        dx: Option<(Write, &mut B::Tensor)>,
    ) -> Result {
        let [mut moved, mut of_moved] = <[B::Tensor; 2]>::default();
        if self.is_trained() {
            ops.fake_quantize_rows(x, &mut moved)?;
        }
        let Some((write, dx)) = dx else { return self.backward(ops, &moved, dy, None) };
        self.backward(ops, &moved, dy, Some((Write::Replace, &mut of_moved)))?;
        ops.fake_quantize_rows_backward(x, &mut of_moved)?;
        match write {
            Write::Add => ops.add(&of_moved, dx),
            Write::Replace => {
                *dx = of_moved;
                Ok(())
            }
        }
    }
}
