//! What a pipeline file may say under `with:` for `uses: train`.

mod given;
mod lora;
mod loss;
mod optimizer;
mod scheduler;

use devices::DeviceKind;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Input, Mapping, Parameters};
use model::schedule::Schedule;
use model::trainer::{EmbeddingNoise, LossScaling, Recompute, Trained};

pub use given::Given;
pub(super) use lora::{AdapterOrigin, LEAVE_IT_OUT, contradicts};
pub use lora::{LoraParams, Targets};
pub(super) use loss::For;
pub use loss::{Divergence, DpoDivergence, Likelihood, Loss};
pub use optimizer::{OptimizerParams, UpdateRule};
pub use scheduler::{MinLr, SchedulerParams, Warmup};

pub use super::order::Leftover;
use super::order::{Division, Shuffle};
pub use super::tasks::ValidationTasks;
use crate::compute::backend::{self, Attention, Backend, Compile, Parallel, Serves};
use crate::compute::kernels::{Dtype, Kernels, MatmulPrecision};
pub(super) use crate::compute::quantize::TrainQuantize;
pub use crate::compute::quantize::{BaseFormat, QuantizeParams};
use crate::compute::variable::VariableText;
use crate::data::artifact::{Adapter, LogProbs, Model, TokensOrPacks};

/// What a pipeline file may say under `with:` for `uses: train`.
#[derive(Parameters, Debug)]
pub struct Train {
    /// The model to start from.
    #[semantic]
    pub model: Input<Model>,
    /// The rows to train on.
    #[semantic]
    pub data: Input<TokensOrPacks>,
    /// Held-out rows for the validation loss.
    #[semantic]
    pub validation: Option<Input<TokensOrPacks>>,
    /// The trainable parameters. With `full`, `lora` and `adapter` must be left out.
    #[semantic(default = Method::Lora)]
    pub method: Method,
    /// The adapter, for `method: lora`.
    #[semantic(default)]
    pub lora: Given<LoraParams>,
    /// Warm start: the adapter to start from, ours or PEFT's. It determines the LoRA settings; `lora` must agree with
    /// them, except `dropout` and `learning_rate_ratio`. An adapter does not store the ratio: give it again.
    #[semantic]
    pub adapter: Option<Input<Adapter>>,
    /// The format that the frozen linear layers are quantised to while they are read (QLoRA), for `method: lora`, or
    /// with `aware` the format to train for (QAT). Default: the stored weights. The `cpu` kernels keep frozen weights
    /// quantised in memory. The torch worker supports `nf4` and `fp4`, on a CPU or a GPU with bitsandbytes; everything
    /// else needs the native backend.
    #[semantic(omit_default)]
    pub quantize: Option<TrainQuantize>,
    /// The loss function.
    #[semantic(default, omit_default)]
    pub loss: Loss,
    /// The reference of a preference loss.
    #[semantic(default, omit_default)]
    pub reference: Reference,
    /// The optimizer and its learning rate.
    #[semantic(default)]
    pub optimizer: OptimizerParams,
    /// The learning-rate schedule.
    #[semantic(default)]
    pub scheduler: SchedulerParams,
    /// Rows per forward and backward, over all devices together; each device computes at least one. The product with
    /// `gradient_accumulation_steps` is the number of rows of an optimizer step; at a constant product it changes
    /// memory and speed, never the result.
    #[cosmetic(default = 1, range = 1..)]
    pub micro_batch_size: usize,
    /// Micro-batches per optimizer step, over all devices together. Its product with `micro_batch_size` is semantic
    /// (`rows_per_step`).
    #[cosmetic(default = 1, range = 1..)]
    pub gradient_accumulation_steps: usize,
    /// Passes over the data.
    #[resumable(default = 1, range = 1..)]
    pub epochs: u64,
    /// Number of optimizer steps, which overrides `epochs`.
    #[resumable(range = 1..)]
    pub max_steps: Option<u64>,
    /// Maximum number of optimizer steps of an epoch, even if rows are left.
    #[semantic(range = 1..)]
    pub max_steps_per_epoch: Option<u64>,
    /// What happens to the last rows of an epoch if they do not fill a step.
    #[semantic(default = Leftover::Step)]
    pub leftover: Leftover,
    /// Whether each epoch shuffles the rows.
    #[semantic(default = true)]
    pub shuffle: bool,
    /// Random seed of the row order, the adapter's initial values and dropout.
    #[semantic(default = 0)]
    pub seed: u64,
    /// Maximum norm of the gradient over all trainable tensors; larger ones are scaled down to it. Default: no
    /// clipping.
    #[semantic(above = 0.0)]
    pub clip_grad_norm: Option<f64>,
    /// NEFTune (Jain et al., arXiv:2310.05914): uniform noise on the token embeddings while training, of this divided
    /// by the square root of (the document's tokens × `hidden_size`). Usual: 5 to 15. Default: none. Native backend
    /// only.
    #[semantic(above = 0.0, omit_default)]
    pub neftune_noise_alpha: Option<f64>,
    /// Compute dtype. Trainable parameters, their moments and the loss stay f32.
    #[semantic(default = Dtype::F32)]
    pub dtype: Dtype,
    /// The precision of f32 matrix multiplications, as PyTorch's setting of that name: `high` uses about 16 bits of
    /// each factor on a CPU with AMX, where that is faster, and equals `highest` elsewhere. Native backend only.
    #[semantic(default, omit_default)]
    pub matmul_precision: MatmulPrecision,
    /// The loss scale for computation in f16, whose small gradients would round to zero, as `torch.amp.GradScaler`; an
    /// error with another `dtype`. With `f16` there is always a loss scale, also if this is left out.
    #[semantic]
    pub loss_scale: Option<LossScale>,
    /// Recomputes the forward of each layer in the backward instead of saving its activations: less memory, more time,
    /// the same numbers.
    #[cosmetic(default = false)]
    pub activation_checkpointing: bool,
    /// The backend: this program, or PyTorch in separate processes.
    #[cosmetic(default = Backend::Auto)]
    pub backend: Backend,
    /// The kernels of the native backend.
    #[cosmetic(default = Kernels::Cpu)]
    pub kernels: Kernels,
    /// The parallelism over several devices, for the torch backend.
    #[cosmetic(default = Parallel::Ddp)]
    pub parallel: Parallel,
    /// The attention implementation of the torch backend.
    #[cosmetic(default = Attention::Auto)]
    pub attention: Attention,
    /// What the torch backend compiles with `torch.compile`. The first steps take up to minutes longer, the others
    /// less.
    #[cosmetic(default = Compile::None)]
    pub compile: Compile,
    /// Environment variables of the torch backend's processes, such as `NCCL_DEBUG`; they change no result. A number
    /// or a boolean is its text. A secret here is an error: processes inherit those of the engine's environment.
    #[cosmetic(default)]
    pub env: Mapping<VariableText>,
    /// Timeout in seconds of a collective operation, or of a native worker that does nothing. The stage then ends, and
    /// the error names the worker, the step and the operation.
    #[cosmetic(default = 600, range = 1..)]
    pub watchdog_seconds: u64,
    /// Optimizer steps between two validations; default: at the end of each epoch.
    #[semantic(range = 1..)]
    pub eval_steps: Option<u64>,
    /// Whether the result is the step with the lowest validation loss, instead of the last one.
    #[semantic(default = false)]
    pub keep_best: bool,
    /// The validation metric of `keep_best` and `early_stopping`; others than `loss` are for preference losses.
    #[semantic(default = BestBy::Loss, omit_default)]
    pub best_by: BestBy,
    /// Ends training when validation no longer improves.
    #[semantic]
    pub early_stopping: Option<EarlyStopping>,
    /// Evaluation tasks that are run every few steps; their metrics are logged, and training does not depend on them.
    /// Native backend only.
    #[semantic(omit_default)]
    pub validation_tasks: Option<ValidationTasks>,
    /// Optimizer steps between two saved states; an interrupted run resumes from the last one.
    #[cosmetic(default = 20, range = 1..)]
    pub save_every: u64,
    /// Number of saved states that are kept; with only one, a damaged one costs the whole run.
    #[cosmetic(default = 2, range = 1..)]
    pub keep_last: usize,
}

impl Train {
    /// Rows of an optimizer step.
    pub fn rows_per_step(&self) -> usize {
        self.micro_batch_size.saturating_mul(self.gradient_accumulation_steps)
    }

    /// How so many rows are divided into epochs and steps.
    pub fn division(&self, rows: usize) -> Division {
        Division {
            rows,
            rows_per_step: self.rows_per_step(),
            leftover: self.leftover,
            max_steps_per_epoch: self.max_steps_per_epoch,
        }
    }

    /// Optimizer steps of a run over so many rows.
    pub fn total_steps(&self, rows: usize) -> u64 {
        self.division(rows).total_steps(self.epochs, self.max_steps)
    }

    /// The learning rate over a run of so many steps, as factors on `optimizer.learning_rate`.
    pub fn schedule(&self, total_steps: u64) -> Schedule {
        self.scheduler.schedule(self.optimizer.learning_rate, total_steps)
    }

    /// What is trained, as the trainer takes it.
    pub(super) fn trained(&self) -> Trained {
        match self.method {
            Method::Lora => Trained::Adapter,
            Method::Full => Trained::Weights,
        }
    }

    /// What the backward computes again, as the trainer takes it.
    pub(super) fn recompute(&self) -> Recompute {
        if self.activation_checkpointing { Recompute::Layers } else { Recompute::None }
    }

    /// The noise on the token embeddings, as the trainer takes it.
    pub(super) fn embedding_noise(&self) -> Option<EmbeddingNoise> {
        self.neftune_noise_alpha.map(|alpha| EmbeddingNoise { alpha })
    }

    /// Why the learning rate stays below its highest in a run of so many steps, if it does.
    pub(super) fn low_peak(&self, total_steps: u64) -> Option<String> {
        let (schedule, base) = (self.schedule(total_steps), self.optimizer.learning_rate);
        let share = schedule.peak(total_steps);
        let because = match schedule.warmup_steps {
            warmup if warmup >= total_steps => format!("the warm-up of {warmup} steps does not end within the run of"),
            // One-cycle's top may lie between two steps.
            _ if share < 0.9 => "the schedule has no place for its highest rate in the run of".to_owned(),
            _ => return None,
        };
        Some(format!("{because} {total_steps}: the learning rate reaches {:.3e} of {base:.3e}", share * base))
    }

    /// The order of the rows.
    pub(super) fn shuffle(&self) -> Shuffle {
        if self.shuffle { Shuffle::Seeded(self.seed) } else { Shuffle::No }
    }

    /// The factor on the loss: for f16, whose small gradients would round to zero, there is one whatever the file says.
    pub(super) fn loss_scale(&self) -> Option<LossScale> {
        self.loss_scale.or_else(|| (self.dtype == Dtype::F16).then(LossScale::default))
    }

    /// What is wrong with the values taken together.
    pub(super) fn problems(&self, span: Span) -> Vec<Problem> {
        let mut problems = Vec::new();
        match self.method {
            Method::Lora => problems.extend(self.lora.problems(span)),
            Method::Full => problems.extend(self.adapter_of_full(span).into_iter().chain(self.quantize_of_full(span))),
        }
        problems.extend(self.quantize.iter().filter_map(|quantize| quantize.problem(span)));
        problems.extend(self.problem_of_the_grids(span));
        problems.extend(self.problems_of_the_backend(span));
        problems.extend(self.validation_tasks.iter().flat_map(|tasks| tasks.problems(span)));
        if self.loss_scale.is_some() && self.dtype != Dtype::F16 {
            let message = "`loss_scale` is for the compute dtype f16";
            problems.push(
                Problem::error("wrong-option", span, message, "not needed")
                    .at("loss_scale")
                    .with_help("leave it out: f32 and bf16 represent the smallest gradients without a loss scale"),
            );
        }
        problems.extend(self.problem_of_the_reference(span));
        problems.extend(self.problem_of_the_best(span));
        problems.extend(self.optimizer.problem(span));
        problems.extend(self.problem_of_the_learning_rate(span));
        problems.extend(self.scheduler.problem(self.optimizer.learning_rate, span));
        problems.extend(self.without_validation(span));
        if let Some(validation) = self.validation.as_ref().filter(|rows| {
            (&rows.reference.stage, &rows.reference.output) == (&self.data.reference.stage, &self.data.reference.output)
        }) {
            let message = "`validation` has the rows of `data`: its loss does not measure other rows";
            problems.push(Problem::warning(
                "bad-value",
                validation.reference.span,
                message,
                "the same stage as `data`",
            ));
        }
        problems
    }

    /// Which backend can compute what is asked for.
    pub(super) fn serves(&self) -> Serves {
        match (self.dtype, self.kernels) {
            (Dtype::F16, _) => Serves::Torch("`dtype: f16`"),
            (Dtype::F32 | Dtype::Bf16, Kernels::Candle) => Serves::Native("`kernels: candle`"),
            (Dtype::F32 | Dtype::Bf16, Kernels::Cpu) => {
                match (self.native_only(), self.quantize.as_ref().and_then(TrainQuantize::base)) {
                    (Some(what), _) => Serves::Native(what),
                    (None, Some(base)) => base.serves("`quantize`"),
                    (None, None) => Serves::Both,
                }
            }
        }
    }

    /// What the torch worker does not compute.
    fn native_only(&self) -> Option<&'static str> {
        match self.optimizer.native_only() {
            Some(what) => Some(what),
            None if self.lora.value.learning_rate_ratio != 1.0 => Some("`lora.learning_rate_ratio`"),
            None if self.neftune_noise_alpha.is_some() => Some("`neftune_noise_alpha`"),
            None if self.matmul_precision != MatmulPrecision::Highest => Some("`matmul_precision`"),
            None if self.quantize.as_ref().is_some_and(|quantize| quantize.of_worker().is_none()) => Some("`quantize`"),
            None if self.validation_tasks.is_some() => Some("`validation_tasks`"),
            None => None,
        }
    }

    fn problems_of_the_backend(&self, span: Span) -> Vec<Problem> {
        let of_backend = self.backend.problem(self.serves(), span).map(|problem| problem.at("backend"));
        let mut problems: Vec<Problem> = of_backend.into_iter().collect();
        if let (Dtype::F16, Some(what)) = (self.dtype, self.optimizer.native_only()) {
            let message = format!("{what} is for the native backend, which does not compute in f16");
            problems.push(Problem::error("bad-value", span, message, "in this stage").at("optimizer"));
        }
        if self.dtype == Dtype::F16 && self.kernels == Kernels::Candle {
            let message = "`kernels: candle` does not compute in f16";
            problems.push(Problem::error("bad-value", span, message, "in this stage").at("kernels"));
        }
        if let Some(what) = self.native_only().filter(|_| self.dtype == Dtype::F16) {
            let message = format!("{what} is for the native backend, which does not compute in f16");
            let problem = Problem::error("bad-value", span, message, "in this stage").at("dtype");
            problems.push(problem.with_help("set `dtype: bf16` or `dtype: f32`"));
        }
        if self.parallel == Parallel::Fsdp2 && self.quantize.is_some() {
            let message = "`quantize` is not computed with `parallel: fsdp2`";
            let problem = Problem::error("bad-value", span, message, "they do not go together").at("parallel");
            problems.push(problem.with_help("leave `parallel` out: every device has the whole model in few bits"));
        }
        if self.backend == Backend::Native && !self.env.is_empty() {
            let message = "`env` is for the processes of `backend: torch`";
            problems
                .push(Problem::error("bad-value", span, message, "the native backend reads no variables").at("env"));
        }
        problems.extend(backend::problems_of_env(&self.env, span));
        problems
    }

    /// Attention that the torch worker lacks on a kind of device, if it is the one that computes there.
    pub(super) fn problem_of_the_attention(&self, device: DeviceKind, span: Span) -> Option<Problem> {
        let (asked, needs) = self.attention.needs().filter(|_| device == DeviceKind::Cpu)?;
        if !self.backend.choose(self.serves(), device, 1).is_torch {
            return None;
        }
        let message = format!("{asked} cannot be used here: it needs {needs}");
        let problem = Problem::error("bad-value", span, message, "not on the CPU").at("attention");
        Some(problem.with_help("leave `attention` out, or take `sdpa`"))
    }

    /// A learning rate that rounds to nothing, or nearly so, in f32, which weights are updated in.
    fn problem_of_the_learning_rate(&self, span: Span) -> Option<Problem> {
        let (rate, least) = (self.optimizer.learning_rate, f32::MIN_POSITIVE);
        (rate < f64::from(least)).then(|| {
            let message =
                format!("`optimizer.learning_rate` = {rate:e} is below {least:e}, the smallest normal number of f32");
            let problem = Problem::error("out-of-range", span, message, "would train nothing");
            problem.at("optimizer.learning_rate").with_help("1e-6 to 1e-2 are usual")
        })
    }

    /// A reference that nothing is compared with, or that there is none of.
    fn problem_of_the_reference(&self, span: Span) -> Option<Problem> {
        let [of_data, of_validation] = self.reference.log_probs();
        if !self.reference.is_disabled() && of_data.is_none() && of_validation.is_none() {
            return None;
        }
        let name = self.loss.name();
        let message = match self.loss.objective() {
            Some(objective) if objective.needs_reference() => {
                if self.reference.is_disabled() && self.method == Method::Full {
                    "`reference: disabled` is the model without its adapter, and `method: full` has none".to_owned()
                } else if of_validation.is_some() && self.validation.is_none() {
                    "`reference.validation` is for validation rows, and there are none".to_owned()
                } else {
                    return None;
                }
            }
            _ => format!("`reference` is for losses that compare with one, and `loss: {name}` does not"),
        };
        Some(Problem::error("wrong-option", span, message, "set here").at("reference").with_help("leave it out"))
    }

    /// A figure that the loss does not have.
    fn problem_of_the_best(&self, span: Span) -> Option<Problem> {
        let (name, loss) = (self.best_by.name(), self.loss.name());
        let has_it = match (self.best_by, self.loss.rows()) {
            (BestBy::Loss, _) | (_, For::Pairs) => true,
            (BestBy::RewardsAccuracies, For::Judged) | (_, For::Ordinary) => false,
            (_, For::Judged) => true,
        };
        let message = format!("`loss: {loss}` has no `{name}`");
        (!has_it).then(|| Problem::error("wrong-option", span, message, "not a figure of this loss").at("best_by"))
    }

    /// What describes an adapter, where none is trained.
    fn adapter_of_full(&self, span: Span) -> Option<Problem> {
        let name = match (&self.lora.keys[..], &self.adapter) {
            ([_, ..], _) => "lora",
            ([], Some(_)) => "adapter",
            ([], None) => return None,
        };
        let message = format!("`{name}` describes an adapter, and `method: full` trains every weight");
        let problem = Problem::error("bad-value", span, message, "does not go with `method: full`").at(name);
        Some(problem.with_help(format!("leave `{name}` out, or set `method: lora`")))
    }

    /// Frozen weights, where every one is trained.
    fn quantize_of_full(&self, span: Span) -> Option<Problem> {
        self.quantize.as_ref()?.base()?;
        let message = "`quantize` is for frozen weights, and `method: full` trains every weight";
        let problem = Problem::error("bad-value", span, message, "does not go with `method: full`").at("quantize");
        Some(problem.with_help("leave `quantize` out, or set `method: lora`; `aware:` trains weights for few bits"))
    }

    /// What goes with an adapter only, or not with one that is trained for few bits.
    fn problem_of_the_grids(&self, span: Span) -> Option<Problem> {
        let aware = self.quantize.as_ref()?.aware()?;
        let (at, message, help) = if self.method == Method::Lora && aware.after_steps > 0 {
            (
                "quantize.after_steps",
                "`quantize.after_steps` is for `method: full`: frozen weights are on their grids from the beginning",
                "leave it out",
            )
        } else if self.lora.value.use_dora {
            ("lora.use_dora", "`quantize: { aware }` is not computed with DoRA", "leave `use_dora` out")
        } else {
            return None;
        };
        Some(Problem::error("bad-value", span, message, "set here").at(at).with_help(help))
    }

    /// What would need validation rows, where there are none.
    fn without_validation(&self, span: Span) -> Vec<Problem> {
        let needs = [
            ("eval_steps", self.eval_steps.is_some()),
            ("keep_best", self.keep_best),
            ("best_by", self.best_by != BestBy::Loss),
            ("early_stopping", self.early_stopping.is_some()),
        ];
        let found = needs.into_iter().filter(|(_, is_set)| *is_set && self.validation.is_none());
        let problem = |(name, _)| {
            let message = format!("`{name}` goes by the validation loss, and there is no `validation`");
            Problem::error("missing-key", span, message, "needs validation rows")
                .at(name)
                .with_help("name the stage that makes them: `validation: held_out_tokens`")
        };
        found.map(problem).collect()
    }
}

/// The model that a loss of preferences compares with. Its log-probabilities are computed once, before the first step,
/// or by a stage of their own: `{ log_probs: STAGE, validation: STAGE }`.
#[derive(Parameters, Debug)]
#[parameters(default)]
pub enum Reference {
    /// The weights that the run starts from, including the adapter of a warm start.
    #[semantic(default)]
    Start {
        /// The log-probabilities of `data` under these weights.
        #[semantic]
        log_probs: Option<Input<LogProbs>>,
        /// The log-probabilities of `validation` under these weights.
        #[semantic]
        validation: Option<Input<LogProbs>>,
    },
    /// The model without its adapter.
    Disabled {
        /// The log-probabilities of `data` under this model.
        #[semantic]
        log_probs: Option<Input<LogProbs>>,
        /// The log-probabilities of `validation` under this model.
        #[semantic]
        validation: Option<Input<LogProbs>>,
    },
}

impl Reference {
    /// Whether it is the model without its adapter.
    pub(super) fn is_disabled(&self) -> bool {
        matches!(self, Self::Disabled { .. })
    }

    /// What was scored ahead: of the data, and of the validation rows.
    pub(super) fn log_probs(&self) -> [Option<&Input<LogProbs>>; 2] {
        let (Self::Start { log_probs, validation } | Self::Disabled { log_probs, validation }) = self;
        [log_probs.as_ref(), validation.as_ref()]
    }
}

/// A figure of a validation that says which step is the best one.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum BestBy {
    /// The lowest loss.
    Loss,
    /// The highest mean reward of chosen responses.
    #[semantic(rename = "rewards/chosen")]
    RewardsChosen,
    /// The lowest mean reward of rejected responses.
    #[semantic(rename = "rewards/rejected")]
    RewardsRejected,
    /// The highest mean margin.
    #[semantic(rename = "rewards/margins")]
    RewardsMargins,
    /// The highest share of pairs whose chosen response has the larger reward.
    #[semantic(rename = "rewards/accuracies")]
    RewardsAccuracies,
    /// The highest mean log-probability of chosen responses.
    #[semantic(rename = "log_probs/chosen")]
    LogProbsChosen,
    /// The lowest mean log-probability of rejected responses.
    #[semantic(rename = "log_probs/rejected")]
    LogProbsRejected,
}

impl BestBy {
    /// Its name in a file and in `metrics.jsonl`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Loss => "loss",
            Self::RewardsChosen => "rewards/chosen",
            Self::RewardsRejected => "rewards/rejected",
            Self::RewardsMargins => "rewards/margins",
            Self::RewardsAccuracies => "rewards/accuracies",
            Self::LogProbsChosen => "log_probs/chosen",
            Self::LogProbsRejected => "log_probs/rejected",
        }
    }

    /// The figure as a number of which the lowest is the best, and such a number as the figure.
    pub(super) fn turned(self, figure: f64) -> f64 {
        match self {
            Self::Loss | Self::RewardsRejected | Self::LogProbsRejected => figure,
            Self::RewardsChosen | Self::RewardsMargins | Self::RewardsAccuracies | Self::LogProbsChosen => -figure,
        }
    }
}

/// When training ends before its last step.
#[derive(Parameters, Debug, Clone, Copy, PartialEq)]
pub struct EarlyStopping {
    /// Number of validations without an improvement after which it ends.
    #[semantic(range = 1..)]
    pub patience: u64,
    /// A decrease of the loss counts as an improvement only if it exceeds this.
    #[semantic(default = 0.0, range = 0.0..)]
    pub min_delta: f64,
}

/// What is trained.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Low-rank adapters on frozen weights (Hu et al., arXiv:2106.09685).
    Lora,
    /// Every weight.
    Full,
}

/// How the factor on the loss follows what the gradients bear, as `torch.amp.GradScaler`.
#[derive(Parameters, Debug, Clone, Copy, PartialEq)]
#[parameters(default)]
pub struct LossScale {
    /// The initial loss scale.
    #[semantic(default = 1024.0, above = 0.0)]
    pub init_scale: f64,
    /// It is multiplied by this after `growth_interval` steps without an overflow.
    #[semantic(default = 2.0, above = 1.0)]
    pub growth_factor: f64,
    /// It is multiplied by this at an overflow; such a step is skipped.
    #[semantic(default = 0.5, above = 0.0, range = ..1.0)]
    pub backoff_factor: f64,
    /// Steps without an overflow after which it grows.
    #[semantic(default = 2000, range = 1..)]
    pub growth_interval: u64,
}

impl LossScale {
    /// As the trainer takes it.
    pub(super) fn options(&self) -> LossScaling {
        LossScaling {
            init_scale: self.init_scale,
            growth_factor: self.growth_factor,
            backoff_factor: self.backoff_factor,
            growth_interval: self.growth_interval,
            ..LossScaling::default()
        }
    }
}

#[cfg(test)]
mod tests;
