//! Attention over documents, a head of a document at a time on each thread.

use super::attention::{Head, Rows};
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
        let heads = shape.num_attention_heads;
        y.reshape(&self.buffers, q.rows(), q.columns());
        logsumexp.reshape(&self.buffers, q.rows(), heads);
        let (y, logsumexp) = (y.target(), logsumexp.target());
        self.each_head(documents, heads, shape.head_dim, |span, head| {
            let rows = span.rows.clone();
            let (column, key_column) = (head * shape.head_dim, key_head(shape, head) * shape.head_dim);
            let (q, k, v) =
                (q.head(rows.start, column), k.head(rows.start, key_column), v.head(rows.start, key_column));
            let (y, logsumexp) = (y.offset(rows.start, column), logsumexp.offset(rows.start, head));
            // SAFETY: each document and head has its own rows and columns.
            unsafe {
                Head { set: self.set, shape, start: 0, queries: rows.len() }.forward(q, k, v, y, Some(logsumexp))
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
        for gradient in [&mut *dk, &mut *dv] {
            gradient.reshape(&self.buffers, k.rows(), k.columns());
            gradient.values_mut().fill(0.0);
        }
        let (dq, dk, dv) = (dq.target(), dk.target(), dv.target());
        let group = shape.num_attention_heads / shape.num_key_value_heads;
        // The query heads of one key head add to the same gradients: one after the other.
        self.each_head(documents, shape.num_key_value_heads, group * shape.head_dim, |span, key_head| {
            let first = span.rows.start;
            let key_column = key_head * shape.head_dim;
            let (k, v) = (k.head(first, key_column), v.head(first, key_column));
            let (dk, dv) = (dk.offset(first, key_column), dv.offset(first, key_column));
            for head in key_head * group..(key_head + 1) * group {
                let column = head * shape.head_dim;
                let (q, y, dy) = (q.head(first, column), y.head(first, column), dy.head(first, column));
                let operands = [q, k, v, y, logsumexp.head(first, head), dy];
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
            let rows = |values| Rows { values, stride: width };
            let (k, v) = (rows(&keys[key_column..]), rows(&values[key_column..]));
            let head = Head { set: self.set, shape, start: span.start, queries: span.rows.len() };
            // SAFETY: each document and head has its own rows and columns.
            unsafe { head.forward(q.head(span.rows.start, column), k, v, y.offset(span.rows.start, column), None) };
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
    /// One head of one document.
    fn head(&self, first_row: usize, first_column: usize) -> Rows<'_> {
        let first = first_row * self.columns() + first_column;
        Rows { values: self.values().get(first..).unwrap_or_default(), stride: self.columns() }
    }
}

/// The key head that a query head reads.
fn key_head(shape: &AttentionShape, head: usize) -> usize {
    head / (shape.num_attention_heads / shape.num_key_value_heads)
}
