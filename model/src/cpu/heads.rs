//! Attention over documents: blocks of rows of each document and key head, cut over threads.

#![allow(unsafe_code, reason = "kernels: vector instructions, and memory that threads share in parts")]

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::attention::{
    AttentionMask, Backward, Columns, Forward, KEYS, Operands, Qkv, ROWS, Turns, backward, forward, forward_cached,
};
use super::operand::OperandBuffer;
use super::product::Target;
use super::{Cache, Cpu, Tensor, work};
use crate::batch::{Documents, Span};
use crate::ops::{AttentionGradients, AttentionOperands, AttentionShape, Compute};

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
        let mut buffer = OperandBuffer::default();
        let qkv = self.qkv([q, k, v], shape.head_dim, &mut buffer);
        // SAFETY: both are borrowed for this call alone.
        unsafe { self.attend_columns(qkv, documents, shape, y.target(), logsumexp.target()) };
    }

    /// Queries, keys and values as attention reads them; rounded, they come to lie side by side in `buffer`.
    fn qkv<'a>(&self, qkv: [&'a Tensor; 3], head_dim: usize, buffer: &'a mut OperandBuffer) -> Qkv<'a> {
        if self.compute != Compute::Bf16 {
            let [q, k, v] = qkv.map(|tensor| tensor.columns_from(0));
            return Qkv::F32(Operands { q, k, v });
        }
        let [q, k, v] = qkv.map(Tensor::columns);
        let (rows, columns) = (qkv[0].rows(), q + k + v);
        let firsts = [0, q, q + k];
        let target = self.heads_target(rows, columns, head_dim, buffer);
        self.each_block(rows, columns, |rows| {
            for row in rows {
                for (tensor, first) in qkv.into_iter().zip(firsts) {
                    // SAFETY: each row is written once, and heads are whole pairs or no pairs at all.
                    unsafe { target.write(row, first, tensor.view().row(row)) };
                }
            }
        });
        buffer.qkv(firsts)
    }

    /// As [`Cpu::attend`], of q, k and v that may be columns of wider matrices.
    ///
    /// # Safety
    /// Nobody else may touch the columns of `y` and `logsumexp` meanwhile.
    pub(super) unsafe fn attend_columns(
        &self,
        qkv: Qkv<'_>,
        documents: &Documents,
        shape: &AttentionShape,
        y: Target<'_>,
        logsumexp: Target<'_>,
    ) {
        let _kernel = self.profile.kernel("attention", || work::of_attention(work::FORWARD, documents, shape));
        let parts = Parts::new(documents, shape);
        self.each_block_of_rows(&parts, |part| {
            let first = part.span.rows.start;
            let head = Forward {
                shape,
                mask: part.mask,
                y: y.offset(first, part.column),
                logsumexp: Some(logsumexp.offset(first, part.head)),
            };
            let qkv = qkv.from([first, part.column], [first, part.key_column]);
            // SAFETY: each document, head and block has its own rows and columns.
            unsafe { forward(self.set, &head, qkv, part.rows) };
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
        let mut buffer = OperandBuffer::default();
        let qkv = self.qkv([q, k, v], shape.head_dim, &mut buffer);
        let operands = [y, logsumexp, dy].map(|tensor| tensor.columns_from(0));
        let gradients = [dq.target(), dk.target(), dv.target()];
        // SAFETY: the three are borrowed for this call alone.
        unsafe { self.attend_columns_backward(qkv, operands, documents, shape, gradients) };
    }

    /// The gradients of [`Cpu::attend_columns`] with respect to q, k and v, replaced; each may be columns of a wider
    /// matrix.
    ///
    /// The other operands are y, logsumexp and the gradient of y.
    ///
    /// # Safety
    /// Nobody else may touch the gradients' columns meanwhile.
    pub(super) unsafe fn attend_columns_backward(
        &self,
        qkv: Qkv<'_>,
        [y, logsumexp, dy]: [Columns<'_>; 3],
        documents: &Documents,
        shape: &AttentionShape,
        [dq, dk, dv]: [Target<'_>; 3],
    ) {
        let _kernel =
            self.profile.kernel("attention backward", || work::of_attention(work::BACKWARD, documents, shape));
        let parts = Parts::new(documents, shape);
        // Per document and key head, the turns at its blocks of keys.
        let taken: Vec<_> = (0..parts.key_blocks * shape.num_key_value_heads).map(|_| AtomicUsize::new(0)).collect();
        let broken = AtomicBool::new(false);
        self.each_block_of_rows(&parts, |part| {
            let _breaks = BreaksOnPanic(&broken);
            let first = part.span.rows.start;
            let head = Backward {
                shape,
                mask: part.mask,
                qkv: qkv.from([first, part.column], [first, part.key_column]),
                y: y.from(first, part.column),
                logsumexp: logsumexp.from(first, part.head),
                dy: dy.from(first, part.column),
                dq: dq.offset(first, part.column),
                dk: dk.offset(first, part.key_column),
                dv: dv.offset(first, part.key_column),
                turns: Turns { taken: &taken[part.key_blocks], broken: &broken },
            };
            // SAFETY: each document and head has its own rows and columns, whose blocks begin in the order of
            // descending rows.
            unsafe { backward(self.set, &head, part.rows) };
        });
    }

    /// Attention over cached keys and values, in f32 whatever is computed in; see
    /// [`crate::ops::Ops::attention_cached`].
    pub(super) fn attend_cached(
        &self,
        q: &Tensor,
        cache: &Cache,
        documents: &Documents,
        shape: &AttentionShape,
        y: &mut Tensor,
    ) {
        let _kernel = self.profile.kernel("attention cached", || work::of_attention(work::FORWARD, documents, shape));
        y.reshape(&self.buffers, q.rows(), q.columns());
        let (q, y) = (q.columns_from(0), y.target());
        self.each_block_of_rows(&Parts::new(documents, shape), |part| {
            let first = part.span.rows.start;
            let y = y.offset(first, part.column);
            let head = Forward { shape, mask: part.mask, y, logsumexp: None };
            let cached = cache.head(part.span.slot, part.key_column / shape.head_dim);
            // SAFETY: each document, head and block has its own rows and columns.
            unsafe { forward_cached(self.set, &head, q.from(first, part.column), cached, part.rows) };
        });
    }

    /// Runs a function for each part, over the threads. Parts begin in their order.
    fn each_block_of_rows(&self, parts: &Parts<'_>, run: impl Fn(Part<'_>) + Sync + Send) {
        let (heads, together) = (parts.shape.num_key_value_heads, parts.together(self.threads()));
        let groups = parts.blocks.len().div_ceil(together);
        self.each(groups * heads, parts.work(), |index| {
            let first = index / heads * together;
            for block in first..parts.blocks.len().min(first + together) {
                run(parts.part(block, index % heads));
            }
        });
    }
}

/// The parts of an attention: a block of rows of a key head of a document each, large ones first, and blocks of one
/// document by descending rows.
struct Parts<'a> {
    shape: &'a AttentionShape,
    spans: &'a [Span],
    /// The blocks of rows of all documents; the key heads of a block follow each other.
    blocks: Vec<RowBlock>,
    /// Number of blocks of keys in all documents.
    key_blocks: usize,
}

/// A block of rows, of any key head.
struct RowBlock {
    span: usize,
    first_row: usize,
    /// Blocks of keys of the documents before.
    key_blocks_before: usize,
}

/// A block of rows of a key head.
struct Part<'a> {
    span: &'a Span,
    mask: AttentionMask,
    rows: Range<usize>,
    /// The first query head of the group.
    head: usize,
    /// Where that begins in the queries.
    column: usize,
    /// Where the key head begins in the keys.
    key_column: usize,
    /// The blocks of keys of this document and key head, among those of all.
    key_blocks: Range<usize>,
}

impl<'a> Parts<'a> {
    fn new(documents: &'a Documents, shape: &'a AttentionShape) -> Self {
        let spans = documents.spans();
        let group = shape.num_attention_heads / shape.num_key_value_heads;
        let (mut blocks, mut key_blocks) = (Vec::new(), 0);
        for (index, span) in spans.iter().enumerate() {
            let first_rows = (0..span.rows.len() * group).step_by(ROWS);
            blocks.extend(first_rows.map(|first_row| RowBlock {
                span: index,
                first_row,
                key_blocks_before: key_blocks,
            }));
            key_blocks += (span.start + span.rows.len()).div_ceil(KEYS);
        }
        blocks.sort_unstable_by_key(|block| {
            let last_key = spans[block.span].start * group + block.first_row;
            (Reverse(last_key), block.span)
        });
        Self { shape, spans, blocks, key_blocks }
    }

    /// Blocks of one key head that a thread does one after the other. The gradients of keys and values that they add to
    /// stay in its cache; but where more threads are than documents and heads, they would wait for each other.
    fn together(&self, threads: usize) -> usize {
        /// Turns of each thread, at least.
        const TURNS: usize = 8;
        let heads = self.shape.num_key_value_heads;
        if threads > heads * self.spans.len() { 1 } else { (self.blocks.len() * heads / (TURNS * threads)).clamp(1, 8) }
    }

    /// Products of single elements, about.
    fn work(&self) -> usize {
        let scores: usize = self.spans.iter().map(|span| span.rows.len() * (span.start + span.rows.len())).sum();
        scores * self.shape.num_attention_heads * self.shape.head_dim
    }

    fn part(&self, block: usize, key_head: usize) -> Part<'a> {
        let AttentionShape { num_attention_heads, num_key_value_heads, head_dim, window, .. } = *self.shape;
        let block = &self.blocks[block];
        let span = &self.spans[block.span];
        let group = num_attention_heads / num_key_value_heads;
        let mask = AttentionMask { start: span.start, queries: span.rows.len(), group, window };
        let keys = (span.start + span.rows.len()).div_ceil(KEYS);
        let first_key_block = block.key_blocks_before * num_key_value_heads + key_head * keys;
        Part {
            span,
            mask,
            rows: block.first_row..mask.rows().min(block.first_row + ROWS),
            head: key_head * group,
            column: key_head * group * head_dim,
            key_column: key_head * head_dim,
            key_blocks: first_key_block..first_key_block + keys,
        }
    }
}

/// Tells the blocks that wait for this one that it will not come.
struct BreaksOnPanic<'a>(&'a AtomicBool);

impl Drop for BreaksOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

impl Tensor {
    /// Its columns from one on.
    pub(super) fn columns_from(&self, column: usize) -> Columns<'_> {
        Columns { words: self.values(), stride: self.columns() }.from(0, column)
    }
}
