//! A projection: a weight, perhaps a bias, perhaps a low-rank adapter on top. This is where LoRA enters.
//!
//! Adapters as files, and their settings, are in [`crate::peft`].

use crate::ops::{Form, Ops, Result, Write};
use crate::parameter::{Matrix, Parameter};

/// A low-rank adapter: adds `scaling · B(Ax)`.
pub struct Lora<B: Ops> {
    /// A, `[rank, in]`.
    pub a: Parameter<B>,
    /// B, `[out, rank]`.
    pub b: Parameter<B>,
    /// Factor on the output.
    pub scaling: f32,
}

/// `y = Wx + bias (+ adapter)`.
pub struct Projection<B: Ops> {
    /// W.
    pub matrix: Matrix<B>,
    /// The bias, `[1, out]`.
    pub bias: Option<Parameter<B>>,
    /// The adapter.
    pub lora: Option<Lora<B>>,
}

/// What a projection's backward needs besides its input.
pub struct ProjectionSaved<T> {
    /// `Ax`, `[rows, rank]`; empty without an adapter.
    pub low_rank: T,
}

impl<T: Default> Default for ProjectionSaved<T> {
    fn default() -> Self {
        Self { low_rank: T::default() }
    }
}

impl<B: Ops> Projection<B> {
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

    /// `y (+)= Wx + bias + scaling · B(Ax)`.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn forward(
        &self,
        ops: &B,
        x: &B::Tensor,
        write: Write,
        y: &mut B::Tensor,
        saved: &mut ProjectionSaved<B::Tensor>,
    ) -> Result {
        ops.linear(x, &self.matrix.weight, self.bias.as_ref().map(|bias| &bias.value), write, y)?;
        let Some(lora) = &self.lora else { return Ok(()) };
        ops.matmul(Form::Nt, 1.0, x, &lora.a.value, Write::Replace, &mut saved.low_rank)?;
        ops.matmul(Form::Nt, lora.scaling, &saved.low_rank, &lora.b.value, Write::Add, y)
    }

    /// Adds the gradients of what is trained here and, where `dx` is given, writes that of the input.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn backward(
        &mut self,
        ops: &B,
        saved: &ProjectionSaved<B::Tensor>,
        x: &B::Tensor,
        dy: &B::Tensor,
        mut dx: Option<(Write, &mut B::Tensor)>,
    ) -> Result {
        let (weight, weight_gradient) = self.matrix.split();
        if let Some(gradient) = weight_gradient {
            ops.matmul(Form::Tn, 1.0, dy, x, Write::Add, gradient)?;
        }
        if let Some((_, Some(gradient))) = self.bias.as_mut().map(Parameter::split) {
            ops.add_column_sums(dy, gradient)?;
        }
        if let Some((write, dx)) = &mut dx {
            ops.linear_backward(dy, weight, *write, dx)?;
        }
        match &mut self.lora {
            Some(lora) => lora.backward(ops, saved, x, dy, dx.map(|(_, dx)| dx)),
            None => Ok(()),
        }
    }
}

impl<B: Ops> Lora<B> {
    fn is_trained(&self) -> bool {
        self.a.is_trained() || self.b.is_trained()
    }

    /// With `t = Ax`: `dB += s · dyᵀt`, `dt = s · dy B`, `dA += dtᵀx`, `dx += dt A`.
    fn backward(
        &mut self,
        ops: &B,
        saved: &ProjectionSaved<B::Tensor>,
        x: &B::Tensor,
        dy: &B::Tensor,
        dx: Option<&mut B::Tensor>,
    ) -> Result {
        let (a, a_gradient) = self.a.split();
        let (b, b_gradient) = self.b.split();
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
            Some(dx) => ops.matmul(Form::Nn, 1.0, &low_rank_gradient, a, Write::Add, dx),
            None => Ok(()),
        }
    }
}
