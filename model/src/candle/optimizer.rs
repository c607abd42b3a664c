//! Formulas of update rules over candle's tensors.

use std::ops::{Add, Div, Mul, Sub};
use std::sync::Arc;

use candle_core::{DType, Error, Tensor};

use super::CandleTensor;
use crate::ops::Write;
use crate::optimizer::{Element, Elementwise};

/// One update by an element-wise rule whose state is in f32; see [`crate::ops::Ops::update`].
pub(super) fn update<R: Elementwise<N>, const N: usize>(
    rule: &R,
    value: &mut CandleTensor,
    gradient: &CandleTensor,
    state: [&mut CandleTensor; N],
) -> candle_core::Result<()> {
    let element = |tensor: &CandleTensor| Computed(Ok(tensor.get().clone()));
    let before = std::array::from_fn(|index| element(state[index]));
    let (updated, after) = rule.tensors(element(value), element(gradient), before);
    value.put(Write::Replace, updated.into_tensor()?)?;
    for (tensor, after) in state.into_iter().zip(after) {
        tensor.put(Write::Replace, after.into_tensor()?)?;
    }
    Ok(())
}

/// An intermediate result of a formula: a tensor, or the first error on the way to it.
#[derive(Clone)]
struct Computed(Result<Tensor, Arc<Error>>);

impl Computed {
    fn map(self, compute: impl FnOnce(&Tensor) -> candle_core::Result<Tensor>) -> Self {
        Self(self.0.and_then(|tensor| compute(&tensor).map_err(Arc::new)))
    }

    fn with(self, other: Self, compute: impl FnOnce(&Tensor, &Tensor) -> candle_core::Result<Tensor>) -> Self {
        match other.0 {
            Ok(other) => self.map(|tensor| compute(tensor, &other)),
            Err(error) => Self(self.0.and(Err(error))),
        }
    }

    fn into_tensor(self) -> candle_core::Result<Tensor> {
        self.0.map_err(Error::wrap)
    }
}

impl Element for Computed {
    fn sqrt(self) -> Self {
        self.map(Tensor::sqrt)
    }

    fn sign(self) -> Self {
        self.map(Tensor::sign)
    }

    fn round_to_bf16(self) -> Self {
        self.map(|tensor| tensor.to_dtype(DType::BF16)?.to_dtype(DType::F32))
    }
}

impl Add for Computed {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.with(other, |one, other| one + other)
    }
}

impl Sub for Computed {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.with(other, |one, other| one - other)
    }
}

impl Mul for Computed {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        self.with(other, |one, other| one * other)
    }
}

impl Div for Computed {
    type Output = Self;

    fn div(self, other: Self) -> Self {
        self.with(other, |one, other| one / other)
    }
}

impl Add<f32> for Computed {
    type Output = Self;

    fn add(self, other: f32) -> Self {
        self.map(|tensor| tensor + f64::from(other))
    }
}

impl Mul<f32> for Computed {
    type Output = Self;

    fn mul(self, other: f32) -> Self {
        self.map(|tensor| tensor * f64::from(other))
    }
}
