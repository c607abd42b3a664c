//! The root-mean-square norm, over each run of columns as long as its weight.

use super::instructions::multiversion;
use super::vector::sum_along;
use crate::ops::{NormWeight, RmsNorm};

multiversion! {
    /// Norms rows; `inverse_rms` holds one number per run.
    pub(super) fn forward(x: &[f32], weight: &[f32], norm: RmsNorm, y: &mut [f32], inverse_rms: &mut [f32]) {
        let offset = offset(norm);
        let runs = x.chunks_exact(weight.len()).zip(y.chunks_exact_mut(weight.len()));
        for ((x, y), inverse_rms) in runs.zip(inverse_rms) {
            let mean_square = sum_along([x], |[x]| x * x) / x.len() as f32;
            let factor = 1.0 / (mean_square + norm.eps).sqrt();
            for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                *y = x * factor * (weight + offset);
            }
            *inverse_rms = factor;
        }
    }
}

multiversion! {
    /// Adds the gradient of the input: with `f` the inverse RMS and `g = dy ∘ w`, `f · (g - x · f² · mean(g ∘ x))`.
    pub(super) fn backward(
        x: &[f32],
        weight: &[f32],
        norm: RmsNorm,
        inverse_rms: &[f32],
        dy: &[f32],
        dx: &mut [f32],
    ) {
        let offset = offset(norm);
        let width = weight.len();
        let runs = x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        for (((x, dy), dx), &factor) in runs.zip(inverse_rms) {
            let mean = sum_along([dy, weight, x], |[dy, weight, x]| dy * (weight + offset) * x) / width as f32;
            let along = mean * factor * factor;
            for (((dx, dy), x), weight) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
                *dx += factor * (dy * (weight + offset) - x * along);
            }
        }
    }
}

multiversion! {
    /// Adds the gradient of the weight's elements from `first` on: `Σ dy · x · f` over rows and runs, in their order.
    pub(super) fn weight_gradient(
        x: &[f32],
        inverse_rms: &[f32],
        dy: &[f32],
        width: usize,
        first: usize,
        gradient: &mut [f32],
    ) {
        let runs = x.chunks_exact(width).zip(dy.chunks_exact(width));
        for ((x, dy), factor) in runs.zip(inverse_rms) {
            let (x, dy) = (&x[first..], &dy[first..]);
            for ((gradient, x), dy) in gradient.iter_mut().zip(x).zip(dy) {
                *gradient += dy * x * factor;
            }
        }
    }
}

/// What is added to the stored weight.
#[inline(always)]
fn offset(norm: RmsNorm) -> f32 {
    match norm.weight {
        NormWeight::Plain => 0.0,
        NormWeight::PlusOne => 1.0,
    }
}
