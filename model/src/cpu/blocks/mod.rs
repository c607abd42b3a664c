//! The blocks of the `cpu` set: fused where all of a block is covered, else composed of operations.
//!
//! What is fused computes what [`composed`] defines, in fewer passes over memory: an input of several projections is
//! normed and rounded once, q, k and v lie side by side as their products write them, gate and up are gated a part at a
//! time while they are in cache, rotation happens in place, and what a product reads rounded is written so by the
//! kernel that computes it. Where bf16 is computed in, an MLP keeps gate and up in it.

mod attention;
mod head;
mod mlp;
mod prepared;
mod projection;

use super::{Cpu, Tensor};
use crate::adapter::Projection;
use crate::blocks::{AttentionBlock, Blocks, HeadBlock, HeadLoss, InputGradient, MlpBlock, Pass, composed};
use crate::ops::{Result, TokenScore};
use crate::random::Draws;
use attention::FusedAttentionSaved;
use mlp::FusedMlpSaved;

/// What an attention block keeps for its backward.
#[derive(Default)]
pub struct AttentionSaved(Saved<FusedAttentionSaved, composed::AttentionSaved<Tensor>>);

/// What an MLP block keeps for its backward.
#[derive(Default)]
pub struct MlpSaved(Saved<FusedMlpSaved, composed::MlpSaved<Tensor>>);

/// What the one or the other form of a block keeps. A forward says which by what it takes.
enum Saved<F, C> {
    Fused(Box<F>),
    Composed(Box<C>),
}

impl<F: Default, C> Default for Saved<F, C> {
    fn default() -> Self {
        Self::Fused(Box::default())
    }
}

impl<F: Default, C: Default> Saved<F, C> {
    /// The place of the fused form, whose buffers are used again if it was that before.
    fn fused(&mut self) -> &mut F {
        if let Self::Composed(_) = self {
            *self = Self::default();
        }
        match self {
            Self::Fused(saved) => saved,
            Self::Composed(_) => unreachable!("it was replaced"),
        }
    }

    /// The place of the composed form, likewise.
    fn composed(&mut self) -> &mut C {
        if let Self::Fused(_) = self {
            *self = Self::Composed(Box::default());
        }
        match self {
            Self::Composed(saved) => saved,
            Self::Fused(_) => unreachable!("it was replaced"),
        }
    }
}

impl Blocks for Cpu {
    type AttentionSaved = AttentionSaved;
    type MlpSaved = MlpSaved;

    fn attention_block(
        &self,
        block: &AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        x: &mut Tensor,
        saved: &mut AttentionSaved,
    ) -> Result {
        match attention::covers(block) {
            true => self.fused_attention(block, pass, x, saved.0.fused()),
            false => composed::attention_block(self, block, pass, x, saved.0.composed()),
        }
    }

    fn attention_block_backward(
        &self,
        block: &mut AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        saved: &mut AttentionSaved,
        gradient: &mut Tensor,
        input_gradient: InputGradient,
    ) -> Result {
        match &mut saved.0 {
            Saved::Fused(saved) => self.fused_attention_backward(block, pass, saved, gradient, input_gradient),
            Saved::Composed(saved) => {
                composed::attention_block_backward(self, block, pass, saved, gradient, input_gradient)
            }
        }
    }

    fn attention_block_cached(
        &self,
        block: &AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        cache: &mut Self::Cache,
        x: &mut Tensor,
    ) -> Result {
        composed::attention_block_cached(self, block, pass, cache, x)
    }

    fn mlp_block(
        &self,
        block: &MlpBlock<Self>,
        draws: Option<Draws<'_>>,
        x: &mut Tensor,
        saved: &mut MlpSaved,
    ) -> Result {
        match mlp::covers(block) {
            true => self.fused_mlp(block, draws, x, saved.0.fused()),
            false => composed::mlp_block(self, block, draws, x, saved.0.composed()),
        }
    }

    fn mlp_block_backward(
        &self,
        block: &mut MlpBlock<Self>,
        draws: Option<Draws<'_>>,
        saved: &mut MlpSaved,
        gradient: &mut Tensor,
        input_gradient: InputGradient,
    ) -> Result {
        match &mut saved.0 {
            Saved::Fused(saved) => self.fused_mlp_backward(block, draws, saved, gradient, input_gradient),
            Saved::Composed(saved) => composed::mlp_block_backward(self, block, draws, saved, gradient, input_gradient),
        }
    }

    fn head_loss(
        &self,
        head: &mut HeadBlock<Self>,
        output: &mut Projection<Self>,
        loss: &HeadLoss<'_, Self>,
        x: &Tensor,
        scores: &mut Vec<TokenScore>,
        gradient: &mut Tensor,
    ) -> Result {
        match projection::is_covered(output) {
            true => self.fused_head_loss(head, output, loss, x, scores, gradient),
            false => composed::head_loss(self, head, output, loss, x, scores, gradient),
        }
    }

    fn head_scores(
        &self,
        head: &HeadBlock<Self>,
        output: &Projection<Self>,
        x: &Tensor,
        targets: &[u32],
        scores: &mut Vec<TokenScore>,
    ) -> Result {
        match projection::is_covered(output) {
            true => self.fused_head_scores(head, output, x, targets, scores),
            false => composed::head_scores(self, head, output, x, targets, scores),
        }
    }

    fn head_logits(
        &self,
        head: &HeadBlock<Self>,
        output: &Projection<Self>,
        x: &Tensor,
        logits: &mut Tensor,
    ) -> Result {
        composed::head_logits(self, head, output, x, logits)
    }
}
