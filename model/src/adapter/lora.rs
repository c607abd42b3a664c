//! The low-rank adapter itself.

use super::{Dora, ProjectionSaved, TokenRows};
use crate::ops::{Form, Ops, Result, Write};
use crate::parameter::{Matrix, Parameter};
use crate::random::{Address, Draws, DropoutMask, Purpose};

/// A low-rank adapter: adds `scaling · B(Ax)`.
pub struct Lora<B: Ops> {
    /// A, `[rank, in]`; of trained rows, their values.
    pub a: Parameter<B>,
    /// B, `[out, rank]`.
    pub b: Parameter<B>,
    /// Factor on the output.
    pub scaling: f32,
    /// Dropout on the input, in training.
    pub dropout: Option<Dropout>,
    /// Magnitudes of their own.
    pub dora: Option<Dora<B>>,
    /// Where rows of the matrix are trained in place of low ranks: what they are in the place of. B says which they
    /// are and is frozen.
    pub rows: Option<TokenRows<B>>,
}

/// Dropout on the input of one module's adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The module, as the draws know it.
    module: Address,
    /// How likely an element is dropped.
    probability: f64,
}

impl Dropout {
    /// Dropout of this probability, in `[0, 1)`, on a module known by its full name; none if it is 0.
    pub fn new(path: &str, probability: f64) -> Option<Self> {
        (probability > 0.0).then(|| Self { module: Address::named(Purpose::Dropout, path), probability })
    }
}

impl<B: Ops> Lora<B> {
    /// Its matrices, and its magnitudes if it has them.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Parameter<B>> {
        let b = self.rows.is_none().then_some(&self.b);
        std::iter::once(&self.a).chain(b).chain(self.dora.as_ref().map(|dora| &dora.magnitude))
    }

    /// As [`Lora::parameters`], to change.
    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<B>> {
        let b = self.rows.is_none().then_some(&mut self.b);
        std::iter::once(&mut self.a).chain(b).chain(self.dora.as_mut().map(|dora| &mut dora.magnitude))
    }

    /// What multiplies the input: A, or what trained rows differ from those of the matrix by.
    pub(crate) fn down(&self) -> &B::Tensor {
        self.rows.as_ref().map_or(&self.a.value, TokenRows::delta)
    }

    pub(super) fn is_trained(&self) -> bool {
        self.parameters().any(Parameter::is_trained)
    }

    /// The mask on the input, in a pass that has draws.
    pub(crate) fn mask<'a>(&self, draws: Option<Draws<'a>>) -> Option<DropoutMask<'a>> {
        let Dropout { module, probability } = self.dropout?;
        draws.map(|draws| DropoutMask { draws, module, probability })
    }

    /// Computes what follows from the adapter's values again, after they or the matrix changed.
    pub(super) fn refresh(&mut self, ops: &B, matrix: &Matrix<B>) -> Result {
        let Self { a, b, scaling, dora, rows, .. } = self;
        if let Some(rows) = rows {
            rows.refresh(ops, &a.value)?;
        }
        match dora {
            Some(dora) => dora.refresh(ops, matrix, (a, b, *scaling)),
            None => Ok(()),
        }
    }

    /// `y += scaling · B(Ax)`.
    pub(super) fn forward(
        &self,
        ops: &B,
        x: &B::Tensor,
        y: &mut B::Tensor,
        saved: &mut ProjectionSaved<B::Tensor>,
    ) -> Result {
        ops.matmul(Form::Nt, 1.0, x, self.down(), Write::Replace, &mut saved.low_rank)?;
        ops.matmul(Form::Nt, self.scaling, &saved.low_rank, &self.b.value, Write::Add, y)
    }

    /// With `t = Ax`: `dB += s · dyᵀt`, `dt = s · dy B`, `dA += dtᵀx`, `dx (+)= dt A`.
    pub(super) fn backward(
        &mut self,
        ops: &B,
        saved: &ProjectionSaved<B::Tensor>,
        x: &B::Tensor,
        dy: &B::Tensor,
        dx: Option<(Write, &mut B::Tensor)>,
    ) -> Result {
        let Self { a, b, rows, .. } = self;
        let (a, a_gradient) = a.split();
        let a = rows.as_ref().map_or(a, TokenRows::delta);
        let (b, b_gradient) = b.split();
        if let Some(gradient) = b_gradient {
            ops.matmul(Form::Tn, self.scaling, dy, &saved.low_rank, Write::Add, gradient)?;
        }
        let mut low_rank_gradient = B::Tensor::default();
        if a_gradient.is_some() || dx.is_some() {
            ops.matmul(Form::Nn, self.scaling, dy, b, Write::Replace, &mut low_rank_gradient)?;
        }
        if let Some(gradient) = a_gradient {
            ops.matmul(Form::Tn, 1.0, &low_rank_gradient, x, Write::Add, gradient)?;
        }
        match dx {
            Some((write, dx)) => ops.matmul(Form::Nn, 1.0, &low_rank_gradient, a, write, dx),
            None => Ok(()),
        }
    }
}
