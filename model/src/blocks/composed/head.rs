//! The head: the last norm, the logits a chunk of rows at a time, and their loss.

use std::ops::Range;

use crate::adapter::{Projection, ProjectionSaved};
use crate::blocks::{HeadBlock, HeadLoss, OfRows, TeacherHead};
use crate::ops::{LogitGradient, LossRows, Ops, Result, TokenScore, Write};

/// Scores and backward at once; see [`crate::blocks::Blocks::head_loss`].
///
/// # Errors
/// Fails if the device does.
pub fn head_loss<B: Ops>(
    ops: &B,
    head: &mut HeadBlock<B>,
    output: &mut Projection<B>,
    loss: &HeadLoss<'_, B>,
    x: &B::Tensor,
    scores: &mut Vec<TokenScore>,
    gradient: &mut B::Tensor,
) -> Result {
    let [mut normed, mut inverse_rms] = <[B::Tensor; 2]>::default();
    head.norm.forward(ops, x, &mut normed, &mut inverse_rms)?;
    let [mut rows, mut logits] = <[B::Tensor; 2]>::default();
    let mut saved = ProjectionSaved::default();
    let mut gradients = Vec::new();
    for chunk in chunks(loss.targets.len(), head.chunk_rows) {
        take_rows(ops, &normed, chunk.clone(), &mut rows)?;
        let draws = loss.draws.as_ref().map(|draws| draws.of_rows(chunk.clone()));
        output.forward(ops, &rows, draws.into(), Write::Replace, &mut logits, &mut saved)?;
        let teacher = loss.teacher_logits(ops, chunk.clone())?;
        let of_chunk = loss.rows(chunk, head.soft_cap, teacher.as_ref());
        ops.token_loss(&mut logits, &of_chunk, LogitGradient::InPlace { scale: loss.scale }, scores)?;
        let mut chunk_gradient = B::Tensor::default();
        output.backward(ops, &saved, &rows, draws, &logits, Some((Write::Replace, &mut chunk_gradient)))?;
        gradients.push(chunk_gradient);
    }
    let mut dnormed = B::Tensor::default();
    ops.join_rows(&gradients.iter().collect::<Vec<_>>(), &mut dnormed)?;
    head.norm.backward(ops, x, &inverse_rms, &dnormed, Write::Replace, gradient)
}

impl<'a, B: Ops> HeadLoss<'a, B> {
    /// What the kernel of a chunk of rows needs.
    pub(crate) fn rows<'b>(
        &'b self,
        chunk: Range<usize>,
        soft_cap: Option<f32>,
        teacher: Option<&'b B::Tensor>,
    ) -> LossRows<'b, B::Tensor> {
        let weights = self.weights.map(|weights| &weights[chunk.clone()]);
        LossRows { targets: &self.targets[chunk], weights, loss: self.loss, teacher, soft_cap }
    }

    /// The logits of the teacher for a chunk of rows, after its soft cap; none where there is no teacher.
    pub(crate) fn teacher_logits(&self, ops: &B, chunk: Range<usize>) -> Result<Option<B::Tensor>> {
        let Some(TeacherHead { head, output, x }) = &self.teacher else { return Ok(None) };
        let [mut rows, mut logits] = <[B::Tensor; 2]>::default();
        take_rows(ops, x, chunk, &mut rows)?;
        head_logits(ops, head, output, &rows, &mut logits)?;
        Ok(Some(logits))
    }
}

/// Scores alone; see [`crate::blocks::Blocks::head_scores`].
///
/// # Errors
/// Fails if the device does.
pub fn head_scores<B: Ops>(
    ops: &B,
    head: &HeadBlock<B>,
    output: &Projection<B>,
    x: &B::Tensor,
    targets: &[u32],
    scores: &mut Vec<TokenScore>,
) -> Result {
    let [mut normed, mut inverse_rms, mut rows, mut logits] = <[B::Tensor; 4]>::default();
    head.norm.forward(ops, x, &mut normed, &mut inverse_rms)?;
    for chunk in chunks(targets.len(), head.chunk_rows) {
        take_rows(ops, &normed, chunk.clone(), &mut rows)?;
        output.forward(ops, &rows, OfRows::default(), Write::Replace, &mut logits, &mut ProjectionSaved::default())?;
        let of_chunk = LossRows::scored(&targets[chunk], head.soft_cap);
        ops.token_loss(&mut logits, &of_chunk, LogitGradient::Skip, scores)?;
    }
    Ok(())
}

/// The logits; see [`crate::blocks::Blocks::head_logits`].
///
/// # Errors
/// Fails if the device does.
pub fn head_logits<B: Ops>(
    ops: &B,
    head: &HeadBlock<B>,
    output: &Projection<B>,
    x: &B::Tensor,
    logits: &mut B::Tensor,
) -> Result {
    let [mut normed, mut inverse_rms] = <[B::Tensor; 2]>::default();
    head.norm.forward(ops, x, &mut normed, &mut inverse_rms)?;
    output.forward(ops, &normed, OfRows::default(), Write::Replace, logits, &mut ProjectionSaved::default())?;
    match head.soft_cap {
        Some(cap) => ops.soft_cap(logits, cap),
        None => Ok(()),
    }
}

/// `0 .. rows` in as few pieces of at most `most` rows as will do, all of about one size.
pub(crate) fn chunks(rows: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let size = crate::memory::chunk_rows(rows, most);
    (0..rows).step_by(size).map(move |first| first..rows.min(first + size))
}

fn take_rows<B: Ops>(ops: &B, x: &B::Tensor, rows: Range<usize>, y: &mut B::Tensor) -> Result {
    let rows: Vec<u32> = rows.map(|row| row as u32).collect();
    ops.gather_rows(x, &rows, y)
}
