//! What the decoder computes, trains and generates, against reference results, finite differences and itself done
//! otherwise. They are one suite, so that the crate is linked once; a module's name selects its tests:
//! `cargo test --release -p model --test numbers golden::`.

#![allow(clippy::unwrap_used, reason = "tests")]

mod adapters;
mod audit;
mod bf16;
mod decoding;
mod fake_quantization;
#[path = "../audit/faulty.rs"]
mod faulty;
mod generation;
mod gguf;
mod golden;
mod gradients;
#[path = "../in_process/mod.rs"]
mod in_process;
mod losses;
mod merge;
mod nf4;
mod objectives;
mod optimizers;
mod preference;
mod quantized;
mod queue;
mod scoring;
#[path = "../support/mod.rs"]
mod support;
mod tensors;
mod training;
mod workers;

test_harness::main!();
