//! What a training run is told: what is trained, the optimizer, clipping, loss scaling, recomputation.

pub use crate::decoder::Recompute;
pub use crate::optimizer::{AdamW, Optimizer, Sgd};

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
    /// Seed of the draws of dropout.
    pub seed: u64,
}

impl TrainOptions {
    /// Plain training: no clipping, no loss scaling, nothing computed twice, seed 0.
    pub const fn new(trained: Trained, optimizer: Optimizer) -> Self {
        Self { trained, optimizer, max_grad_norm: None, loss_scaling: None, recompute: Recompute::None, seed: 0 }
    }
}

/// What is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trained {
    /// The attached adapter; everything else is frozen.
    Adapter,
    /// All weights; the decoder was loaded with [`crate::parameter::Keep::Trainable`].
    Weights,
}

/// How the factor on the loss follows what the gradients bear. As `torch.amp.GradScaler`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScaling {
    /// The factor at first.
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
