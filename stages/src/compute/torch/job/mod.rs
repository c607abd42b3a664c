//! The worker's job file: what `workers/torch/src/pipeline_torch_worker/job.schema.json` describes.

use std::path::PathBuf;

use devices::DeviceKind;
use engine::protocol::PROTOCOL;
use model::loss;
use model::optimizer::Optimizer;
use serde::Serialize;

use crate::compute::backend::{Attention, Compile, Parallel};
use crate::compute::kernels::Dtype;

/// A job, with the version of the protocol and its task.
#[derive(Debug, Serialize)]
#[serde(tag = "task", rename_all = "snake_case")]
pub(crate) enum Job {
    Train(Box<Train>),
    /// A model that requests score, have complete prompts, and compare.
    Infer(Infer),
    /// A model, and adapters that come and go, whose logits requests ask for.
    Serve(Common),
}

/// What every job says.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Common {
    pub protocol: u32,
    pub device: DeviceKind,
    pub dtype: &'static str,
    pub threads: usize,
    pub model: PathBuf,
    /// The format of frozen linear layers, where that is not the stored one.
    pub quantize: Option<Quantize>,
}

/// Linear layers in 4 bits, by bitsandbytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Quantize {
    pub base: &'static str,
    pub double_quantization: bool,
    pub block_size: usize,
    pub skip_modules: Vec<String>,
}

impl Common {
    /// The version of the protocol that jobs are written in.
    pub(crate) const PROTOCOL: u32 = PROTOCOL;
}

/// A model as it is, with an adapter on it perhaps.
#[derive(Debug, Serialize)]
pub(crate) struct Infer {
    #[serde(flatten)]
    pub common: Common,
    /// Whether a base that is quantised is widened again, to be merged into.
    pub widen: bool,
    /// A PEFT folder.
    pub adapter: Option<PathBuf>,
}

/// A model in training, which requests direct.
#[derive(Debug, Serialize)]
pub(crate) struct Train {
    #[serde(flatten)]
    pub common: Common,
    /// A PEFT folder.
    pub adapter: Option<PathBuf>,
    pub method: &'static str,
    pub dropout: f64,
    pub parallel: Parallel,
    pub attention: Attention,
    pub compile: Compile,
    /// Whether rows hold several documents.
    pub packed: bool,
    pub label_smoothing: f64,
    pub distillation: Option<Distillation>,
    /// Without its learning rate, which each step has.
    pub optimizer: Optimizer,
    pub clip_grad_norm: Option<f64>,
    pub loss_scale: Option<LossScale>,
    pub activation_checkpointing: bool,
    pub seed: u64,
    pub run_folder: PathBuf,
    pub profile: bool,
    pub watchdog_seconds: u64,
}

/// A teacher, and how it is learned from.
#[derive(Debug, Serialize)]
pub(crate) struct Distillation {
    pub teacher: PathBuf,
    #[serde(flatten)]
    pub loss: loss::Distillation,
}

/// The factor on the loss.
#[derive(Debug, Serialize)]
pub(crate) struct LossScale {
    pub init_scale: f64,
    pub growth_factor: f64,
    pub backoff_factor: f64,
    pub growth_interval: u64,
}

impl Dtype {
    /// Its name in a job.
    pub(crate) fn in_job(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

#[cfg(test)]
mod tests;
