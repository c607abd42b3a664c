//! The blocks of a decoder, which a kernel set may fuse: attention, MLP and head, each with its backward.
//!
//! [`composed`] has each of them written with [`Ops`] alone. A set starts by naming those (see [`Blocks`]) and replaces
//! the ones that profit; tests compare every replacement with the composed one.

pub mod composed;

use std::ops::Range;

use crate::adapter::Projection;
use crate::batch::Documents;
use crate::loss::TokenLoss;
use crate::ops::{Activation, AttentionShape, Ops, Result, RmsNorm, RopeTables, TokenScore};
use crate::parameter::Parameter;
use crate::random::Draws;

/// A norm and its weight.
pub struct Norm<B: Ops> {
    /// Kind and eps.
    pub rms: RmsNorm,
    /// The weight, `[1, n]`.
    pub weight: Parameter<B>,
}

/// The projections to queries, keys and values.
#[expect(clippy::large_enum_variant, reason = "one per layer")]
pub enum QkvProjections<B: Ops> {
    /// One each.
    Split {
        /// To queries.
        q_proj: Projection<B>,
        /// To keys.
        k_proj: Projection<B>,
        /// To values.
        v_proj: Projection<B>,
    },
    /// One for all, its rows being those of q, k and v.
    Fused {
        /// To queries, keys and values.
        qkv_proj: Projection<B>,
    },
}

/// The norms over each head of queries and keys.
pub struct QkNorms<B: Ops> {
    /// On queries.
    pub q_norm: Norm<B>,
    /// On keys.
    pub k_norm: Norm<B>,
}

/// `x + post_norm(o_proj(attention(rope(qkv(norm(x))))))`.
pub struct AttentionBlock<B: Ops> {
    /// The norm in front.
    pub norm: Norm<B>,
    /// To queries, keys and values.
    pub qkv: QkvProjections<B>,
    /// Norms over each head of q and k, before RoPE.
    pub qk_norms: Option<QkNorms<B>>,
    /// Back to the residual stream.
    pub o_proj: Projection<B>,
    /// The norm on the branch before it is added (gemma2).
    pub post_norm: Option<Norm<B>>,
    /// Heads, scale, window, soft-cap.
    pub shape: AttentionShape,
}

/// The projections to gate and up.
#[expect(clippy::large_enum_variant, reason = "one per layer")]
pub enum GateUpProjections<B: Ops> {
    /// One each.
    Split {
        /// To the gate.
        gate_proj: Projection<B>,
        /// To what is gated.
        up_proj: Projection<B>,
    },
    /// One for both, its rows being those of gate and up.
    Fused {
        /// To the gate and what is gated.
        gate_up_proj: Projection<B>,
    },
}

/// `x + post_norm(down_proj(activation(gate) ∘ up))`, gate and up of `norm(x)`.
pub struct MlpBlock<B: Ops> {
    /// The norm in front.
    pub norm: Norm<B>,
    /// To gate and up.
    pub gate_up: GateUpProjections<B>,
    /// Back to the residual stream.
    pub down_proj: Projection<B>,
    /// The norm on the branch before it is added (gemma2).
    pub post_norm: Option<Norm<B>>,
    /// The activation on the gate.
    pub activation: Activation,
}

/// `soft_cap(output(norm(x)))`. The output projection is passed beside it, for it may be the embedding's.
pub struct HeadBlock<B: Ops> {
    /// The last norm.
    pub norm: Norm<B>,
    /// Cap on the logits.
    pub soft_cap: Option<f32>,
    /// Rows of which logits exist at a time.
    pub chunk_rows: usize,
}

/// What a head makes of its logits in training.
pub struct HeadLoss<'a, B: Ops> {
    /// The loss of each target.
    pub loss: &'a dyn TokenLoss,
    /// The target of each row.
    pub targets: &'a [u32],
    /// The weight of each row. None: 1 each.
    pub weights: Option<&'a [f32]>,
    /// The head of the teacher, where the loss needs one.
    pub teacher: Option<TeacherHead<'a, B>>,
    /// Factor on all gradients: that of loss scaling, or 1.
    pub scale: f32,
    /// Dropout's draws for the rows; none outside training.
    pub draws: Option<Draws<'a>>,
}

/// The head of a second model, whose logits exist a chunk of rows at a time, as the first one's.
pub struct TeacherHead<'a, B: Ops> {
    /// Its last norm and soft cap.
    pub head: &'a HeadBlock<B>,
    /// Its output projection.
    pub output: &'a Projection<B>,
    /// Its residual stream of the same rows after its last layer.
    pub x: &'a B::Tensor,
}

/// What all blocks of one forward or backward pass share.
pub struct Pass<'a, B: Ops> {
    /// The documents among the rows.
    pub documents: &'a Documents,
    /// The rotary tables.
    pub rope: &'a RopeTables<B::Tensor>,
    /// Dropout's draws, for the rows of the documents; none outside training.
    pub draws: Option<Draws<'a>>,
    /// Which rows have adapters that reside on the projections; none in training.
    pub adapters: &'a [AdapterRows],
}

impl<B: Ops> Pass<'_, B> {
    /// What it has of each row for projections.
    pub(crate) fn of_rows(&self) -> OfRows<'_> {
        OfRows { draws: self.draws, adapters: self.adapters }
    }
}

/// Rows of a pass to which a resident adapter adds its part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterRows {
    /// The rows.
    pub rows: Range<usize>,
    /// The adapter's number.
    pub adapter: usize,
}

/// In what rows differ for a projection.
#[derive(Clone, Copy, Default)]
pub struct OfRows<'a> {
    /// Dropout's draws; none outside training.
    pub draws: Option<Draws<'a>>,
    /// Those that have adapters of their own.
    pub adapters: &'a [AdapterRows],
}

impl<'a> From<Option<Draws<'a>>> for OfRows<'a> {
    fn from(draws: Option<Draws<'a>>) -> Self {
        Self { draws, adapters: &[] }
    }
}

/// Whether anything below a block is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InputGradient {
    /// The gradient with respect to the block's input is needed.
    Needed,
    /// It is not: the backward may leave anything in its place.
    Skip,
}

/// The blocks of a kernel set.
///
/// In each forward `x` is the residual stream and is updated in place; `saved` is written for the backward, whatever it
/// held. In each backward `gradient` comes in as the loss's gradient with respect to the block's output and leaves as
/// that with respect to its input; gradients of trained parameters are added where they are kept. `saved` of a forward
/// serves one backward. `draws` are dropout's for the rows of `x`, none outside training; forward and backward get the
/// same.
///
/// A set that fuses nothing writes `type AttentionSaved = composed::AttentionSaved<Self::Tensor>` and so on, and in
/// each method calls the function of that name in [`composed`]; [`crate::composed_blocks`] does it.
pub trait Blocks: Ops + Sized {
    /// What an attention block keeps for its backward.
    type AttentionSaved: Default + Send + Sync;
    /// What an MLP block keeps for its backward.
    type MlpSaved: Default + Send + Sync;

    /// The attention block.
    fn attention_block(
        &self,
        block: &AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        x: &mut Self::Tensor,
        saved: &mut Self::AttentionSaved,
    ) -> Result;

    /// Its backward.
    fn attention_block_backward(
        &self,
        block: &mut AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        saved: &mut Self::AttentionSaved,
        gradient: &mut Self::Tensor,
        input_gradient: InputGradient,
    ) -> Result;

    /// The attention block over cached keys and values, to which it adds those of the new rows.
    fn attention_block_cached(
        &self,
        block: &AttentionBlock<Self>,
        pass: &Pass<'_, Self>,
        cache: &mut Self::Cache,
        x: &mut Self::Tensor,
    ) -> Result;

    /// The MLP block.
    fn mlp_block(
        &self,
        block: &MlpBlock<Self>,
        draws: Option<Draws<'_>>,
        x: &mut Self::Tensor,
        saved: &mut Self::MlpSaved,
    ) -> Result;

    /// The MLP block of rows that need no backward, of which some may have adapters that reside on the projections.
    fn mlp_block_of(&self, block: &MlpBlock<Self>, adapters: &[AdapterRows], x: &mut Self::Tensor) -> Result {
        match adapters {
            [] => self.mlp_block(block, None, x, &mut Self::MlpSaved::default()),
            _ => composed::mlp_block_of(self, block, adapters, x),
        }
    }

    /// Its backward.
    fn mlp_block_backward(
        &self,
        block: &mut MlpBlock<Self>,
        draws: Option<Draws<'_>>,
        saved: &mut Self::MlpSaved,
        gradient: &mut Self::Tensor,
        input_gradient: InputGradient,
    ) -> Result;

    /// Scores one target per row and computes the backward at once: `gradient` becomes that of the summed loss with
    /// respect to `x`. All gradients are times `loss.scale` and the weight of their row, the scores are not.
    fn head_loss(
        &self,
        head: &mut HeadBlock<Self>,
        output: &mut Projection<Self>,
        loss: &HeadLoss<'_, Self>,
        x: &Self::Tensor,
        scores: &mut Vec<TokenScore>,
        gradient: &mut Self::Tensor,
    ) -> Result;

    /// Scores one target per row.
    fn head_scores(
        &self,
        head: &HeadBlock<Self>,
        output: &Projection<Self>,
        x: &Self::Tensor,
        targets: &[u32],
        scores: &mut Vec<TokenScore>,
    ) -> Result;

    /// The logits of each row, capped.
    fn head_logits(
        &self,
        head: &HeadBlock<Self>,
        output: &Projection<Self>,
        x: &Self::Tensor,
        logits: &mut Self::Tensor,
    ) -> Result;
}

/// Makes a kernel set use the composed form of every block.
#[macro_export]
macro_rules! composed_blocks {
    ($set:ty) => {
        impl $crate::blocks::Blocks for $set {
            type AttentionSaved = $crate::blocks::composed::AttentionSaved<<$set as $crate::ops::Ops>::Tensor>;
            type MlpSaved = $crate::blocks::composed::MlpSaved<<$set as $crate::ops::Ops>::Tensor>;

            fn attention_block(
                &self,
                block: &$crate::blocks::AttentionBlock<Self>,
                pass: &$crate::blocks::Pass<'_, Self>,
                x: &mut Self::Tensor,
                saved: &mut Self::AttentionSaved,
            ) -> $crate::ops::Result {
                $crate::blocks::composed::attention_block(self, block, pass, x, saved)
            }

            fn attention_block_backward(
                &self,
                block: &mut $crate::blocks::AttentionBlock<Self>,
                pass: &$crate::blocks::Pass<'_, Self>,
                saved: &mut Self::AttentionSaved,
                gradient: &mut Self::Tensor,
                input_gradient: $crate::blocks::InputGradient,
            ) -> $crate::ops::Result {
                $crate::blocks::composed::attention_block_backward(self, block, pass, saved, gradient, input_gradient)
            }

            fn attention_block_cached(
                &self,
                block: &$crate::blocks::AttentionBlock<Self>,
                pass: &$crate::blocks::Pass<'_, Self>,
                cache: &mut Self::Cache,
                x: &mut Self::Tensor,
            ) -> $crate::ops::Result {
                $crate::blocks::composed::attention_block_cached(self, block, pass, cache, x)
            }

            fn mlp_block(
                &self,
                block: &$crate::blocks::MlpBlock<Self>,
                draws: Option<$crate::random::Draws<'_>>,
                x: &mut Self::Tensor,
                saved: &mut Self::MlpSaved,
            ) -> $crate::ops::Result {
                $crate::blocks::composed::mlp_block(self, block, draws, x, saved)
            }

            fn mlp_block_backward(
                &self,
                block: &mut $crate::blocks::MlpBlock<Self>,
                draws: Option<$crate::random::Draws<'_>>,
                saved: &mut Self::MlpSaved,
                gradient: &mut Self::Tensor,
                input_gradient: $crate::blocks::InputGradient,
            ) -> $crate::ops::Result {
                $crate::blocks::composed::mlp_block_backward(self, block, draws, saved, gradient, input_gradient)
            }

            fn head_loss(
                &self,
                head: &mut $crate::blocks::HeadBlock<Self>,
                output: &mut $crate::adapter::Projection<Self>,
                loss: &$crate::blocks::HeadLoss<'_, Self>,
                x: &Self::Tensor,
                scores: &mut Vec<$crate::ops::TokenScore>,
                gradient: &mut Self::Tensor,
            ) -> $crate::ops::Result {
                $crate::blocks::composed::head_loss(self, head, output, loss, x, scores, gradient)
            }

            fn head_scores(
                &self,
                head: &$crate::blocks::HeadBlock<Self>,
                output: &$crate::adapter::Projection<Self>,
                x: &Self::Tensor,
                targets: &[u32],
                scores: &mut Vec<$crate::ops::TokenScore>,
            ) -> $crate::ops::Result {
                $crate::blocks::composed::head_scores(self, head, output, x, targets, scores)
            }

            fn head_logits(
                &self,
                head: &$crate::blocks::HeadBlock<Self>,
                output: &$crate::adapter::Projection<Self>,
                x: &Self::Tensor,
                logits: &mut Self::Tensor,
            ) -> $crate::ops::Result {
                $crate::blocks::composed::head_logits(self, head, output, x, logits)
            }
        }
    };
}
