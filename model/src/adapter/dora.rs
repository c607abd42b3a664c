//! DoRA: an adapter that gives each output a magnitude of its own, apart from the direction of its weights.
//!
//! `y = m/n · (Wx + s·B(Ax)) + bias`, where `n` is the norm of each row of `W + s·BA` and a constant for the gradient.
//! With dropout `D` on the adapter's input it is `y = Wx + bias + m/n · (W·Dx + s·B(A·Dx)) - W·Dx`, as PEFT computes
//! it.
//!
//! Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv:2402.09353; the constant is its section
//! 4.3.

use super::{Lora, ProjectionSaved};
use crate::ops::{Form, NormWeight, Ops, Result, RmsNorm, Write};
use crate::parameter::{Matrix, Parameter};
use crate::random::Draws;

/// Values of `W + s·BA` that exist at a time while norms are computed.
const CHUNK_VALUES: usize = 1 << 20;

/// The magnitudes of a DoRA adapter.
pub struct Dora<B: Ops> {
    /// m, `[out]`.
    pub magnitude: Parameter<B>,
    /// `1/n`, `[1, out]`.
    inverse_norm: B::Tensor,
    /// `m/n`, `[1, out]`.
    factor: B::Tensor,
}

impl<B: Ops> Dora<B> {
    /// These magnitudes on this matrix with this adapter.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn new(
        ops: &B,
        magnitude: Parameter<B>,
        matrix: &Matrix<B>,
        low_rank: (&Parameter<B>, &Parameter<B>, f32),
    ) -> Result<Self> {
        let mut dora = Self { magnitude, inverse_norm: B::Tensor::default(), factor: B::Tensor::default() };
        dora.refresh(ops, matrix, low_rank)?;
        Ok(dora)
    }

    /// Computes the norms again, after A, B, m or W changed: once per optimizer step.
    ///
    /// The rows of `W + s·BA` are made and measured a chunk at a time, as PEFT does for all of them at once. To expand
    /// the square (‖W‖² + 2s·W·(BA) + s²·‖BA‖²) would save the chunk, but cancels where the adapter nears -W.
    pub(super) fn refresh(
        &mut self,
        ops: &B,
        matrix: &Matrix<B>,
        (a, b, scaling): (&Parameter<B>, &Parameter<B>, f32),
    ) -> Result {
        self.inverse_norm = inverse_row_norms(ops, matrix, Some((&a.value, &b.value, scaling)))?;
        ops.scale_columns(&self.magnitude.value, &self.inverse_norm, None, Write::Replace, &mut self.factor)
    }

    pub(super) fn forward(
        &self,
        ops: &B,
        (matrix, bias, lora): (&Matrix<B>, Option<&B::Tensor>, &Lora<B>),
        x: &B::Tensor,
        draws: Option<Draws<'_>>,
        write: Write,
        (y, saved): (&mut B::Tensor, &mut ProjectionSaved<B::Tensor>),
    ) -> Result {
        let mut direction = std::mem::take(&mut saved.direction);
        let Some(mask) = lora.mask(draws) else {
            ops.linear(x, &matrix.weight, None, Write::Replace, &mut direction)?;
            lora.forward(ops, x, &mut direction, saved)?;
            ops.scale_columns(&direction, &self.factor, bias, write, y)?;
            saved.direction = direction;
            return Ok(());
        };
        let [mut dropped, mut rest] = <[B::Tensor; 2]>::default();
        ops.dropout(x, &mask, 1.0, Write::Replace, &mut dropped)?;
        ops.copy(x, &mut rest)?;
        ops.dropout(x, &mask, -1.0, Write::Add, &mut rest)?;
        ops.linear(&rest, &matrix.weight, bias, write, y)?;
        ops.linear(&dropped, &matrix.weight, None, Write::Replace, &mut direction)?;
        lora.forward(ops, &dropped, &mut direction, saved)?;
        ops.scale_columns(&direction, &self.factor, None, Write::Add, y)?;
        saved.direction = direction;
        Ok(())
    }

    /// Adds m's gradient, `Σ dy ∘ direction / n`, and returns that of the direction, `m/n · dy`.
    fn backward(&mut self, ops: &B, direction: &B::Tensor, dy: &B::Tensor) -> Result<B::Tensor> {
        if let (_, Some(gradient)) = self.magnitude.split() {
            let mut dots = ops.zeros(1, ops.shape(dy).1)?;
            ops.add_column_dots(dy, direction, &mut dots)?;
            ops.scale_columns(&dots, &self.inverse_norm, None, Write::Add, gradient)?;
        }
        let mut of_direction = B::Tensor::default();
        ops.scale_columns(dy, &self.factor, None, Write::Replace, &mut of_direction)?;
        Ok(of_direction)
    }
}

/// The backward of a projection with a DoRA adapter, its bias aside.
pub(super) fn backward<B: Ops>(
    ops: &B,
    matrix: &mut Matrix<B>,
    lora: &mut Lora<B>,
    saved: &ProjectionSaved<B::Tensor>,
    (x, draws): (&B::Tensor, Option<Draws<'_>>),
    dy: &B::Tensor,
    mut dx: Option<(Write, &mut B::Tensor)>,
) -> Result {
    let dora = lora.dora.as_mut().expect("called for a DoRA adapter");
    let of_direction = dora.backward(ops, &saved.direction, dy)?;
    let Some(mask) = lora.mask(draws) else {
        matrix.backward(ops, x, &of_direction, dx.as_mut().map(|(write, dx)| (*write, &mut **dx)))?;
        return lora.backward(ops, saved, x, &of_direction, dx.map(|(_, dx)| (Write::Add, dx)));
    };
    let [mut dropped, mut rest] = <[B::Tensor; 2]>::default();
    ops.dropout(x, &mask, 1.0, Write::Replace, &mut dropped)?;
    ops.copy(x, &mut rest)?;
    ops.dropout(x, &mask, -1.0, Write::Add, &mut rest)?;
    let [mut of_rest, mut of_dropped] = <[B::Tensor; 2]>::default();
    let wanted = dx.is_some();
    matrix.backward(ops, &rest, dy, wanted.then_some((Write::Replace, &mut of_rest)))?;
    matrix.backward(ops, &dropped, &of_direction, wanted.then_some((Write::Replace, &mut of_dropped)))?;
    lora.backward(ops, saved, &dropped, &of_direction, wanted.then_some((Write::Add, &mut of_dropped)))?;
    let Some((write, dx)) = dx else { return Ok(()) };
    match write {
        Write::Replace => ops.copy(&of_rest, dx)?,
        Write::Add => ops.add(&of_rest, dx)?,
    }
    ops.dropout(&of_rest, &mask, -1.0, Write::Add, dx)?;
    ops.dropout(&of_dropped, &mask, 1.0, Write::Add, dx)
}

/// One over the norm of each row of `W (+ scaling · BA)`, `[1, out]`.
///
/// A row of zeros, as of an id that no text has, counts as one of the least norm there is, where PEFT's becomes not a
/// number.
fn inverse_row_norms<B: Ops>(
    ops: &B,
    matrix: &Matrix<B>,
    low_rank: Option<(&B::Tensor, &B::Tensor, f32)>,
) -> Result<B::Tensor> {
    let width = matrix.in_features;
    let ones = ops.tensor(1, width, &vec![1.0; width])?;
    let rms = RmsNorm { eps: f32::MIN_POSITIVE, weight: NormWeight::Plain };
    let ids: Vec<u32> = (0..matrix.out_features as u32).collect();
    let mut parts = Vec::new();
    let [mut rows, mut of_b, mut normed] = <[B::Tensor; 3]>::default();
    for ids in ids.chunks((CHUNK_VALUES / width).max(1)) {
        ops.embed(&matrix.weight, ids, 1.0, &mut rows)?;
        if let Some((a, b, scaling)) = low_rank {
            ops.gather_rows(b, ids, &mut of_b)?;
            ops.matmul(Form::Nn, scaling, &of_b, a, Write::Add, &mut rows)?;
        }
        let mut inverse_rms = B::Tensor::default();
        ops.norm(&rows, &ones, rms, &mut normed, &mut inverse_rms)?;
        parts.push(inverse_rms);
    }
    let [mut column, mut inverse] = <[B::Tensor; 2]>::default();
    ops.join_rows(&parts.iter().collect::<Vec<_>>(), &mut column)?;
    let one = ops.tensor(1, 1, &[1.0])?;
    let of_mean = 1.0 / (width as f32).sqrt();
    ops.matmul(Form::Nt, of_mean, &one, &column, Write::Replace, &mut inverse)?;
    Ok(inverse)
}

/// The norm of each row of W: where the magnitudes of a fresh adapter start.
///
/// # Errors
/// Fails if the device does.
pub(crate) fn row_norms<B: Ops>(ops: &B, matrix: &Matrix<B>) -> Result<Vec<f32>> {
    let inverse = ops.read(&inverse_row_norms(ops, matrix, None)?)?;
    Ok(inverse.into_iter().map(f32::recip).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::ValueRows;
    use crate::cpu::Cpu;
    use crate::init::{Fill, fresh_tensor};
    use crate::ops::{Compute, WeightRole};

    /// The norms of `W + s·BA` for A = W and B = c·1, so that it is (1 + s·c)·W, and those norms in f64.
    fn norms(factor: f32, scaling: f32) -> (Vec<f32>, Vec<f64>) {
        let (rows, columns) = (7, 150);
        let values = fresh_tensor(3, "w", rows * columns, Fill::Normal(1.0));
        let ops = Cpu::new(2, Compute::F32).unwrap();
        let stored = ValueRows::new(&values, columns);
        let matrix = Matrix::frozen(&ops, "w", [rows, columns], WeightRole::Matrix, &stored).unwrap();
        let a = ops.tensor(rows, columns, &values).unwrap();
        let diagonal: Vec<f32> =
            (0..rows * rows).map(|index| if index % (rows + 1) == 0 { factor } else { 0.0 }).collect();
        let b = ops.tensor(rows, rows, &diagonal).unwrap();
        let inverse = ops.read(&inverse_row_norms(&ops, &matrix, Some((&a, &b, scaling))).unwrap()).unwrap();
        let left = 1.0 + f64::from(scaling) * f64::from(factor);
        let exact =
            values.chunks(columns).map(|row| row.iter().map(|x| (left * f64::from(*x)).powi(2)).sum::<f64>().sqrt());
        (inverse.into_iter().map(f32::recip).collect(), exact.collect())
    }

    #[test]
    fn norms_hold_where_the_adapter_cancels_the_weight() {
        // The sum is made element by element, so that its error is that of f32 over what is left: 6e-8 / 1e-3 at worst
        // here.
        for (factor, scaling, bound) in [(0.0, 1.0, 5e-7), (0.25, 2.0, 5e-7), (-0.4995, 2.0, 1e-4)] {
            for (found, exact) in std::iter::zip(norms(factor, scaling).0, norms(factor, scaling).1) {
                let error = (f64::from(found) - exact).abs() / exact;
                assert!(error < bound, "{found} where {exact} is exact, with a factor of {factor}: off by {error:e}");
            }
        }
    }
}
