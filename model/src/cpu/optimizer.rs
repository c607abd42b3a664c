//! Update rules over all elements of a tensor, cut over threads.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::sync::{Mutex, PoisonError};

use super::simd::{Routine, Vector};
use super::{Cpu, InstructionSet, Tensor};
use crate::optimizer::{BLOCK, Elementwise, StateElements, Updated, update_block};

/// Elements of a run, which one thread updates: several blocks, whose operands stay in the cache.
const RUN: usize = 16 * BLOCK;

impl Cpu {
    /// One update by an element-wise rule; see [`crate::ops::Ops::update`].
    pub(super) fn update_tensor<R: Elementwise<N>, const N: usize>(&self, rule: &R, updated: Updated<'_, Tensor>) {
        let Updated { value, gradient, state } = updated;
        let elements = value.values().len();
        let state = state.iter_mut().map(|tensor| tensor.elements(Tensor::values_mut));
        let runs: Vec<_> = runs(value.values_mut(), gradient.values(), state).into_iter().map(Mutex::new).collect();
        self.each(runs.len(), elements, |index| {
            let mut run = runs[index].lock().unwrap_or_else(PoisonError::into_inner);
            update_run(self.set, rule, &mut run);
        });
    }
}

/// One update by an element-wise rule, on this thread.
pub(crate) fn update_elements<'a, R: Elementwise<N>, const N: usize>(
    set: InstructionSet,
    rule: &R,
    value: &'a mut [f32],
    gradient: &'a [f32],
    state: impl Iterator<Item = StateElements<'a>>,
) {
    runs::<N>(value, gradient, state).iter_mut().for_each(|run| update_run(set, rule, run));
}

/// Elements of the operands from the same place of each.
struct Run<'a, const N: usize> {
    value: &'a mut [f32],
    gradient: &'a [f32],
    state: [StateElements<'a>; N],
}

fn runs<'a, const N: usize>(
    value: &'a mut [f32],
    gradient: &'a [f32],
    state: impl Iterator<Item = StateElements<'a>>,
) -> Vec<Run<'a, N>> {
    assert_eq!(value.len(), gradient.len(), "a gradient has the shape of its value");
    let mut state: Vec<_> = state.map(|elements| elements.runs(RUN).into_iter()).collect();
    let operands = value.chunks_mut(RUN).zip(gradient.chunks(RUN));
    let run = |(value, gradient)| {
        let state: Vec<_> =
            state.iter_mut().map(|runs| runs.next().expect("state has the shape of its value")).collect();
        let state = state.try_into().unwrap_or_else(|_| panic!("a formula of {N} state tensors has as many"));
        Run { value, gradient, state }
    };
    operands.map(run).collect()
}

/// Updates a run.
struct Update<'a, 'r, R, const N: usize> {
    rule: &'a R,
    run: &'a mut Run<'r, N>,
}

impl<R: Elementwise<N>, const N: usize> Routine for Update<'_, '_, R, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let Self { rule, run } = self;
        let (mut value, mut gradient, mut state) = ([0.0; BLOCK], [0.0; BLOCK], [[0.0; BLOCK]; N]);
        for first in (0..run.value.len()).step_by(BLOCK) {
            let end = run.value.len().min(first + BLOCK);
            value[..end - first].copy_from_slice(&run.value[first..end]);
            gradient[..end - first].copy_from_slice(&run.gradient[first..end]);
            for (elements, block) in run.state.iter().zip(&mut state) {
                elements.load(first, block);
            }
            update_block(rule, &mut value, &gradient, &mut state);
            run.value[first..end].copy_from_slice(&value[..end - first]);
            for (elements, block) in run.state.iter_mut().zip(&state) {
                elements.store(first, block);
            }
        }
    }
}

fn update_run<R: Elementwise<N>, const N: usize>(set: InstructionSet, rule: &R, run: &mut Run<'_, N>) {
    // SAFETY: a set other than the portable one is only ever chosen where the machine has it, and the update is safe
    // code.
    unsafe { set.run(Update { rule, run }) }
}
