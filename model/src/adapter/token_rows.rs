//! Rows of an embedding or a head that have trained values of their own, while the rest of the matrix is frozen: PEFT's
//! `trainable_token_indices`.
//!
//! The trained values take the place of the rows. They are computed as what they differ from these by, `delta`: the
//! embedding adds it where such a token stands, and a head is the frozen product and a low-rank one beside it, whose A
//! is `delta` and whose B has a one in the row of each token. So no matrix is copied, whatever it is stored as.

use std::collections::BTreeMap;

use crate::ops::{Ops, Result};
use crate::parameter::{Matrix, Parameter};

/// What the values of some rows are the place of.
pub struct TokenRows<B: Ops> {
    /// The number of each token among the rows.
    numbers: BTreeMap<u32, u32>,
    /// The rows of the matrix, times -1.
    minus_base: B::Tensor,
    /// The values less those of the matrix, `[tokens, columns]`.
    delta: B::Tensor,
}

/// Rows of an embedding that is not the head.
pub struct EmbeddingRows<B: Ops> {
    /// The trained values, `[tokens, columns]`.
    pub values: Parameter<B>,
    /// What they take the place of.
    pub rows: TokenRows<B>,
}

impl<B: Ops> TokenRows<B> {
    /// Those of these tokens in a matrix, with these values in their place.
    ///
    /// # Errors
    /// Fails if the device does.
    pub fn new(ops: &B, matrix: &Matrix<B>, tokens: &[u32], values: &B::Tensor) -> Result<Self> {
        let mut base = B::Tensor::default();
        ops.embed(&matrix.weight, tokens, -1.0, &mut base)?;
        let numbers = tokens.iter().copied().zip(0..).collect();
        let mut rows = Self { numbers, minus_base: base, delta: B::Tensor::default() };
        rows.refresh(ops, values)?;
        Ok(rows)
    }

    /// What the values differ from the rows of the matrix by.
    pub(crate) fn delta(&self) -> &B::Tensor {
        &self.delta
    }

    /// Computes what follows from the values again, after they changed.
    pub(crate) fn refresh(&mut self, ops: &B, values: &B::Tensor) -> Result {
        ops.copy(values, &mut self.delta)?;
        ops.add(&self.minus_base, &mut self.delta)
    }

    /// `x[i] += scale · delta[ids[i]]`, where that is one of the tokens.
    pub(crate) fn add_to(&self, ops: &B, ids: &[u32], scale: f32, x: &mut B::Tensor) -> Result {
        let (places, numbers) = self.find(ids);
        if places.is_empty() {
            return Ok(());
        }
        let [mut rows, mut spread] = <[B::Tensor; 2]>::default();
        ops.gather_rows(&self.delta, &numbers, &mut rows)?;
        ops.scale_rows(&mut rows, &vec![scale; places.len()])?;
        ops.scatter_rows(&rows, &places, ids.len(), &mut spread)?;
        ops.add(&spread, x)
    }

    /// `gradient[number of ids[i]] += scale · dx[i]`, where that is one of the tokens.
    pub(crate) fn add_gradient(
        &self,
        ops: &B,
        ids: &[u32],
        dx: &B::Tensor,
        scale: f32,
        gradient: &mut B::Tensor,
    ) -> Result {
        let (places, numbers) = self.find(ids);
        if places.is_empty() {
            return Ok(());
        }
        let mut rows = B::Tensor::default();
        ops.gather_rows(dx, &places, &mut rows)?;
        ops.embed_gradient(&numbers, &rows, scale, gradient)
    }

    /// Where the tokens stand among these, and their numbers.
    fn find(&self, ids: &[u32]) -> (Vec<u32>, Vec<u32>) {
        (0..).zip(ids).filter_map(|(place, id)| Some((place, *self.numbers.get(id)?))).unzip()
    }
}
