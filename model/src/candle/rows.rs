//! Norm, rotary embedding and activation: what is computed for each row, or each head of it, on its own.

use candle_core::{D, Result, Tensor};

use crate::ops::{Activation, NormWeight, RmsNorm, Rotation};

/// The factor on the normed values: `w` or `1 + w`.
fn factor(weight: &Tensor, kind: NormWeight) -> Result<Tensor> {
    match kind {
        NormWeight::Plain => Ok(weight.clone()),
        NormWeight::PlusOne => weight + 1.0,
    }
}

/// `x` as `(rows, runs, columns of the weight)`.
fn runs(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let ((rows, columns), run) = (x.dims2()?, weight.elem_count());
    x.reshape((rows, columns / run, run))
}

/// The normed rows, and `1 / sqrt(mean(x²) + eps)` as `(rows, runs)`.
pub(super) fn norm(x: &Tensor, weight: &Tensor, norm: RmsNorm) -> Result<(Tensor, Tensor)> {
    let in_runs = runs(x, weight)?;
    let inverse = (in_runs.sqr()?.mean_keepdim(2)? + f64::from(norm.eps))?.sqrt()?.recip()?;
    let factor = factor(weight, norm.weight)?;
    let normed = in_runs.broadcast_mul(&inverse)?.broadcast_mul(&factor.unsqueeze(0)?)?;
    Ok((normed.reshape(x.shape())?, inverse.squeeze(2)?))
}

/// What both gradients of a norm are made of.
pub(super) struct NormBackward {
    /// The normed values without the weight, `(rows, runs, run)`.
    normed: Tensor,
    inverse: Tensor,
    dy: Tensor,
    factor: Tensor,
}

/// Prepares the gradients of [`norm`].
pub(super) fn norm_backward(
    x: &Tensor,
    weight: &Tensor,
    norm: RmsNorm,
    inverse_rms: &Tensor,
    dy: &Tensor,
) -> Result<NormBackward> {
    let inverse = inverse_rms.unsqueeze(2)?;
    let normed = runs(x, weight)?.broadcast_mul(&inverse)?;
    let factor = factor(weight, norm.weight)?.unsqueeze(0)?;
    Ok(NormBackward { normed, inverse, dy: runs(dy, weight)?, factor })
}

impl NormBackward {
    /// With `n` the normed values and `g = w·dy`: `(g − n · mean(g·n)) / rms`.
    pub(super) fn x(&self) -> Result<Tensor> {
        let g = self.dy.broadcast_mul(&self.factor)?;
        let along = (&g * &self.normed)?.mean_keepdim(2)?;
        let dx = (g - self.normed.broadcast_mul(&along)?)?.broadcast_mul(&self.inverse)?;
        dx.flatten_from(1)
    }

    /// The sum of `n·dy` over rows and runs, `[1, run]`.
    pub(super) fn weight(&self) -> Result<Tensor> {
        (&self.dy * &self.normed)?.flatten_to(1)?.sum_keepdim(0)
    }
}

/// Turns the first `rotary_dims` elements of each head; `cos` and `sin` are `(rows, rotary_dims / 2)`.
pub(super) fn rope(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    head_dim: usize,
    rotary_dims: usize,
    rotation: Rotation,
) -> Result<Tensor> {
    let (rows, columns) = x.dims2()?;
    let half = rotary_dims / 2;
    let heads = x.reshape((rows, columns / head_dim, head_dim))?;
    let (first, second) = (heads.narrow(2, 0, half)?, heads.narrow(2, half, half)?);
    let (cos, sin) = (cos.unsqueeze(1)?, sin.unsqueeze(1)?);
    let sin = match rotation {
        Rotation::Forward => sin,
        Rotation::Backward => sin.neg()?,
    };
    let turned_first = (first.broadcast_mul(&cos)? - second.broadcast_mul(&sin)?)?;
    let turned_second = (second.broadcast_mul(&cos)? + first.broadcast_mul(&sin)?)?;
    let mut parts = vec![turned_first, turned_second];
    if rotary_dims < head_dim {
        parts.push(heads.narrow(2, rotary_dims, head_dim - rotary_dims)?);
    }
    Tensor::cat(&parts, D::Minus1)?.contiguous()?.reshape((rows, columns))
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    // Where exp overflows, the quotient is the right 0.
    (x.neg()?.exp()? + 1.0)?.recip()
}

/// `√(2/π)` and the cubic coefficient of GELU's tanh form. Source: Hendrycks and Gimpel, arXiv:1606.08415.
const GELU: (f64, f64) = (0.797_884_560_802_865_4, 0.044_715);

/// `tanh(√(2/π)(x + 0.044715 x³))`.
fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    let cubic = ((x.sqr()? * GELU.1)? + 1.0)?;
    ((x * cubic)? * GELU.0)?.tanh()
}

/// The activation of each element.
pub(super) fn activate(activation: Activation, x: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::Silu => x * sigmoid(x)?,
        Activation::GeluTanh => (x * 0.5)? * (gelu_tanh(x)? + 1.0)?,
    }
}

/// The derivative of the activation at each element.
pub(super) fn activation_slope(activation: Activation, x: &Tensor) -> Result<Tensor> {
    match activation {
        // s(1 + x(1 − s))
        Activation::Silu => {
            let s = sigmoid(x)?;
            let inner = ((x * (1.0 - &s)?)? + 1.0)?;
            s * inner
        }
        // ½(1 + t) + ½x(1 − t²)·√(2/π)(1 + 3·0.044715x²)
        Activation::GeluTanh => {
            let t = gelu_tanh(x)?;
            let slope = ((x.sqr()? * (3.0 * GELU.1 * GELU.0))? + GELU.0)?;
            let rising = ((x * 0.5)? * ((1.0 - t.sqr()?)? * slope)?)?;
            ((t + 1.0)? * 0.5)? + rising
        }
    }
}
