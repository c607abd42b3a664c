//! A trainable decoder: forward and backward, LoRA, kernels, optimizer, checkpoints, sampling.

pub mod adapter;
pub mod batch;
pub mod blocks;
pub mod candle;
pub mod checkpoint;
pub mod config;
pub mod cpu;
pub mod decoder;
mod families;
pub mod init;
pub mod merge;
pub mod ops;
pub mod parameter;
pub mod peft;
pub mod random;
pub mod rope;
pub mod sampling;
pub mod schedule;
pub mod session;
pub mod trainer;
