//! The torch worker through the whole program: beside the native backend, in ranks that die or hang, on emulated NPUs,
//! on two nodes of a cluster, and with each of its options.
//!
//! Needs a Python with torch, transformers, peft, safetensors and numpy: `PIPELINE_PYTHON`, else `python3`.
//! Where there is none, the tests that compute are ignored, and say so. The worker is taken from `workers/torch` of
//! this repository.

#![allow(clippy::unwrap_used, reason = "tests")]

mod architectures;
mod bench;
mod native;
mod nodes;
mod npu;
mod options;
mod peft;
mod preference;
mod quantized;
mod ranks;
mod serve;
#[path = "../support/slurm.rs"]
mod slurm;
#[path = "../support/mod.rs"]
mod support;

test_harness::main!();
