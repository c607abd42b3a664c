//! What a pipeline file may say under `with:` for `uses: train`.

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Input, KeyWriter, Parameters};

use crate::artifact::{Model, TokensOrPacks};

/// What a pipeline file may say under `with:` for `uses: train`.
#[derive(Parameters, Debug)]
pub struct TrainParams {
    /// The model to start from.
    #[semantic]
    pub model: Input<Model>,
    /// The rows to train on.
    #[semantic]
    pub data: Input<TokensOrPacks>,
    /// What is trained.
    #[semantic(default = Method::Lora)]
    pub method: Method,
    /// The adapter, for `method: lora`.
    #[semantic(default = LoraParams::default())]
    pub lora: LoraParams,
    /// The optimizer.
    #[semantic(default = OptimizerParams::default())]
    pub optimizer: OptimizerParams,
    /// The learning rate over the run.
    #[semantic(default = SchedulerParams::default())]
    pub scheduler: SchedulerParams,
    /// Rows computed at once, over all devices together; with `gradient_accumulation_steps` it decides the rows of an
    /// optimizer step, and alone it decides memory and speed, never the result.
    #[cosmetic(default = 1, range = 1..)]
    pub micro_batch_size: usize,
    /// Micro-batches of an optimizer step, over all devices together.
    #[cosmetic(default = 1, range = 1..)]
    pub gradient_accumulation_steps: usize,
    /// Passes over the data.
    #[resumable(default = 1, range = 1..)]
    pub epochs: u64,
    /// Optimizer steps after which training ends, whatever `epochs` says.
    #[resumable(range = 1..)]
    pub max_steps: Option<u64>,
    /// What becomes of an epoch's last rows where they do not fill a step.
    #[semantic(default = Leftover::Step)]
    pub leftover: Leftover,
    /// Whether each epoch has an order of its own.
    #[semantic(default = true)]
    pub shuffle: bool,
    /// Decides the row order and the adapter's first values.
    #[semantic(default = 0)]
    pub seed: u64,
    /// Largest norm of the gradient over all trained tensors; larger ones are scaled down to it. None if left out.
    #[semantic(above = 0.0)]
    pub clip_grad_norm: Option<f64>,
    /// Number type of the computation.
    #[semantic(default = Dtype::F32)]
    pub dtype: Dtype,
    /// The kernels that compute.
    #[cosmetic(default = Kernels::Cpu)]
    pub kernels: Kernels,
    /// Optimizer steps between two saved states; an interrupted run goes on from the last one.
    #[cosmetic(default = 20, range = 1..)]
    pub save_every: u64,
}

impl TrainParams {
    /// Rows of an optimizer step.
    pub fn rows_per_step(&self) -> usize {
        self.micro_batch_size.saturating_mul(self.gradient_accumulation_steps)
    }

    /// What is wrong with the values taken together.
    pub(super) fn problems(&self, span: Span) -> Vec<Problem> {
        let mut problems = Vec::new();
        let betas = &self.optimizer.betas;
        if betas.len() != 2 || betas.iter().any(|beta| !(0.0..1.0).contains(beta)) {
            let message = format!("`optimizer.betas` must be two numbers from 0 to below 1, not {betas:?}");
            problems.push(Problem::error("out-of-range", span, message, "in this stage"));
        }
        if self.method == Method::Full && self.lora != LoraParams::default() {
            let message = "`lora` describes an adapter, and `method: full` trains every weight";
            problems.push(
                Problem::error("bad-value", span, message, "in this stage")
                    .with_help("leave `lora` out, or set `method: lora`"),
            );
        }
        if self.method == Method::Lora && self.lora.target_modules.is_empty() {
            let message = "`lora.target_modules` is empty: nothing would be trained";
            problems.push(Problem::error("out-of-range", span, message, "in this stage"));
        }
        problems
    }

    /// The product of micro-batch size and accumulation decides the result; how it is split does not.
    pub(super) fn write_derived_key(&self, key: &mut KeyWriter<'_>) {
        key.field("rows_per_step", cache::Class::Semantic, |key| key.value(self.rows_per_step().to_string()));
    }
}

/// What is trained.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Low-rank adapters beside frozen weights (Hu et al., arXiv:2106.09685).
    Lora,
    /// Every weight.
    Full,
}

/// The adapter of `method: lora`.
#[derive(Parameters, Debug, Clone, PartialEq)]
pub struct LoraParams {
    /// Rank of the update.
    #[semantic(default = 8, range = 1..)]
    pub rank: usize,
    /// The update is scaled by `alpha / rank`.
    #[semantic(default = 16.0, above = 0.0)]
    pub alpha: f64,
    /// The linear layers that get an adapter.
    #[semantic(default = vec!["q_proj".to_owned(), "v_proj".to_owned()])]
    pub target_modules: Vec<String>,
    /// Scales by `alpha / sqrt(rank)` instead (Kalajdzievski, arXiv:2312.03732).
    #[semantic(default = false)]
    pub use_rslora: bool,
}

impl Default for LoraParams {
    fn default() -> Self {
        Self { rank: 8, alpha: 16.0, target_modules: vec!["q_proj".to_owned(), "v_proj".to_owned()], use_rslora: false }
    }
}

/// The optimizer.
#[derive(Parameters, Debug, Clone, PartialEq)]
pub struct OptimizerParams {
    /// Its name.
    #[semantic(default = OptimizerName::Adamw)]
    pub name: OptimizerName,
    /// The learning rate at its highest.
    #[semantic(default = 3e-4, above = 0.0)]
    pub learning_rate: f64,
    /// Decay rates of the two moments.
    #[semantic(default = vec![0.9, 0.999])]
    pub betas: Vec<f64>,
    /// Added to the root of the second moment; without it a gradient of zero would divide zero by zero.
    #[semantic(default = 1e-8, above = 0.0)]
    pub eps: f64,
    /// Decoupled weight decay.
    #[semantic(default = 0.01, range = 0.0..)]
    pub weight_decay: f64,
}

impl Default for OptimizerParams {
    fn default() -> Self {
        Self { name: OptimizerName::Adamw, learning_rate: 3e-4, betas: vec![0.9, 0.999], eps: 1e-8, weight_decay: 0.01 }
    }
}

/// An optimizer.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum OptimizerName {
    /// Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).
    Adamw,
}

/// The learning rate over the run.
#[derive(Parameters, Debug, Clone, PartialEq)]
pub struct SchedulerParams {
    /// Its shape after the warm-up.
    #[semantic(default = SchedulerName::Cosine)]
    pub name: SchedulerName,
    /// Steps over which the learning rate rises from zero.
    #[semantic(default = 0)]
    pub warmup_steps: u64,
}

impl Default for SchedulerParams {
    fn default() -> Self {
        Self { name: SchedulerName::Cosine, warmup_steps: 0 }
    }
}

/// The shape of a schedule after its warm-up.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerName {
    /// Half a cosine down to zero at the last step.
    Cosine,
    /// A line down to zero at the last step.
    Linear,
    /// Level.
    Constant,
}

/// What becomes of an epoch's last rows where they do not fill a step.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// They form a smaller step of their own.
    Step,
    /// They are left out of this epoch, and counted.
    Drop,
}

/// The number type of the computation.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// 32-bit floats.
    F32,
}

/// A set of kernels.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    /// Our own, for processors.
    Cpu,
    /// Candle's tensors, as a second opinion.
    Candle,
}
