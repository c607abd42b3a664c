//! Formulas that compute each element of an update from the same element of parameters, gradient and state.

use std::ops::{Add, Div, Mul, Sub};

use super::Updated;
use crate::cpu::{self, InstructionSet};
use crate::ops::{Ops, Result};

/// A number of a formula: an f32, or a device tensor of them.
pub trait Element:
    Clone
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Add<f32, Output = Self>
    + Mul<f32, Output = Self>
{
    /// The square root.
    #[must_use]
    fn sqrt(self) -> Self;
    /// 1 above zero, -1 below it, 0 at it.
    #[must_use]
    fn sign(self) -> Self;
    /// The nearest number that bf16 has, of two equally near ones the even.
    #[must_use]
    fn round_to_bf16(self) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn sqrt(self) -> Self {
        self.sqrt()
    }

    #[inline(always)]
    fn sign(self) -> Self {
        f32::from(u8::from(self > 0.0)) - f32::from(u8::from(self < 0.0))
    }

    #[inline(always)]
    fn round_to_bf16(self) -> Self {
        cpu::nearest(self).to_f32()
    }
}

/// The formula of a rule in one step, with `N` state tensors. Its fields are the constants of the step, in f32.
///
/// Implementations are `#[inline(always)]`: the `cpu` kernel set compiles the loop around them once per instruction
/// set.
pub trait Elementwise<const N: usize>: Copy + Send + Sync {
    /// The name under which a profile records it.
    const NAME: &'static str;

    /// The new value and state from the old ones.
    fn element<E: Element>(&self, value: E, gradient: E, state: [E; N]) -> (E, [E; N]);

    /// As [`Elementwise::element`], for kernel sets that compute with whole tensors; it may associate its operations
    /// in another way.
    fn tensors<E: Element>(&self, value: E, gradient: E, state: [E; N]) -> (E, [E; N]) {
        self.element(value, gradient, state)
    }
}

/// Elements that a kernel takes at a time: state in a format other than f32 is decoded and encoded in blocks of these.
pub(crate) const BLOCK: usize = 256;

/// Applies a formula to a block.
#[inline(always)]
pub(crate) fn update_block<R: Elementwise<N>, const N: usize>(
    rule: &R,
    value: &mut [f32; BLOCK],
    gradient: &[f32; BLOCK],
    state: &mut [[f32; BLOCK]; N],
) {
    for index in 0..BLOCK {
        let before = std::array::from_fn(|tensor| state[tensor][index]);
        let (updated, after) = rule.element(value[index], gradient[index], before);
        value[index] = updated;
        for (tensor, after) in state.iter_mut().zip(after) {
            tensor[index] = after;
        }
    }
}

/// [`Ops::update`] by the kernel of the `cpu` set, for any set: operands are copied to main memory and back.
pub(crate) fn update_in_main_memory<O: Ops, R: Elementwise<N>, const N: usize>(
    ops: &O,
    rule: &R,
    Updated { value, gradient, state }: Updated<'_, O::Tensor>,
) -> Result {
    let (mut values, gradients) = (ops.read(value)?, ops.read(gradient)?);
    let mut copies = Vec::with_capacity(N);
    for tensor in state.iter_mut() {
        copies.push(tensor.as_f32().map_or(Ok(Vec::new()), |tensor| ops.read(tensor))?);
    }
    let elements = state.iter_mut().zip(&mut copies).map(|(tensor, copy)| tensor.elements(|_| copy));
    cpu::update_elements(InstructionSet::detect(), rule, &mut values, &gradients, elements);
    for (tensor, copy) in state.iter_mut().zip(&copies) {
        if let Some(tensor) = tensor.as_f32() {
            ops.write(tensor, copy)?;
        }
    }
    ops.write(value, &values)
}
