//! A trainable decoder: forward and backward, LoRA, kernels, optimizer, checkpoints, sampling.

pub mod adapter;
pub mod batch;
pub mod blocks;
pub mod checkpoint;
pub mod ops;
pub mod parameter;
pub mod random;
pub mod sampling;
pub mod schedule;
