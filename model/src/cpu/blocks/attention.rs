//! The fused attention block: q, k and v side by side in one matrix, turned in place, their gradients likewise.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::ops::Range;

use profile::Work;

use super::super::operand::{Operand, OperandBuffer};
use super::super::product::View;
use super::super::{Cpu, Tensor, norm, pointwise};
use super::prepared::{Input, Wanted};
use super::projection::{is_covered, reads_values};
use crate::adapter::Projection;
use crate::blocks::composed::{PostNormSaved, branch_gradient};
use crate::blocks::{AttentionBlock, InputGradient, Norm, Pass, QkNorms, QkvProjections};
use crate::ops::{AttentionShape, Compute, Result, RopeTables, Rotation, Write};

/// What the fused attention block keeps for its backward; the normed input is computed again.
#[derive(Default)]
pub(super) struct FusedAttentionSaved {
    x: Tensor,
    inverse_rms: Tensor,
    head_norms: HeadNormsSaved,
    /// Queries, keys and values side by side, after norms and RoPE, as attention reads them: rounded where bf16 is
    /// computed in.
    qkv: OperandBuffer,
    /// The output of attention.
    y: Tensor,
    logsumexp: Tensor,
    low_rank: LowRank,
    post_norm: PostNormSaved<Tensor>,
}

/// What went through the low rank of the adapters; that of a projection to q, k and v is in `q`.
#[derive(Default)]
struct LowRank {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
}

/// What the norms over the heads of q and k keep: their input, side by side, and one number per head.
#[derive(Default)]
struct HeadNormsSaved {
    x: Tensor,
    inverse_rms: Tensor,
}

/// Columns of q, k and v in a matrix that has them side by side.
struct Columns {
    q: usize,
    kv: usize,
}

impl Columns {
    fn new(shape: &AttentionShape) -> Self {
        let heads = |heads| heads * shape.head_dim;
        Self { q: heads(shape.num_attention_heads), kv: heads(shape.num_key_value_heads) }
    }

    fn q(&self) -> Range<usize> {
        0..self.q
    }

    fn k(&self) -> Range<usize> {
        self.q..self.q + self.kv
    }

    fn v(&self) -> Range<usize> {
        self.q + self.kv..self.all()
    }

    fn all(&self) -> usize {
        self.q + 2 * self.kv
    }

    /// The first column of each.
    fn firsts(&self) -> [usize; 3] {
        [self.q(), self.k(), self.v()].map(|columns| columns.start)
    }
}

/// Whether this computes the block.
pub(super) fn covers(block: &AttentionBlock<Cpu>) -> bool {
    block.qkv.all(is_covered) && is_covered(&block.o_proj)
}

impl QkvProjections<Cpu> {
    fn all(&self, is: impl Fn(&Projection<Cpu>) -> bool) -> bool {
        match self {
            Self::Split { q_proj, k_proj, v_proj } => is(q_proj) && is(k_proj) && is(v_proj),
            Self::Fused { qkv_proj } => is(qkv_proj),
        }
    }

    fn any(&self, is: impl Fn(&Projection<Cpu>) -> bool) -> bool {
        !self.all(|projection| !is(projection))
    }
}

impl Cpu {
    /// The forward; see [`crate::blocks::Blocks::attention_block`].
    pub(super) fn fused_attention(
        &self,
        block: &AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        x: &mut Tensor,
        saved: &mut FusedAttentionSaved,
    ) -> Result {
        self.queries_keys_values(block, pass, x, saved)?;
        let FusedAttentionSaved { qkv, y, logsumexp, low_rank, post_norm, .. } = saved;
        let columns = Columns::new(&block.shape);
        y.reshape(&self.buffers, x.rows(), columns.q);
        logsumexp.reshape(&self.buffers, x.rows(), block.shape.num_attention_heads);
        let qkv = qkv.qkv(columns.firsts());
        // SAFETY: both are borrowed for this call alone.
        unsafe { self.attend_columns(qkv, pass.documents, &block.shape, y.target(), logsumexp.target()) };
        let mut buffer = OperandBuffer::default();
        let (o_proj, o_norm) = (&block.o_proj, block.post_norm.as_ref());
        self.add_projected(o_proj, o_norm, self.input_of(y, &mut buffer), pass.draws, x, &mut low_rank.o, post_norm)
    }

    /// Norms and projects the residual stream into q, k and v, ready for attention.
    fn queries_keys_values(
        &self,
        block: &AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        x: &Tensor,
        saved: &mut FusedAttentionSaved,
    ) -> Result {
        let FusedAttentionSaved { x: input, inverse_rms, head_norms, qkv, low_rank, .. } = saved;
        let columns = Columns::new(&block.shape);
        let wanted = Wanted::with_values(block.qkv.any(reads_values));
        let normed = self.normed(&block.norm, x, wanted, Some(input), inverse_rms);
        // What was kept before goes first: its buffer may serve again.
        *qkv = OperandBuffer::default();
        let mut products = self.shaped(x.rows(), columns.all());
        let projections = match &block.qkv {
            QkvProjections::Split { q_proj, k_proj, v_proj } => vec![
                (q_proj, columns.q(), &mut low_rank.q),
                (k_proj, columns.k(), &mut low_rank.k),
                (v_proj, columns.v(), &mut low_rank.v),
            ],
            QkvProjections::Fused { qkv_proj } => vec![(qkv_proj, 0..columns.all(), &mut low_rank.q)],
        };
        for (projection, columns, low_rank) in projections {
            let y = products.view_mut().column_range(columns);
            self.project(projection, normed.input(), pass.draws, Write::Replace, y, low_rank)?;
        }
        self.norm_and_turn_heads(block, pass, products, qkv, head_norms);
        Ok(())
    }

    /// Norms the heads of q and k, where the block does, and turns them, in place; rounds them, with v, where attention
    /// reads them so.
    fn norm_and_turn_heads(
        &self,
        block: &AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        mut products: Tensor,
        kept: &mut OperandBuffer,
        saved: &mut HeadNormsSaved,
    ) {
        let _kernel =
            self.profile.kernel("norm and turn heads", || Work::values(2 * products.rows() * products.columns()));
        let (rows, columns, shape) = (products.rows(), Columns::new(&block.shape), &block.shape);
        let (turned, count) = (columns.q + columns.kv, shape.num_attention_heads + shape.num_key_value_heads);
        let normed = block.qk_norms.as_ref().map(|norms| {
            saved.x.reshape(&self.buffers, rows, turned);
            saved.inverse_rms.reshape(&self.buffers, rows, count);
            (norms, saved.x.target(), saved.inverse_rms.target())
        });
        let positions = pass.rope.rows(pass.documents);
        let rounded =
            (self.compute == Compute::Bf16).then(|| self.heads_target(rows, columns.all(), shape.head_dim, &mut *kept));
        let qkv = products.target();
        self.each_block(rows, turned, |rows| {
            for row in rows {
                // SAFETY: each row is written once.
                let heads = unsafe { qkv.row(row, 0..columns.all()) };
                let qk = &mut heads[..turned];
                if let Some((norms, x, inverse_rms)) = normed {
                    // SAFETY: as above.
                    let (x, inverse_rms) = unsafe { (x.row(row, 0..turned), inverse_rms.row(row, 0..count)) };
                    x.copy_from_slice(qk);
                    for (norm, columns, heads) in of_heads(norms, &columns, shape) {
                        let (x, y) = (&x[columns.clone()], &mut qk[columns]);
                        norm::forward(self.set, x, norm.weight.value.values(), norm.rms, y, &mut inverse_rms[heads]);
                    }
                }
                self.turn(qk, pass.rope, positions[row], Rotation::Forward);
                if let Some(rounded) = rounded {
                    // SAFETY: as above.
                    unsafe { rounded.write(row, 0, heads) };
                }
            }
        });
        if self.compute != Compute::Bf16 {
            *kept = OperandBuffer::exact(products);
        }
    }

    /// Turns the heads of a row.
    fn turn(&self, heads: &mut [f32], tables: &RopeTables<Tensor>, position: u32, rotation: Rotation) {
        let position = position as usize;
        let (cos, sin) = (tables.cos.view().row(position), tables.sin.view().row(position));
        pointwise::rotate(self.set, heads, tables.head_dim, cos, sin, rotation);
    }

    /// The backward; see [`crate::blocks::Blocks::attention_block_backward`].
    pub(super) fn fused_attention_backward(
        &self,
        block: &mut AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        saved: &mut FusedAttentionSaved,
        gradient: &mut Tensor,
        input_gradient: InputGradient,
    ) -> Result {
        let columns = Columns::new(&block.shape);
        let mut dqkv = self.attention_gradients(block, pass, saved, gradient)?;
        let buffers = self.heads_backward(block, pass, &mut dqkv, &saved.head_norms);
        let FusedAttentionSaved { x, inverse_rms, low_rank, .. } = saved;
        let needed = input_gradient == InputGradient::Needed || block.norm.weight.is_trained();
        let mut dnormed = needed.then(|| self.shaped(x.rows(), x.columns()));
        let is_trained = block.qkv.any(Projection::is_trained);
        let normed = is_trained.then(|| self.normed_again(&block.norm, x)).transpose()?;
        let projections = match &mut block.qkv {
            QkvProjections::Split { q_proj, k_proj, v_proj } => vec![
                (q_proj, columns.q(), &low_rank.q),
                (k_proj, columns.k(), &low_rank.k),
                (v_proj, columns.v(), &low_rank.v),
            ],
            QkvProjections::Fused { qkv_proj } => vec![(qkv_proj, 0..columns.all(), &low_rank.q)],
        };
        let mut write = Write::Replace;
        for ((projection, columns, low_rank), buffer) in projections.into_iter().zip(&buffers) {
            let values = dqkv.view().column_range(columns);
            let operand = buffer.as_ref().map_or(Operand::F32(values), OperandBuffer::operand);
            let dy = Input { operand, values: Some(values) };
            let (normed, into) = (normed.as_ref().map(Tensor::view), dnormed.as_mut().map(|dx| (write, dx)));
            self.project_backward(projection, low_rank, normed, pass.draws, dy, into)?;
            write = Write::Add;
        }
        match dnormed {
            Some(dnormed) => block.norm.backward(self, x, inverse_rms, &dnormed, Write::Add, gradient),
            None => Ok(()),
        }
    }

    /// The gradients of q, k and v as attention read them, side by side.
    fn attention_gradients(
        &self,
        block: &mut AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        saved: &FusedAttentionSaved,
        gradient: &Tensor,
    ) -> Result<Tensor> {
        let FusedAttentionSaved { qkv, y, logsumexp, low_rank, post_norm, .. } = saved;
        let columns = Columns::new(&block.shape);
        let mut dy = self.shaped(y.rows(), y.columns());
        let branch = branch_gradient(self, block.post_norm.as_mut(), post_norm, gradient)?;
        let mut buffer = OperandBuffer::default();
        let of_branch = self.input_of(branch.as_ref().unwrap_or(gradient), &mut buffer);
        let into = Some((Write::Replace, &mut dy));
        self.project_backward(&mut block.o_proj, &low_rank.o, Some(y.view()), pass.draws, of_branch, into)?;
        let mut dqkv = self.shaped(y.rows(), columns.all());
        let qkv = qkv.qkv(columns.firsts());
        let operands = [y, logsumexp, &dy].map(|operand| operand.columns_from(0));
        let gradients = dqkv.target();
        let gradients = columns.firsts().map(|first| gradients.offset(0, first));
        // SAFETY: the matrix of gradients is this function's own.
        unsafe { self.attend_columns_backward(qkv, operands, pass.documents, &block.shape, gradients) };
        Ok(dqkv)
    }

    /// Turns the gradients of q and k back, takes them through the norms of the heads, and rounds all for the
    /// projections' products: a buffer each where they are rounded.
    fn heads_backward(
        &self,
        block: &mut AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        dqkv: &mut Tensor,
        saved: &HeadNormsSaved,
    ) -> [Option<OperandBuffer>; 3] {
        let _kernel =
            self.profile.kernel("norm and turn heads backward", || Work::values(3 * dqkv.rows() * dqkv.columns()));
        let (rows, shape, columns) = (dqkv.rows(), block.shape, Columns::new(&block.shape));
        let turned = columns.q + columns.kv;
        let positions = pass.rope.rows(pass.documents);
        let norms_are_trained = block.qk_norms.as_ref().is_some_and(QkNorms::is_trained);
        if norms_are_trained {
            let dqkv = dqkv.target();
            self.each_block(rows, turned, |rows| {
                // SAFETY: each row is written once.
                rows.for_each(|row| {
                    self.turn(unsafe { dqkv.row(row, 0..turned) }, pass.rope, positions[row], Rotation::Backward)
                });
            });
        }
        if let Some(norms) = &mut block.qk_norms {
            self.head_norm_gradients(norms, &shape, dqkv.view(), saved);
        }
        let parts = match &block.qkv {
            QkvProjections::Split { .. } => vec![columns.q(), columns.k(), columns.v()],
            QkvProjections::Fused { .. } => std::iter::once(0..columns.all()).collect(),
        };
        let mut buffers = <[Option<OperandBuffer>; 3]>::default();
        let mut targets = Vec::new();
        if self.compute == Compute::Bf16 {
            for (columns, buffer) in parts.iter().zip(&mut buffers) {
                let buffer = buffer.insert(OperandBuffer::default());
                targets.push((columns.clone(), self.operand_target(rows, columns.len(), buffer)));
            }
        }
        let norms = block.qk_norms.as_ref();
        let dqkv = dqkv.target();
        self.each_block(rows, columns.all(), |rows| {
            let mut scratch = vec![0.0; if norms.is_some() { turned } else { 0 }];
            for row in rows {
                // SAFETY: each row is written once.
                let gradients = unsafe { dqkv.row(row, 0..columns.all()) };
                let qk = &mut gradients[..turned];
                if !norms_are_trained {
                    self.turn(qk, pass.rope, positions[row], Rotation::Backward);
                }
                if let Some(norms) = norms {
                    scratch.copy_from_slice(qk);
                    qk.fill(0.0);
                    let (x, inverse_rms) = (saved.x.view().row(row), saved.inverse_rms.view().row(row));
                    for (norm, columns, heads) in of_heads(norms, &columns, &shape) {
                        let (x, inverse_rms) = (&x[columns.clone()], &inverse_rms[heads]);
                        let (dy, dx) = (&scratch[columns.clone()], &mut qk[columns]);
                        norm::backward(self.set, x, norm.weight.value.values(), norm.rms, inverse_rms, dy, dx);
                    }
                }
                for (columns, target) in &targets {
                    // SAFETY: as above.
                    unsafe { target.write(row, 0, &gradients[columns.clone()]) };
                }
            }
        });
        buffers
    }

    /// Adds the gradients of the weights of the norms over heads, where they are trained; `dqk` is that of their
    /// outputs.
    fn head_norm_gradients(
        &self,
        norms: &mut QkNorms<Self>,
        shape: &AttentionShape,
        dqk: View<'_>,
        saved: &HeadNormsSaved,
    ) {
        let columns = Columns::new(shape);
        let heads = shape.num_attention_heads;
        let parts = [
            (&mut norms.q_norm, columns.q(), 0..heads),
            (&mut norms.k_norm, columns.k(), heads..heads + shape.num_key_value_heads),
        ];
        for (norm, columns, heads) in parts {
            let (_, Some(gradient)) = norm.weight.split() else { continue };
            for row in 0..dqk.rows() {
                let (x, dy) = (&saved.x.view().row(row)[columns.clone()], &dqk.row(row)[columns.clone()]);
                let inverse_rms = &saved.inverse_rms.view().row(row)[heads.clone()];
                norm::weight_gradient(self.set, x, inverse_rms, dy, shape.head_dim, 0, gradient.values_mut());
            }
        }
    }
}

impl QkNorms<Cpu> {
    fn is_trained(&self) -> bool {
        self.q_norm.weight.is_trained() || self.k_norm.weight.is_trained()
    }
}

/// The norms over heads, each with its columns and its heads among those of q and k.
fn of_heads<'a>(
    norms: &'a QkNorms<Cpu>,
    columns: &Columns,
    shape: &AttentionShape,
) -> [(&'a Norm<Cpu>, Range<usize>, Range<usize>); 2] {
    let heads = shape.num_attention_heads;
    let keys = heads..heads + shape.num_key_value_heads;
    [(&norms.q_norm, columns.q(), 0..heads), (&norms.k_norm, columns.k(), keys)]
}
