//! The fused head: the gradient of each row of logits is rounded for the product that reads it while the row is in
//! cache.

use super::super::operand::{Operand, OperandBuffer, rounded_in_place};
use super::super::operations::RoundedGradient;
use super::super::{Cpu, Tensor};
use super::prepared::{Input, Wanted};
use super::projection::reads_values;
use crate::adapter::Projection;
use crate::blocks::composed::chunks;
use crate::blocks::{HeadBlock, HeadLoss};
use crate::ops::{Compute, LogitGradient, LossRows, Result, TokenScore, Write};

impl Cpu {
    /// Scores and backward at once; see [`crate::blocks::Blocks::head_loss`].
    pub(super) fn fused_head_loss(
        &self,
        head: &mut HeadBlock<Self>,
        output: &mut Projection<Self>,
        loss: &HeadLoss<'_, Self>,
        x: &Tensor,
        scores: &mut Vec<TokenScore>,
        gradient: &mut Tensor,
    ) -> Result {
        let mut inverse_rms = Tensor::default();
        let wanted = Wanted::with_values(reads_values(output) || output.is_trained());
        let normed = self.normed(&head.norm, x, wanted, None, &mut inverse_rms);
        let mut dnormed = self.shaped(x.rows(), x.columns());
        let [mut logits, mut low_rank, mut dx] = <[Tensor; 3]>::default();
        let in_bf16_alone = self.reads_rounded_gradient_alone(output);
        for rows in chunks(loss.targets.len(), head.chunk_rows) {
            let draws = loss.draws.as_ref().map(|draws| draws.of_rows(rows.clone()));
            let normed = normed.input().row_range(rows.clone());
            logits.reshape(&self.buffers, rows.len(), output.matrix.out_features);
            self.project(output, normed, draws, Write::Replace, logits.view_mut(), &mut low_rank)?;
            let teacher = loss.teacher_logits(self, rows.clone())?;
            let of_chunk = loss.rows(rows.clone(), head.soft_cap, teacher.as_ref());
            let mut buffer = OperandBuffer::default();
            let rounded = match self.compute {
                Compute::F32 => RoundedGradient::None,
                Compute::Bf16 if in_bf16_alone => RoundedGradient::InPlace,
                Compute::Bf16 => RoundedGradient::In(self.operand_target(rows.len(), logits.columns(), &mut buffer)),
            };
            self.score_rows(&mut logits, &of_chunk, LogitGradient::InPlace { scale: loss.scale }, scores, rounded);
            let dy = match self.compute {
                Compute::F32 => Input { operand: Operand::F32(logits.view()), values: Some(logits.view()) },
                Compute::Bf16 if in_bf16_alone => Input { operand: rounded_in_place(&logits), values: None },
                Compute::Bf16 => Input { operand: buffer.operand(), values: Some(logits.view()) },
            };
            dx.reshape(&self.buffers, rows.len(), x.columns());
            self.project_backward(output, &low_rank, normed.values, draws, dy, Some((Write::Replace, &mut dx)))?;
            let (first, width) = (rows.start * dnormed.columns(), dx.values().len());
            dnormed.values_mut()[first..first + width].copy_from_slice(dx.values());
        }
        head.norm.backward(self, x, &inverse_rms, &dnormed, Write::Replace, gradient)
    }

    /// Whether nothing reads the gradient of the logits but products of pairs.
    fn reads_rounded_gradient_alone(&self, output: &Projection<Self>) -> bool {
        let sums = output.is_trained() && output.bias.is_some();
        let multiplies_f32 = reads_values(output) || output.is_trained() && !self.rounds_weight_gradients();
        self.set.multiplies_pairs() && !sums && !multiplies_f32
    }

    /// Scores alone, the same to the bit; see [`crate::blocks::Blocks::head_scores`].
    pub(super) fn fused_head_scores(
        &self,
        head: &HeadBlock<Self>,
        output: &Projection<Self>,
        x: &Tensor,
        targets: &[u32],
        scores: &mut Vec<TokenScore>,
    ) -> Result {
        let [mut inverse_rms, mut logits, mut low_rank] = <[Tensor; 3]>::default();
        let normed = self.normed(&head.norm, x, Wanted::with_values(reads_values(output)), None, &mut inverse_rms);
        for rows in chunks(targets.len(), head.chunk_rows) {
            let normed = normed.input().row_range(rows.clone());
            logits.reshape(&self.buffers, rows.len(), output.matrix.out_features);
            self.project(output, normed, None, Write::Replace, logits.view_mut(), &mut low_rank)?;
            let of_chunk = LossRows::scored(&targets[rows], head.soft_cap);
            self.score_rows(&mut logits, &of_chunk, LogitGradient::Skip, scores, RoundedGradient::None);
        }
        Ok(())
    }
}
