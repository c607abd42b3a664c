//! The worker's job file: what `workers/torch/src/pipeline_torch_worker/job.schema.json` describes.

use std::path::PathBuf;

use devices::DeviceKind;
use engine::protocol::PROTOCOL;
use model::trainer::Optimizer;
use serde::Serialize;

use crate::compute::backend::{Attention, Parallel};
use crate::compute::kernels::{Dtype, InferenceDtype};
use crate::data::artifact::TokensReader;

/// A job, with the version of the protocol and its task.
#[derive(Debug, Serialize)]
#[serde(tag = "task", rename_all = "snake_case")]
pub(crate) enum Job {
    Train(Box<Train>),
    Score(Score),
    Generate(Generate),
}

/// What every job says.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Common {
    pub protocol: u32,
    pub device: DeviceKind,
    pub dtype: &'static str,
    pub threads: usize,
    pub model: PathBuf,
    /// A PEFT folder.
    pub adapter: Option<PathBuf>,
    /// An empty folder.
    pub output: PathBuf,
}

impl Common {
    /// The version of the protocol that jobs are written in.
    pub(crate) const PROTOCOL: u32 = PROTOCOL;
}

#[derive(Debug, Serialize)]
pub(crate) struct Train {
    #[serde(flatten)]
    pub common: Common,
    pub method: &'static str,
    pub dropout: f64,
    pub parallel: Parallel,
    pub attention: Attention,
    pub data: RowsFiles,
    pub validation: Option<RowsFiles>,
    pub steps: PathBuf,
    pub total_steps: u64,
    pub micro_batch_size: usize,
    pub optimizer: OptimizerOptions,
    pub clip_grad_norm: Option<f64>,
    pub loss_scale: Option<LossScale>,
    pub activation_checkpointing: bool,
    pub seed: u64,
    pub save_every: u64,
    pub keep_last: usize,
    pub eval_steps: Option<u64>,
    pub keep_best: bool,
    pub early_stopping: Option<EarlyStopping>,
    pub working: PathBuf,
    pub resume: Option<PathBuf>,
    pub computed_by: String,
    pub run_folder: PathBuf,
    pub profile: bool,
    pub watchdog_seconds: u64,
}

/// The loss of rows.
#[derive(Debug, Serialize)]
pub(crate) struct Score {
    #[serde(flatten)]
    pub common: Common,
    pub rows: PathBuf,
    pub batch_size: usize,
}

/// Answers to prompts.
#[derive(Debug, Serialize)]
pub(crate) struct Generate {
    #[serde(flatten)]
    pub common: Common,
    pub prompts: PathBuf,
    pub max_new_tokens: usize,
    pub min_new_tokens: usize,
    pub stop_ids: Vec<u32>,
    pub temperature: f64,
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub batch_size: usize,
}

/// A table of tokens.
#[derive(Debug, Serialize)]
pub(crate) struct RowsFiles {
    pub parts: Vec<PathBuf>,
    pub packed: bool,
    pub rows: u64,
}

/// The optimizer without its learning rate, which each step has.
#[derive(Debug, Default, Serialize)]
pub(crate) struct OptimizerOptions {
    pub name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub betas: Option<[f64; 2]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eps: Option<f64>,
    pub weight_decay: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub momentum: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dampening: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nesterov: Option<bool>,
}

/// The factor on the loss.
#[derive(Debug, Serialize)]
pub(crate) struct LossScale {
    pub init_scale: f64,
    pub growth_factor: f64,
    pub backoff_factor: f64,
    pub growth_interval: u64,
}

/// When training ends early.
#[derive(Debug, Serialize)]
pub(crate) struct EarlyStopping {
    pub patience: u64,
    pub min_delta: f64,
}

impl RowsFiles {
    /// The files of a table.
    pub(crate) fn of(rows: &TokensReader) -> Self {
        Self { parts: rows.part_files(), packed: rows.is_packed(), rows: rows.len() }
    }
}

impl From<Optimizer> for OptimizerOptions {
    fn from(optimizer: Optimizer) -> Self {
        match optimizer {
            Optimizer::AdamW(adamw) => Self {
                name: "adamw",
                betas: Some([adamw.betas.0, adamw.betas.1]),
                eps: Some(adamw.eps),
                weight_decay: adamw.weight_decay,
                ..Self::default()
            },
            Optimizer::Sgd(sgd) => Self {
                name: "sgd",
                weight_decay: sgd.weight_decay,
                momentum: Some(sgd.momentum),
                dampening: Some(sgd.dampening),
                nesterov: Some(sgd.nesterov),
                ..Self::default()
            },
        }
    }
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

impl InferenceDtype {
    /// Its name in a job; none where the torch worker has no such type.
    pub(crate) fn in_job(self) -> Option<&'static str> {
        match self {
            Self::F32 => Some("f32"),
            Self::Bf16 => Some("bf16"),
            Self::F16 => Some("f16"),
            Self::Int8 | Self::Int4 => None,
        }
    }
}

#[cfg(test)]
mod tests;
