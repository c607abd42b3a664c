//! Attention over documents, a head of a document at a time on each thread.

use super::attention::{Columns, Head};
use super::product::Target;
use super::{Cache, Cpu, Tensor};
use crate::batch::{Documents, Span};
use crate::ops::{AttentionGradients, AttentionOperands, AttentionShape};

impl Cpu {
    /// Attention of each row within its document; see [`crate::ops::Ops::attention`].
    #[expect(clippy::too_many_arguments, reason = "attention has these operands")]
    pub(super) fn attend(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        documents: &Documents,
        shape: &AttentionShape,
        y: &mut Tensor,
        logsumexp: &mut Tensor,
    ) {
        y.reshape(&self.buffers, q.rows(), q.columns());
        logsumexp.reshape(&self.buffers, q.rows(), shape.num_attention_heads);
        let operands = [q, k, v].map(|tensor| tensor.columns_from(0));
        // SAFETY: both are borrowed for this call alone.
        unsafe { self.attend_columns(operands, documents, shape, y.target(), logsumexp.target()) };
    }

    /// As [`Cpu::attend`], of q, k and v that may be columns of wider matrices.
    ///
    /// # Safety
    /// Nobody else may touch the columns of `y` and `logsumexp` meanwhile.
    pub(super) unsafe fn attend_columns(
        &self,
        [q, k, v]: [Columns<'_>; 3],
        documents: &Documents,
        shape: &AttentionShape,
        y: Target<'_>,
        logsumexp: Target<'_>,
    ) {
        self.each_head(documents, shape.num_attention_heads, shape.head_dim, |span, head| {
            let first = span.rows.start;
            let (column, key_column) = (head * shape.head_dim, key_head(shape, head) * shape.head_dim);
            let (q, k, v) = (q.from(first, column), k.from(first, key_column), v.from(first, key_column));
            let (y, logsumexp) = (y.offset(first, column), logsumexp.offset(first, head));
            // SAFETY: each document and head has its own rows and columns.
            unsafe {
                Head { set: self.set, shape, start: 0, queries: span.rows.len() }.forward(q, k, v, y, Some(logsumexp))
            };
        });
    }

    /// The gradients of [`Cpu::attend`]; see [`crate::ops::Ops::attention_backward`].
    pub(super) fn attend_backward(
        &self,
        saved: AttentionOperands<'_, Tensor>,
        dy: &Tensor,
        documents: &Documents,
        shape: &AttentionShape,
        gradients: AttentionGradients<'_, Tensor>,
    ) {
        let AttentionOperands { q, k, v, y, logsumexp } = saved;
        let AttentionGradients { dq, dk, dv } = gradients;
        dq.reshape(&self.buffers, q.rows(), q.columns());
        dk.reshape(&self.buffers, k.rows(), k.columns());
        dv.reshape(&self.buffers, k.rows(), k.columns());
        let operands = [q, k, v, y, logsumexp, dy].map(|tensor| tensor.columns_from(0));
        // SAFETY: the three are borrowed for this call alone.
        unsafe { self.attend_columns_backward(operands, documents, shape, [dq.target(), dk.target(), dv.target()]) };
    }

    /// The gradients of [`Cpu::attend_columns`] with respect to q, k and v, replaced; each may be columns of a wider matrix.
    ///
    /// The operands are q, k, v, y, logsumexp and the gradient of y.
    ///
    /// # Safety
    /// Nobody else may touch the gradients' columns meanwhile.
    pub(super) unsafe fn attend_columns_backward(
        &self,
        operands: [Columns<'_>; 6],
        documents: &Documents,
        shape: &AttentionShape,
        [dq, dk, dv]: [Target<'_>; 3],
    ) {
        let [q, k, v, y, logsumexp, dy] = operands;
        let group = shape.num_attention_heads / shape.num_key_value_heads;
        // The query heads of one key head add to the same gradients: one after the other.
        self.each_head(documents, shape.num_key_value_heads, group * shape.head_dim, |span, key_head| {
            let first = span.rows.start;
            let key_column = key_head * shape.head_dim;
            let (k, v) = (k.from(first, key_column), v.from(first, key_column));
            let (dk, dv) = (dk.offset(first, key_column), dv.offset(first, key_column));
            for row in 0..span.rows.len() {
                for gradient in [dk, dv] {
                    // SAFETY: each document and key head has its own rows and columns.
                    unsafe { gradient.row(row, 0..shape.head_dim) }.fill(0.0);
                }
            }
            for head in key_head * group..(key_head + 1) * group {
                let column = head * shape.head_dim;
                let [q, y, dy] = [q, y, dy].map(|operand| operand.from(first, column));
                let operands = [q, k, v, y, logsumexp.from(first, head), dy];
                // SAFETY: each document and key head has its own rows and columns.
                unsafe {
                    Head { set: self.set, shape, start: 0, queries: span.rows.len() }
                        .backward(operands, [dq.offset(first, column), dk, dv]);
                }
            }
        });
    }

    /// Attention over cached keys and values; see [`crate::ops::Ops::attention_cached`].
    pub(super) fn attend_cached(
        &self,
        q: &Tensor,
        cache: &Cache,
        documents: &Documents,
        shape: &AttentionShape,
        y: &mut Tensor,
    ) {
        y.reshape(&self.buffers, q.rows(), q.columns());
        let y = y.target();
        let width = shape.num_key_value_heads * shape.head_dim;
        self.each_head(documents, shape.num_attention_heads, shape.head_dim, |span, head| {
            let (keys, values) = cache.slot(span.slot);
            let (column, key_column) = (head * shape.head_dim, key_head(shape, head) * shape.head_dim);
            let rows = |values| Columns { values, stride: width };
            let (k, v) = (rows(&keys[key_column..]), rows(&values[key_column..]));
            let head = Head { set: self.set, shape, start: span.start, queries: span.rows.len() };
            // SAFETY: each document and head has its own rows and columns.
            unsafe {
                head.forward(
                    q.columns_from(0).from(span.rows.start, column),
                    k,
                    v,
                    y.offset(span.rows.start, column),
                    None,
                )
            };
        });
    }

    /// Runs a function for each document and each of `heads` heads.
    fn each_head(&self, documents: &Documents, heads: usize, width: usize, run: impl Fn(&Span, usize) + Sync + Send) {
        let spans = documents.spans();
        let scores: usize = spans.iter().map(|span| span.rows.len() * (span.start + span.rows.len())).sum();
        self.each(spans.len() * heads, scores * width, |part| run(&spans[part / heads], part % heads));
    }
}

impl Tensor {
    /// Its columns from one on.
    pub(super) fn columns_from(&self, column: usize) -> Columns<'_> {
        Columns { values: self.values(), stride: self.columns() }.from(0, column)
    }
}

/// The key head that a query head reads.
fn key_head(shape: &AttentionShape, head: usize) -> usize {
    head / (shape.num_attention_heads / shape.num_key_value_heads)
}
