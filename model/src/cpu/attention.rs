//! Attention of one head over one document, a block of queries at a time.
//!
//! For each block the scores with every key it may see are computed as one product, so memory grows with the block and the
//! document, not with the document's square. Keys before a window and after the block are never touched.

use std::ops::Range;

use super::instructions::{InstructionSet, multiversion};
use super::product::{Into, Target, View, product};
use super::vector::{dot, exp, max, sum, tanh};
use crate::ops::AttentionShape;

/// Queries per block.
const QUERY_BLOCK: usize = 64;

/// One head's queries of one document among its keys.
#[derive(Clone, Copy)]
pub(super) struct Head<'a> {
    /// Instruction set of the kernels.
    pub set: InstructionSet,
    /// Rules.
    pub shape: &'a AttentionShape,
    /// Position of the first query; the keys begin at position 0.
    pub start: usize,
    /// Number of queries.
    pub queries: usize,
}

/// Some columns of a row-major matrix.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a> {
    /// Values from the first row's first column on.
    pub values: &'a [f32],
    /// Distance of two rows.
    pub stride: usize,
}

impl<'a> Columns<'a> {
    /// The same matrix with another origin.
    pub(super) fn from(self, row: usize, column: usize) -> Self {
        Self { values: self.values.get(row * self.stride + column..).unwrap_or_default(), ..self }
    }

    fn view(self, rows: Range<usize>, columns: usize) -> View<'a> {
        let values = self.values.get(rows.start * self.stride..).unwrap_or_default();
        View::new(values, rows.len(), columns, self.stride)
    }

    fn row(self, row: usize, columns: usize) -> &'a [f32] {
        &self.values[row * self.stride..][..columns]
    }
}

impl Head<'_> {
    /// The output and, where wanted, each query's log of the summed exponentials.
    ///
    /// # Safety
    /// Nobody else may touch this head's rows of `y` and its column of `logsumexp` meanwhile.
    pub(super) unsafe fn forward(
        &self,
        q: Columns<'_>,
        k: Columns<'_>,
        v: Columns<'_>,
        y: Target<'_>,
        logsumexp: Option<Target<'_>>,
    ) {
        let head_dim = self.shape.head_dim;
        let mut scores = Vec::new();
        for (queries, keys) in self.blocks() {
            self.scores(q, k, queries.clone(), keys.clone(), &mut scores);
            for (row, query) in scores.chunks_exact_mut(keys.len()).zip(queries.clone()) {
                let log = softmax(self.set, row, self.visible(query, &keys), self.shape.soft_cap);
                if let Some(logsumexp) = logsumexp {
                    // SAFETY: the caller vouches for this head's column.
                    unsafe { logsumexp.row(query, 0..1)[0] = log };
                }
            }
            let weights = View::new(&scores, queries.len(), keys.len(), keys.len());
            let values = v.view(keys, head_dim);
            // SAFETY: the caller vouches for this head's rows.
            unsafe { product(self.set, 1.0, weights, values, Into::Replace, y.offset(queries.start, 0)) };
        }
    }

    /// The gradients, `dq` replaced, `dk` and `dv` added to.
    ///
    /// # Safety
    /// Nobody else may touch this head's rows of the three meanwhile.
    pub(super) unsafe fn backward(&self, [q, k, v, y, logsumexp, dy]: [Columns<'_>; 6], [dq, dk, dv]: [Target<'_>; 3]) {
        let head_dim = self.shape.head_dim;
        let (mut weights, mut slopes) = (Vec::new(), Vec::new());
        for (queries, keys) in self.blocks() {
            let width = keys.len();
            self.scores(q, k, queries.clone(), keys.clone(), &mut weights);
            let dy_block = dy.view(queries.clone(), head_dim);
            slopes.resize(weights.len(), 0.0);
            let target = Target::new(&mut slopes, width);
            // SAFETY: the buffer is this thread's own.
            unsafe {
                product(self.set, 1.0, dy_block, v.view(keys.clone(), head_dim).transposed(), Into::Replace, target)
            };
            let rows = weights.chunks_exact_mut(width).zip(slopes.chunks_exact_mut(width));
            for ((weights, slopes), query) in rows.zip(queries.clone()) {
                let visible = self.visible(query, &keys);
                let log = logsumexp.row(query, 1)[0];
                let along = dot(dy.row(query, head_dim), y.row(query, head_dim));
                softmax_backward(self.set, weights, slopes, visible, log, along, self.shape.soft_cap);
            }
            let weights = View::new(&weights, queries.len(), width, width);
            let slopes = View::new(&slopes, queries.len(), width, width);
            let (q, k) = (q.view(queries.clone(), head_dim), k.view(keys.clone(), head_dim));
            let (dq, dk, dv) = (dq.offset(queries.start, 0), dk.offset(keys.start, 0), dv.offset(keys.start, 0));
            // SAFETY: the caller vouches for this head's rows.
            unsafe {
                product(self.set, 1.0, weights.transposed(), dy_block, Into::Add, dv);
                product(self.set, self.shape.scale, slopes, k, Into::Replace, dq);
                product(self.set, self.shape.scale, slopes.transposed(), q, Into::Add, dk);
            }
        }
    }

    /// Blocks of queries, each with the keys that some query of it sees.
    fn blocks(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let (start, queries, window) = (self.start, self.queries, self.shape.window);
        (0..queries).step_by(QUERY_BLOCK).map(move |first| {
            let last = queries.min(first + QUERY_BLOCK);
            let first_key = window.map_or(0, |window| (start + first + 1).saturating_sub(window));
            (first..last, first_key..start + last)
        })
    }

    /// Of a block's keys those that one query sees.
    fn visible(&self, query: usize, keys: &Range<usize>) -> Range<usize> {
        let position = self.start + query;
        let first = self.shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
        first.max(keys.start) - keys.start..position + 1 - keys.start
    }

    /// `scale · q · kᵀ` of a block.
    fn scores(&self, q: Columns<'_>, k: Columns<'_>, queries: Range<usize>, keys: Range<usize>, scores: &mut Vec<f32>) {
        let head_dim = self.shape.head_dim;
        scores.resize(queries.len() * keys.len(), 0.0);
        let target = Target::new(scores, keys.len());
        let (q, k) = (q.view(queries, head_dim), k.view(keys, head_dim).transposed());
        // SAFETY: the buffer is this thread's own.
        unsafe { product(self.set, self.shape.scale, q, k, Into::Replace, target) };
    }
}

multiversion! {
    /// Turns one query's scores into weights, zero where it does not see, and returns the log of the summed exponentials.
    fn softmax(scores: &mut [f32], visible: Range<usize>, soft_cap: Option<f32>) -> f32 {
        scores[..visible.start].fill(0.0);
        scores[visible.end..].fill(0.0);
        let scores = &mut scores[visible];
        if let Some(cap) = soft_cap {
            scores.iter_mut().for_each(|score| *score = cap * tanh(*score / cap));
        }
        let largest = max(scores);
        scores.iter_mut().for_each(|score| *score = exp(*score - largest));
        let total = sum(scores.len(), |index| scores[index]);
        let inverse = 1.0 / total;
        scores.iter_mut().for_each(|score| *score *= inverse);
        largest + total.ln()
    }
}

multiversion! {
    /// From one query's scores to its weights, and from the gradients of those to the gradients of the scores.
    fn softmax_backward(
        scores: &mut [f32],
        slopes: &mut [f32],
        visible: Range<usize>,
        logsumexp: f32,
        along: f32,
        soft_cap: Option<f32>,
    ) {
        for hidden in [0..visible.start, visible.end..scores.len()] {
            scores[hidden.clone()].fill(0.0);
            slopes[hidden].fill(0.0);
        }
        let elements = scores[visible.clone()].iter_mut().zip(&mut slopes[visible]);
        match soft_cap {
            None => elements.for_each(|(score, slope)| {
                let weight = exp(*score - logsumexp);
                (*score, *slope) = (weight, weight * (*slope - along));
            }),
            Some(cap) => elements.for_each(|(score, slope)| {
                let t = tanh(*score / cap);
                let weight = exp(cap * t - logsumexp);
                (*score, *slope) = (weight, weight * (*slope - along) * (1.0 - t * t));
            }),
        }
    }
}
