//! Each kind of stage and what several of them share, run without an engine: what a stage reads, writes and refuses.
//! They are one suite, so that the crate is linked once; a module's name selects its tests:
//! `cargo test --release -p stages --test kinds merge::`.

#![allow(clippy::unwrap_used, reason = "tests")]

mod add_tokens;
mod asked;
mod command;
mod dataset;
mod download;
mod elsewhere;
mod evaluate;
mod generate;
mod gguf;
mod gguf_model;
mod hub;
mod keys;
mod merge;
mod modelscope;
mod network;
mod packed;
mod quantization_aware;
mod quantize;
mod quantized_base;
mod rank;
#[path = "../support/mod.rs"]
mod support;
mod tasks_on_hub;
#[path = "../tiny/mod.rs"]
mod tiny;
mod train;
mod train_loss;
mod train_numbers;
mod train_preference;
mod train_validation;
#[path = "../training/mod.rs"]
mod training;

test_harness::main!();
