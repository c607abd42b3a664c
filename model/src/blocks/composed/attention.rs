//! The attention block.

use super::{PostNormSaved, add_branch, branch_gradient};
use crate::adapter::{Projection, ProjectionSaved};
use crate::blocks::{AttentionBlock, InputGradient, Norm, Pass, QkNorms, QkvProjections};
use crate::ops::{AttentionGradients, AttentionOperands, AttentionShape, Ops, Result, Rotation, Write};

/// What an attention block keeps for its backward; the normed input is computed again.
#[derive(Default)]
pub struct AttentionSaved<T> {
    x: T,
    inverse_rms: T,
    qkv: QkvSaved<T>,
    q_norm: HeadNormSaved<T>,
    k_norm: HeadNormSaved<T>,
    /// After norms and RoPE, as attention reads them.
    q: T,
    k: T,
    v: T,
    /// The output of attention.
    y: T,
    logsumexp: T,
    o_proj: ProjectionSaved<T>,
    post_norm: PostNormSaved<T>,
}

/// What the projections to q, k and v keep; a fused one keeps its own in `q`.
#[derive(Default)]
struct QkvSaved<T> {
    q: ProjectionSaved<T>,
    k: ProjectionSaved<T>,
    v: ProjectionSaved<T>,
}

/// What the norm over the heads of q or k keeps.
#[derive(Default)]
struct HeadNormSaved<T> {
    x: T,
    inverse_rms: T,
}

/// The attention block; see [`crate::blocks::Blocks::attention_block`].
///
/// # Errors
/// Fails if the device does.
pub fn attention_block<B: Ops>(
    ops: &B,
    block: &AttentionBlock<B>,
    pass: &Pass<'_, B>,
    x: &mut B::Tensor,
    saved: &mut AttentionSaved<B::Tensor>,
) -> Result {
    queries_keys_values(ops, block, pass, x, saved)?;
    let AttentionSaved { q, k, v, y, logsumexp, .. } = saved;
    ops.attention(q, k, v, pass.documents, &block.shape, y, logsumexp)?;
    add_output(ops, block, pass, x, saved)
}

/// The attention block over a cache; see [`crate::blocks::Blocks::attention_block_cached`].
///
/// # Errors
/// Fails if the device does.
pub fn attention_block_cached<B: Ops>(
    ops: &B,
    block: &AttentionBlock<B>,
    pass: &Pass<'_, B>,
    cache: &mut B::Cache,
    x: &mut B::Tensor,
) -> Result {
    let mut saved = AttentionSaved::default();
    queries_keys_values(ops, block, pass, x, &mut saved)?;
    ops.cache_append(cache, &saved.k, &saved.v, pass.documents)?;
    ops.attention_cached(&saved.q, cache, pass.documents, &block.shape, &mut saved.y)?;
    add_output(ops, block, pass, x, &mut saved)
}

/// Norms and projects the residual stream into `saved.{q, k, v}`, ready for attention.
fn queries_keys_values<B: Ops>(
    ops: &B,
    block: &AttentionBlock<B>,
    pass: &Pass<'_, B>,
    x: &B::Tensor,
    saved: &mut AttentionSaved<B::Tensor>,
) -> Result {
    ops.copy(x, &mut saved.x)?;
    let mut normed = B::Tensor::default();
    block.norm.forward(ops, x, &mut normed, &mut saved.inverse_rms)?;
    project(ops, block, pass, &normed, saved)?;
    if let Some(QkNorms { q_norm, k_norm }) = &block.qk_norms {
        norm_heads(ops, q_norm, &mut saved.q, &mut saved.q_norm)?;
        norm_heads(ops, k_norm, &mut saved.k, &mut saved.k_norm)?;
    }
    let rows = pass.rope.rows(pass.documents);
    ops.rope(&mut saved.q, pass.rope, &rows, Rotation::Forward)?;
    ops.rope(&mut saved.k, pass.rope, &rows, Rotation::Forward)
}

fn project<B: Ops>(
    ops: &B,
    block: &AttentionBlock<B>,
    pass: &Pass<'_, B>,
    normed: &B::Tensor,
    saved: &mut AttentionSaved<B::Tensor>,
) -> Result {
    let AttentionSaved { q, k, v, qkv, .. } = saved;
    match &block.qkv {
        QkvProjections::Split { q_proj, k_proj, v_proj } => {
            let each = [(q_proj, q, &mut qkv.q), (k_proj, k, &mut qkv.k), (v_proj, v, &mut qkv.v)];
            Projection::forward_each(ops, normed, pass.of_rows(), each)
        }
        QkvProjections::Fused { qkv_proj } => {
            let mut joined = B::Tensor::default();
            qkv_proj.forward(ops, normed, pass.of_rows(), Write::Replace, &mut joined, &mut qkv.q)?;
            let (queries, keys) = widths(&block.shape);
            ops.take_columns(&joined, 0, queries, q)?;
            ops.take_columns(&joined, queries, keys, k)?;
            ops.take_columns(&joined, queries + keys, keys, v)
        }
    }
}

/// Columns of the queries, and of the keys or values.
fn widths(shape: &AttentionShape) -> (usize, usize) {
    (shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim)
}

/// Norms each head of `x` in place, keeping what it was.
fn norm_heads<B: Ops>(ops: &B, norm: &Norm<B>, x: &mut B::Tensor, saved: &mut HeadNormSaved<B::Tensor>) -> Result {
    std::mem::swap(x, &mut saved.x);
    norm.forward(ops, &saved.x, x, &mut saved.inverse_rms)
}

/// The backward of [`norm_heads`], in place.
fn norm_heads_backward<B: Ops>(
    ops: &B,
    norm: &mut Norm<B>,
    saved: &HeadNormSaved<B::Tensor>,
    gradient: &mut B::Tensor,
) -> Result {
    let mut dx = B::Tensor::default();
    norm.backward(ops, &saved.x, &saved.inverse_rms, gradient, Write::Replace, &mut dx)?;
    *gradient = dx;
    Ok(())
}

/// Projects the output of attention and adds it to the residual stream.
fn add_output<B: Ops>(
    ops: &B,
    block: &AttentionBlock<B>,
    pass: &Pass<'_, B>,
    x: &mut B::Tensor,
    saved: &mut AttentionSaved<B::Tensor>,
) -> Result {
    let AttentionSaved { y, o_proj, post_norm, .. } = saved;
    if block.post_norm.is_none() {
        return block.o_proj.forward(ops, y, pass.of_rows(), Write::Add, x, o_proj);
    }
    let mut branch = B::Tensor::default();
    block.o_proj.forward(ops, y, pass.of_rows(), Write::Replace, &mut branch, o_proj)?;
    add_branch(ops, block.post_norm.as_ref(), branch, x, post_norm)
}

/// The backward; see [`crate::blocks::Blocks::attention_block_backward`].
///
/// # Errors
/// Fails if the device does.
pub fn attention_block_backward<B: Ops>(
    ops: &B,
    block: &mut AttentionBlock<B>,
    pass: &Pass<'_, B>,
    saved: &mut AttentionSaved<B::Tensor>,
    gradient: &mut B::Tensor,
    input_gradient: InputGradient,
) -> Result {
    let branch = branch_gradient(ops, block.post_norm.as_mut(), &saved.post_norm, gradient)?;
    let mut dy = B::Tensor::default();
    let into_y = Some((Write::Replace, &mut dy));
    block.o_proj.backward(ops, &saved.o_proj, &saved.y, pass.draws, branch.as_ref().unwrap_or(gradient), into_y)?;
    let [mut dq, mut dk, mut dv] = <[B::Tensor; 3]>::default();
    let AttentionSaved { q, k, v, y, logsumexp, .. } = saved;
    let operands = AttentionOperands { q, k, v, y, logsumexp };
    let gradients = AttentionGradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
    ops.attention_backward(operands, &dy, pass.documents, &block.shape, gradients)?;
    let rows = pass.rope.rows(pass.documents);
    ops.rope(&mut dq, pass.rope, &rows, Rotation::Backward)?;
    ops.rope(&mut dk, pass.rope, &rows, Rotation::Backward)?;
    if let Some(QkNorms { q_norm, k_norm }) = &mut block.qk_norms {
        norm_heads_backward(ops, q_norm, &saved.q_norm, &mut dq)?;
        norm_heads_backward(ops, k_norm, &saved.k_norm, &mut dk)?;
    }
    let needed = input_gradient == InputGradient::Needed || block.norm.weight.is_trained();
    let mut dnormed = needed.then(B::Tensor::default);
    project_backward(ops, block, pass, saved, [&dq, &dk, &dv], dnormed.as_mut())?;
    match dnormed {
        Some(dnormed) => block.norm.backward(ops, &saved.x, &saved.inverse_rms, &dnormed, Write::Add, gradient),
        None => Ok(()),
    }
}

fn project_backward<B: Ops>(
    ops: &B,
    block: &mut AttentionBlock<B>,
    pass: &Pass<'_, B>,
    saved: &AttentionSaved<B::Tensor>,
    [dq, dk, dv]: [&B::Tensor; 3],
    mut dnormed: Option<&mut B::Tensor>,
) -> Result {
    let [mut normed, mut inverse_rms] = <[B::Tensor; 2]>::default();
    if block.qkv.is_trained() {
        block.norm.forward(ops, &saved.x, &mut normed, &mut inverse_rms)?;
    }
    let (x, draws) = (&normed, pass.draws);
    match &mut block.qkv {
        QkvProjections::Split { q_proj, k_proj, v_proj } => {
            q_proj.backward(ops, &saved.qkv.q, x, draws, dq, dnormed.as_deref_mut().map(|dx| (Write::Replace, dx)))?;
            k_proj.backward(ops, &saved.qkv.k, x, draws, dk, dnormed.as_deref_mut().map(|dx| (Write::Add, dx)))?;
            v_proj.backward(ops, &saved.qkv.v, x, draws, dv, dnormed.map(|dx| (Write::Add, dx)))
        }
        QkvProjections::Fused { qkv_proj } => {
            let mut joined = B::Tensor::default();
            ops.join_columns(&[dq, dk, dv], &mut joined)?;
            qkv_proj.backward(ops, &saved.qkv.q, x, draws, &joined, dnormed.map(|dx| (Write::Replace, dx)))
        }
    }
}

impl<B: Ops> QkvProjections<B> {
    fn is_trained(&self) -> bool {
        match self {
            Self::Split { q_proj, k_proj, v_proj } => q_proj.is_trained() || k_proj.is_trained() || v_proj.is_trained(),
            Self::Fused { qkv_proj } => qkv_proj.is_trained(),
        }
    }
}
