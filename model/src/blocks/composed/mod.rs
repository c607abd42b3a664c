//! The blocks written with [`Ops`] alone: the definition of each, and the default of every kernel set.

mod attention;
mod head;
mod mlp;

pub use attention::{AttentionSaved, attention_block, attention_block_backward, attention_block_cached};
pub(crate) use head::chunks;
pub use head::{head_logits, head_loss, head_scores};
pub use mlp::{MlpSaved, mlp_block, mlp_block_backward, mlp_block_of};

use crate::blocks::Norm;
use crate::ops::{Ops, Result, Write};

impl<B: Ops> Norm<B> {
    pub(crate) fn forward(&self, ops: &B, x: &B::Tensor, y: &mut B::Tensor, inverse_rms: &mut B::Tensor) -> Result {
        ops.norm(x, &self.weight.value, self.rms, y, inverse_rms)
    }

    pub(crate) fn backward(
        &mut self,
        ops: &B,
        x: &B::Tensor,
        inverse_rms: &B::Tensor,
        dy: &B::Tensor,
        write: Write,
        dx: &mut B::Tensor,
    ) -> Result {
        let (weight, gradient) = self.weight.split();
        ops.norm_backward(x, weight, self.rms, inverse_rms, dy, write, dx, gradient)
    }
}

/// What the norm at the end of a branch keeps: its input and its inverse RMS.
#[derive(Default)]
pub(crate) struct PostNormSaved<T> {
    branch: T,
    inverse_rms: T,
}

/// Adds a branch to the residual stream, through its norm where it has one.
pub(crate) fn add_branch<B: Ops>(
    ops: &B,
    post_norm: Option<&Norm<B>>,
    branch: B::Tensor,
    x: &mut B::Tensor,
    saved: &mut PostNormSaved<B::Tensor>,
) -> Result {
    let Some(norm) = post_norm else { return ops.add(&branch, x) };
    saved.branch = branch;
    let mut normed = B::Tensor::default();
    norm.forward(ops, &saved.branch, &mut normed, &mut saved.inverse_rms)?;
    ops.add(&normed, x)
}

/// The gradient of the branch that [`add_branch`] added, where that is not the residual stream's own.
pub(crate) fn branch_gradient<B: Ops>(
    ops: &B,
    post_norm: Option<&mut Norm<B>>,
    saved: &PostNormSaved<B::Tensor>,
    gradient: &B::Tensor,
) -> Result<Option<B::Tensor>> {
    let Some(norm) = post_norm else { return Ok(None) };
    let mut dx = B::Tensor::default();
    norm.backward(ops, &saved.branch, &saved.inverse_rms, gradient, Write::Replace, &mut dx)?;
    Ok(Some(dx))
}
