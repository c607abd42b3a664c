//! Causal attention over documents, a block of queries at a time.
//!
//! Scores exist for one block of queries and the keys it can see, so memory does not grow with the square of a
//! document, and keys that the window or the diagonal hides from a whole block are never touched.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};

use crate::batch::Documents;
use crate::ops::{AttentionOperands, AttentionShape};

/// Queries whose scores exist at a time.
const QUERY_BLOCK: usize = 512;

/// A block of queries of one document and the keys it can see.
struct Block {
    /// Rows of the queries in the activation.
    queries: Range<usize>,
    /// Positions of the keys in the document.
    keys: Range<usize>,
    /// Position of the first query in the document.
    first: usize,
}

/// Cuts the new rows of a document, which stand at `rows` and begin at position `start`, into blocks.
fn blocks(rows: Range<usize>, start: usize, window: Option<usize>) -> impl Iterator<Item = Block> {
    let from = rows.start;
    rows.clone().step_by(QUERY_BLOCK).map(move |begin| {
        let queries = begin..(begin + QUERY_BLOCK).min(rows.end);
        let first = start + begin - from;
        let last = first + queries.len() - 1;
        let oldest = window.map_or(0, |window| (first + 1).saturating_sub(window));
        Block { queries, keys: oldest..last + 1, first }
    })
}

impl Block {
    /// 0 where a query sees a key, −∞ elsewhere: `(1, 1, queries, keys)`.
    fn mask(&self, window: Option<usize>, device: &Device) -> Result<Tensor> {
        let window = window.unwrap_or(usize::MAX);
        let sees = |query: usize, key: usize| key <= query && query - key < window;
        let mask = (0..self.queries.len()).flat_map(|query| {
            let query = self.first + query;
            self.keys.clone().map(move |key| if sees(query, key) { 0.0 } else { f32::NEG_INFINITY })
        });
        Tensor::from_vec(mask.collect::<Vec<f32>>(), (1, 1, self.queries.len(), self.keys.len()), device)
    }
}

/// The heads of an attention: how many, and how many queries share a key.
#[derive(Clone, Copy)]
struct Heads {
    kv_heads: usize,
    group: usize,
    head_dim: usize,
}

impl Heads {
    fn of(shape: &AttentionShape) -> Self {
        let AttentionShape { num_attention_heads, num_key_value_heads: kv_heads, head_dim, .. } = *shape;
        Self { kv_heads, group: num_attention_heads / kv_heads, head_dim }
    }

    /// `(rows, heads · head_dim)` of queries as `(kv_heads, group · rows, head_dim)`: the queries that share a key are
    /// rows of one product.
    fn split_queries(self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dim(0)?;
        let x = x.reshape((rows, self.kv_heads, self.group, self.head_dim))?.permute((1, 2, 0, 3))?.contiguous()?;
        x.reshape((self.kv_heads, self.group * rows, self.head_dim))
    }

    /// The inverse of [`Heads::split_queries`].
    fn join_queries(self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dim(1)? / self.group;
        let x = x.reshape((self.kv_heads, self.group, rows, self.head_dim))?.permute((2, 0, 1, 3))?.contiguous()?;
        x.reshape((rows, self.kv_heads * self.group * self.head_dim))
    }

    /// `(rows, kv_heads · head_dim)` of keys or values as `(kv_heads, rows, head_dim)`.
    fn split_keys(self, x: &Tensor) -> Result<Tensor> {
        x.reshape((x.dim(0)?, self.kv_heads, self.head_dim))?.transpose(0, 1)?.contiguous()
    }

    /// The inverse of [`Heads::split_keys`].
    fn join_keys(self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dim(1)?;
        x.transpose(0, 1)?.contiguous()?.reshape((rows, self.kv_heads * self.head_dim))
    }

    /// `(rows, heads)` as `(kv_heads, group, rows, 1)`.
    fn split_statistics(self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dim(0)?;
        x.reshape((rows, self.kv_heads, self.group, 1))?.permute((1, 2, 0, 3))?.contiguous()
    }

    /// The inverse of [`Heads::split_statistics`].
    fn join_statistics(self, x: &Tensor) -> Result<Tensor> {
        let rows = x.dim(2)?;
        x.squeeze(3)?.permute((2, 0, 1))?.contiguous()?.reshape((rows, self.kv_heads * self.group))
    }

    /// Scores `(kv_heads, group · rows, keys)` with the group a dimension of its own, and back.
    fn ungroup(self, scores: &Tensor) -> Result<Tensor> {
        let (_, rows, keys) = scores.dims3()?;
        scores.reshape((self.kv_heads, self.group, rows / self.group, keys))
    }

    fn regroup(self, scores: &Tensor) -> Result<Tensor> {
        let (_, _, rows, keys) = scores.dims4()?;
        scores.reshape((self.kv_heads, self.group * rows, keys))
    }
}

/// `scale · q·kᵀ`, and its `tanh` where the scores are capped: `(kv_heads, group, queries, keys)`.
struct Scores {
    capped: Tensor,
    tanh: Option<Tensor>,
}

fn scores(q: &Tensor, k: &Tensor, heads: Heads, shape: &AttentionShape) -> Result<Scores> {
    let scores = heads.ungroup(&(q.matmul(&k.transpose(1, 2)?)? * f64::from(shape.scale))?)?;
    let Some(cap) = shape.soft_cap else { return Ok(Scores { capped: scores, tanh: None }) };
    let tanh = (scores / f64::from(cap))?.tanh()?;
    Ok(Scores { capped: (&tanh * f64::from(cap))?, tanh: Some(tanh) })
}

/// The output of a block, `(queries, heads · head_dim)`, and its log-sum-exp, `(queries, heads)`.
fn forward_block(
    block: &Block,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    shape: &AttentionShape,
) -> Result<(Tensor, Tensor)> {
    let heads = Heads::of(shape);
    let scores = scores(&heads.split_queries(q)?, &heads.split_keys(k)?, heads, shape)?;
    let masked = scores.capped.broadcast_add(&block.mask(shape.window, q.device())?)?;
    let greatest = masked.max_keepdim(3)?;
    let exponentials = masked.broadcast_sub(&greatest)?.exp()?;
    let sum = exponentials.sum_keepdim(3)?;
    let probabilities = exponentials.broadcast_div(&sum)?;
    let y = heads.regroup(&probabilities)?.matmul(&heads.split_keys(v)?)?;
    let logsumexp = (greatest + sum.log()?)?;
    Ok((heads.join_queries(&y)?, heads.join_statistics(&logsumexp)?))
}

/// Attention within each document: the output and its log-sum-exp, `(rows, heads)`.
pub(super) fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    documents: &Documents,
    shape: &AttentionShape,
) -> Result<(Tensor, Tensor)> {
    let (mut outputs, mut statistics) = (Vec::new(), Vec::new());
    for span in documents.spans() {
        for block in blocks(span.rows.clone(), 0, shape.window) {
            let rows = |x: &Tensor, rows: Range<usize>| x.narrow(0, rows.start, rows.len());
            let keys = span.rows.start + block.keys.start..span.rows.start + block.keys.end;
            let (q, k, v) = (rows(q, block.queries.clone())?, rows(k, keys.clone())?, rows(v, keys)?);
            let (output, logsumexp) = forward_block(&block, &q, &k, &v, shape)?;
            outputs.push(output);
            statistics.push(logsumexp);
        }
    }
    Ok((Tensor::cat(&outputs, 0)?, Tensor::cat(&statistics, 0)?))
}

/// Attention of new rows over the cached keys and values of their sequences.
pub(super) fn cached(
    q: &Tensor,
    keys: &[Tensor],
    values: &[Tensor],
    documents: &Documents,
    shape: &AttentionShape,
) -> Result<Tensor> {
    let mut outputs = Vec::new();
    for span in documents.spans() {
        for block in blocks(span.rows.clone(), span.start, shape.window) {
            let of_keys = |x: &Tensor| x.narrow(0, block.keys.start, block.keys.len());
            let q = q.narrow(0, block.queries.start, block.queries.len())?;
            let (k, v) = (of_keys(&keys[span.slot])?, of_keys(&values[span.slot])?);
            outputs.push(forward_block(&block, &q, &k, &v, shape)?.0);
        }
    }
    Tensor::cat(&outputs, 0)
}

/// The gradients of queries, keys and values.
///
/// With `P` the probabilities, which are computed again from the log-sum-exp, and `D` the row sums of `dy ∘ y`: `dV =
/// PᵀdY`, `dS = P ∘ (dY·Vᵀ − D)`, through the cap times `1 − tanh²`, `dQ = scale · dS·K`, `dK = scale · dSᵀQ`.
///
/// Source: Dao et al., arXiv:2205.14135, appendix B.
pub(super) fn backward(
    saved: &AttentionOperands<'_, Tensor>,
    dy: &Tensor,
    documents: &Documents,
    shape: &AttentionShape,
) -> Result<[Tensor; 3]> {
    let (mut dq, mut dk, mut dv) = (Vec::new(), Vec::new(), Vec::new());
    for span in documents.spans() {
        let zeros = || Tensor::zeros((span.rows.len(), saved.k.dim(1)?), DType::F32, dy.device());
        let (mut of_keys, mut of_values) = (zeros()?, zeros()?);
        for block in blocks(span.rows.clone(), 0, shape.window) {
            let [block_dq, block_dk, block_dv] = backward_block(&block, saved, dy, span.rows.start, shape)?;
            dq.push(block_dq);
            let (before, after) = (block.keys.start, span.rows.len() - block.keys.end);
            of_keys = (of_keys + block_dk.pad_with_zeros(0, before, after)?)?;
            of_values = (of_values + block_dv.pad_with_zeros(0, before, after)?)?;
        }
        dk.push(of_keys);
        dv.push(of_values);
    }
    Ok([Tensor::cat(&dq, 0)?, Tensor::cat(&dk, 0)?, Tensor::cat(&dv, 0)?])
}

fn backward_block(
    block: &Block,
    saved: &AttentionOperands<'_, Tensor>,
    dy: &Tensor,
    first_row: usize,
    shape: &AttentionShape,
) -> Result<[Tensor; 3]> {
    let heads = Heads::of(shape);
    let of_queries = |x: &Tensor| x.narrow(0, block.queries.start, block.queries.len());
    let of_keys = |x: &Tensor| heads.split_keys(&x.narrow(0, first_row + block.keys.start, block.keys.len())?);
    let split = |x: &Tensor| heads.split_queries(&of_queries(x)?);
    let (q, y, dy) = (split(saved.q)?, split(saved.y)?, split(dy)?);
    let (k, v) = (of_keys(saved.k)?, of_keys(saved.v)?);
    let logsumexp = heads.split_statistics(&of_queries(saved.logsumexp)?)?;

    let Scores { capped, tanh } = scores(&q, &k, heads, shape)?;
    let masked = capped.broadcast_add(&block.mask(shape.window, q.device())?)?;
    let probabilities = masked.broadcast_sub(&logsumexp)?.exp()?;
    let dv = heads.regroup(&probabilities)?.transpose(1, 2)?.matmul(&dy)?;
    let row_sums = heads.ungroup(&(&dy * &y)?.sum_keepdim(2)?)?;
    let of_probabilities = heads.ungroup(&dy.matmul(&v.transpose(1, 2)?)?)?;
    let mut of_scores = (probabilities * of_probabilities.broadcast_sub(&row_sums)?)?;
    if let Some(tanh) = tanh {
        of_scores = (of_scores * (1.0 - tanh.sqr()?)?)?;
    }
    let of_scores = (heads.regroup(&of_scores)? * f64::from(shape.scale))?;
    let dq = of_scores.matmul(&k)?;
    let dk = of_scores.transpose(1, 2)?.matmul(&q)?;
    Ok([heads.join_queries(&dq)?, heads.join_keys(&dk)?, heads.join_keys(&dv)?])
}
