//! The MLP block.

use super::{PostNormSaved, add_branch, branch_gradient};
use crate::adapter::{Projection, ProjectionSaved};
use crate::blocks::{AdapterRows, GateUpProjections, InputGradient, MlpBlock, OfRows};
use crate::ops::{Ops, Result, Write};
use crate::random::Draws;

/// What an MLP block keeps for its backward; the normed input and the gated activation are computed again.
#[derive(Default)]
pub struct MlpSaved<T> {
    x: T,
    inverse_rms: T,
    gate: T,
    up: T,
    /// Of a fused projection, too.
    gate_proj: ProjectionSaved<T>,
    up_proj: ProjectionSaved<T>,
    down_proj: ProjectionSaved<T>,
    post_norm: PostNormSaved<T>,
}

/// The MLP block; see [`crate::blocks::Blocks::mlp_block`].
///
/// # Errors
/// Fails if the device does.
pub fn mlp_block<B: Ops>(
    ops: &B,
    block: &MlpBlock<B>,
    draws: Option<Draws<'_>>,
    x: &mut B::Tensor,
    saved: &mut MlpSaved<B::Tensor>,
) -> Result {
    forward(ops, block, draws.into(), x, saved)
}

/// The MLP block of rows with adapters of their own; see [`crate::blocks::Blocks::mlp_block_of`].
///
/// # Errors
/// Fails if the device does.
pub fn mlp_block_of<B: Ops>(ops: &B, block: &MlpBlock<B>, adapters: &[AdapterRows], x: &mut B::Tensor) -> Result {
    forward(ops, block, OfRows { draws: None, adapters }, x, &mut MlpSaved::default())
}

fn forward<B: Ops>(
    ops: &B,
    block: &MlpBlock<B>,
    of_rows: OfRows<'_>,
    x: &mut B::Tensor,
    saved: &mut MlpSaved<B::Tensor>,
) -> Result {
    let MlpSaved { x: input, inverse_rms, gate, up, gate_proj: gate_saved, up_proj: up_saved, .. } = saved;
    ops.copy(x, input)?;
    let mut normed = B::Tensor::default();
    block.norm.forward(ops, x, &mut normed, inverse_rms)?;
    match &block.gate_up {
        GateUpProjections::Split { gate_proj, up_proj } => {
            Projection::forward_each(ops, &normed, of_rows, [(gate_proj, gate, gate_saved), (up_proj, up, up_saved)])?;
        }
        GateUpProjections::Fused { gate_up_proj } => {
            let mut joined = B::Tensor::default();
            gate_up_proj.forward(ops, &normed, of_rows, Write::Replace, &mut joined, gate_saved)?;
            let width = gate_up_proj.matrix.out_features / 2;
            ops.take_columns(&joined, 0, width, gate)?;
            ops.take_columns(&joined, width, width, up)?;
        }
    }
    let mut hidden = B::Tensor::default();
    ops.gated(block.activation, gate, up, &mut hidden)?;
    if block.post_norm.is_none() {
        return block.down_proj.forward(ops, &hidden, of_rows, Write::Add, x, &mut saved.down_proj);
    }
    let mut branch = B::Tensor::default();
    block.down_proj.forward(ops, &hidden, of_rows, Write::Replace, &mut branch, &mut saved.down_proj)?;
    add_branch(ops, block.post_norm.as_ref(), branch, x, &mut saved.post_norm)
}

/// The backward; see [`crate::blocks::Blocks::mlp_block_backward`].
///
/// # Errors
/// Fails if the device does.
pub fn mlp_block_backward<B: Ops>(
    ops: &B,
    block: &mut MlpBlock<B>,
    draws: Option<Draws<'_>>,
    saved: &mut MlpSaved<B::Tensor>,
    gradient: &mut B::Tensor,
    input_gradient: InputGradient,
) -> Result {
    let branch = branch_gradient(ops, block.post_norm.as_mut(), &saved.post_norm, gradient)?;
    let [mut hidden, mut dhidden] = <[B::Tensor; 2]>::default();
    if block.down_proj.is_trained() {
        ops.gated(block.activation, &saved.gate, &saved.up, &mut hidden)?;
    }
    let into_hidden = Some((Write::Replace, &mut dhidden));
    let branch = branch.as_ref().unwrap_or(gradient);
    block.down_proj.backward(ops, &saved.down_proj, &hidden, draws, branch, into_hidden)?;
    let [mut dgate, mut dup] = <[B::Tensor; 2]>::default();
    ops.gated_backward(block.activation, &saved.gate, &saved.up, &dhidden, &mut dgate, &mut dup)?;
    let needed = input_gradient == InputGradient::Needed || block.norm.weight.is_trained();
    let mut dnormed = needed.then(B::Tensor::default);
    project_backward(ops, block, draws, saved, &dgate, &dup, dnormed.as_mut())?;
    match dnormed {
        Some(dnormed) => block.norm.backward(ops, &saved.x, &saved.inverse_rms, &dnormed, Write::Add, gradient),
        None => Ok(()),
    }
}

fn project_backward<B: Ops>(
    ops: &B,
    block: &mut MlpBlock<B>,
    draws: Option<Draws<'_>>,
    saved: &MlpSaved<B::Tensor>,
    dgate: &B::Tensor,
    dup: &B::Tensor,
    mut dnormed: Option<&mut B::Tensor>,
) -> Result {
    let [mut normed, mut inverse_rms] = <[B::Tensor; 2]>::default();
    if block.gate_up.is_trained() {
        block.norm.forward(ops, &saved.x, &mut normed, &mut inverse_rms)?;
    }
    let x = &normed;
    match &mut block.gate_up {
        GateUpProjections::Split { gate_proj, up_proj } => {
            gate_proj.backward(
                ops,
                &saved.gate_proj,
                x,
                draws,
                dgate,
                dnormed.as_deref_mut().map(|dx| (Write::Replace, dx)),
            )?;
            up_proj.backward(ops, &saved.up_proj, x, draws, dup, dnormed.map(|dx| (Write::Add, dx)))
        }
        GateUpProjections::Fused { gate_up_proj } => {
            let mut joined = B::Tensor::default();
            ops.join_columns(&[dgate, dup], &mut joined)?;
            gate_up_proj.backward(ops, &saved.gate_proj, x, draws, &joined, dnormed.map(|dx| (Write::Replace, dx)))
        }
    }
}

impl<B: Ops> GateUpProjections<B> {
    fn is_trained(&self) -> bool {
        match self {
            Self::Split { gate_proj, up_proj } => gate_proj.is_trained() || up_proj.is_trained(),
            Self::Fused { gate_up_proj } => gate_up_proj.is_trained(),
        }
    }
}
