//! A trainable decoder: forward and backward, LoRA, kernels, optimizer, checkpoints, sampling.
//!
//! A [`decoder::Decoder`] is loaded from a Hub checkpoint onto a kernel set ([`cpu::Cpu`], [`candle::Candle`]); its
//! family is data ([`config::Config`]). There is no autograd: a kernel set has each operation's forward and backward
//! ([`ops::Ops`]) and may fuse them into blocks ([`blocks::Blocks`]). A [`trainer::Trainer`] sums gradients over
//! micro-batches and steps; a [`generation::Generator`] completes prompts. Pipelines and artefacts are left to others.
//!
//! Fine-tuning with LoRA, from a checkpoint to an adapter that PEFT reads:
//!
//! ```no_run
//! use std::{path::Path, sync::Arc};
//!
//! use model::batch::Batch;
//! use model::cpu::Cpu;
//! use model::decoder::Decoder;
//! use model::ops::Compute;
//! use model::parameter::Trainability;
//! use model::peft::AdapterConfig;
//! use model::trainer::{AdamW, Optimizer, TrainOptions, Trained, Trainer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ops = Arc::new(Cpu::new(2, Compute::F32)?);
//! let mut decoder = Decoder::load(ops, Path::new("SmolLM-135M"), Trainability::Frozen)?;
//! let config = AdapterConfig::new(8, 16.0, vec!["q_proj".to_owned(), "v_proj".to_owned()]);
//! let adapter = decoder.fresh_adapter(&config, 42)?;
//! decoder.attach(&adapter)?;
//!
//! let adamw = Optimizer::AdamW(AdamW::default());
//! let options = TrainOptions { max_grad_norm: Some(1.0), ..TrainOptions::new(Trained::Adapter, adamw) };
//! let mut trainer = Trainer::new(decoder, options)?;
//! // A row of 6 tokens: 2 of prompt, 4 to be learned. Labels are not shifted.
//! trainer.accumulate(&Batch::document(vec![5, 9, 2, 6, 5, 3], vec![-100, -100, 2, 6, 5, 3]))?;
//! let report = trainer.step(3e-4)?;
//! println!("step {}: loss {:.3} over {} targets", report.step, report.loss, report.target_tokens);
//!
//! trainer.decoder().adapter(&config)?.save(Path::new("adapter"))?;
//! # Ok(())
//! # }
//! ```

#![warn(missing_docs)]

pub mod adapter;
pub mod batch;
pub mod bitsandbytes;
pub mod blocks;
pub mod candle;
pub mod checkpoint;
pub mod config;
pub mod cpu;
pub mod decoder;
mod families;
mod fingerprint;
pub mod generation;
pub mod gguf;
pub mod init;
pub mod loss;
pub mod memory;
pub mod merge;
pub mod ops;
pub mod optimizer;
pub mod parameter;
pub mod peft;
#[cfg(any(test, fuzzing))]
pub mod properties;
pub mod random;
pub mod resize;
pub mod rope;
pub mod sampling;
pub mod schedule;
pub mod scoring;
pub mod session;
pub mod trainer;
pub mod weights;
