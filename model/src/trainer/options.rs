//! What a training run is told: what is trained, the optimizer, clipping, loss scaling, recomputation.

pub use crate::decoder::{EmbeddingNoise, Recompute};
use crate::optimizer::TensorInfo;
pub use crate::optimizer::{AdamW, Optimizer, Sgd};
use crate::peft::AdapterPart;

/// What a trainer does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainOptions {
    /// What is trained.
    pub trained: Trained,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The gradient's norm over all trained tensors is cut to this.
    pub max_grad_norm: Option<f64>,
    /// A factor on the loss while gradients are computed, for number types whose small values round to zero.
    pub loss_scaling: Option<LossScaling>,
    /// What the backward computes again instead of keeping it.
    pub recompute: Recompute,
    /// Seed of the draws of dropout and of noise.
    pub seed: u64,
    /// Noise on the token embeddings of training passes.
    pub embedding_noise: Option<EmbeddingNoise>,
    /// The learning rate of LoRA's B over that of its A (LoRA+); 1 is plain LoRA.
    ///
    /// Source: Hayou et al., arXiv:2402.12354; as PEFT's `create_loraplus_optimizer`, DoRA's magnitudes and all other
    /// vectors have the learning rate of B.
    pub lora_learning_rate_ratio: f64,
}

impl TrainOptions {
    /// Plain training: no clipping, no loss scaling, nothing computed twice, seed 0.
    pub const fn new(trained: Trained, optimizer: Optimizer) -> Self {
        Self {
            trained,
            optimizer,
            max_grad_norm: None,
            loss_scaling: None,
            recompute: Recompute::None,
            seed: 0,
            embedding_noise: None,
            lora_learning_rate_ratio: 1.0,
        }
    }

    /// What the learning rate of a tensor is multiplied by.
    pub(super) fn learning_rate_factor(&self, tensor: TensorInfo<'_>) -> f64 {
        if tensor.name.ends_with(AdapterPart::B.suffix()) || tensor.shape.len() == 1 {
            self.lora_learning_rate_ratio
        } else {
            1.0
        }
    }
}

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trained {
    /// The attached adapter; everything else is frozen.
    Adapter,
    /// All weights; the decoder was loaded with [`crate::parameter::Trainability::Trainable`].
    Weights,
}

/// How the factor on the loss follows what the gradients bear. As `torch.amp.GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// The initial loss scale.
    pub init_scale: f64,
    /// The factor is multiplied by this after `growth_interval` steps without an overflow.
    pub growth_factor: f64,
    /// The factor is multiplied by this when a gradient overflows; such a step is skipped.
    pub backoff_factor: f64,
    /// Steps without an overflow after which the factor grows.
    pub growth_interval: u64,
    /// The factor does not fall below this (torch's has no such bound).
    pub min_scale: f64,
}

impl Default for LossScaling {
    /// From 2¹⁰, doubled every 2000 steps, halved at an overflow, never below 1.
    fn default() -> Self {
        Self { init_scale: 1024.0, growth_factor: 2.0, backoff_factor: 0.5, growth_interval: 2000, min_scale: 1.0 }
    }
}
