//! What a pipeline file may say under `with:` for `uses: train`.

mod given;
mod lora;
mod loss;
mod optimizer;
mod scheduler;

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Input, Mapping, Parameters};
use model::schedule::Schedule;
use model::trainer::{EmbeddingNoise, LossScaling, Recompute, Trained};

pub use given::Given;
pub(super) use lora::{AdapterOrigin, train_tokens};
pub use lora::{LoraParams, Targets};
pub(super) use loss::For;
pub use loss::{Divergence, DpoDivergence, Likelihood, Loss};
pub use optimizer::{OptimizerParams, UpdateRule};
pub use scheduler::{MinLr, SchedulerParams, Warmup};

pub use super::order::Leftover;
use super::order::{Division, Shuffle};
pub use super::tasks::ValidationTasks;
use crate::compute::backend::{self, Attention, Backend, Parallel, Serves};
use crate::compute::kernels::{Dtype, Kernels, MatmulPrecision};
pub(super) use crate::compute::quantize::TrainQuantize;
pub use crate::compute::quantize::{BaseFormat, QuantizeParams};
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
    /// Rows to measure the loss on, which are not trained on.
    #[semantic]
    pub validation: Option<Input<TokensOrPacks>>,
    /// What is trained. With `full`, `lora` and `adapter` must be left out.
    #[semantic(default = Method::Lora)]
    pub method: Method,
    /// The adapter, for `method: lora`.
    #[semantic(default)]
    pub lora: Given<LoraParams>,
    /// An adapter to go on from (a warm start), ours or PEFT's. Its settings hold; of `lora`, what is given must agree
    /// with them, but for `dropout`.
    #[semantic]
    pub adapter: Option<Input<Adapter>>,
    /// The format that the frozen linear layers are quantised to while they are read (QLoRA), for `method: lora`, or
    /// with `aware` what they are trained for (QAT). As they are stored if left out. The `cpu` kernels keep frozen
    /// ones so in memory. The torch worker computes `nf4` and `fp4`, on a processor or a GPU where bitsandbytes lies
    /// beside it; all else is for the native backend.
    #[semantic(omit_default)]
    pub quantize: Option<TrainQuantize>,
    /// What training minimises.
    #[semantic(default, omit_default)]
    pub loss: Loss,
    /// What a loss of preferences compares with.
    #[semantic(default, omit_default)]
    pub reference: Reference,
    /// The optimizer and its learning rate.
    #[semantic(default)]
    pub optimizer: OptimizerParams,
    /// The learning rate over the run.
    #[semantic(default)]
    pub scheduler: SchedulerParams,
    /// Rows computed at once, over all devices together, of which each computes at least one; with
    /// `gradient_accumulation_steps` it decides the rows of an optimizer step, and alone it decides memory and
    /// speed, never the result.
    #[cosmetic(default = 1, range = 1..)]
    pub micro_batch_size: usize,
    /// Micro-batches of an optimizer step, over all devices together. Its product with `micro_batch_size` is semantic
    /// (`rows_per_step`).
    #[cosmetic(default = 1, range = 1..)]
    pub gradient_accumulation_steps: usize,
    /// Passes over the data.
    #[resumable(default = 1, range = 1..)]
    pub epochs: u64,
    /// Optimizer steps after which training ends, whatever `epochs` says.
    #[resumable(range = 1..)]
    pub max_steps: Option<u64>,
    /// Optimizer steps after which an epoch ends, whatever rows are left.
    #[semantic(range = 1..)]
    pub max_steps_per_epoch: Option<u64>,
    /// What becomes of an epoch's last rows where they do not fill a step.
    #[semantic(default = Leftover::Step)]
    pub leftover: Leftover,
    /// Whether each epoch has an order of its own.
    #[semantic(default = true)]
    pub shuffle: bool,
    /// Decides the row order, the adapter's first values and dropout.
    #[semantic(default = 0)]
    pub seed: u64,
    /// Largest norm of the gradient over all trained tensors; larger ones are scaled down to it. None if left out.
    #[semantic(above = 0.0)]
    pub clip_grad_norm: Option<f64>,
    /// NEFTune (Jain et al., arXiv:2310.05914): uniform noise on the token embeddings while training, of this over
    /// the root of (the document's tokens × `hidden_size`); 5 to 15 are usual, none if left out. For the native
    /// backend.
    #[semantic(above = 0.0, omit_default)]
    pub neftune_noise_alpha: Option<f64>,
    /// Compute dtype. What is trained, its moments and the loss stay f32.
    #[semantic(default = Dtype::F32)]
    pub dtype: Dtype,
    /// How exactly matrices of f32 are multiplied, as PyTorch's setting of that name: `high` takes about 16 bits of
    /// each factor where that is faster, which is on a CPU with tiles (AMX), and is `highest` elsewhere. For the
    /// native backend.
    #[semantic(default, omit_default)]
    pub matmul_precision: MatmulPrecision,
    /// The loss scale for computation in f16, whose small gradients would round to zero, as `torch.amp.GradScaler`; an
    /// error with another `dtype`. With `f16` there is one also where this is left out.
    #[semantic]
    pub loss_scale: Option<LossScale>,
    /// Computes each layer's forward again in the backward instead of keeping what it made: less memory, more time,
    /// the same numbers.
    #[cosmetic(default = false)]
    pub activation_checkpointing: bool,
    /// What computes: this program where it serves the device (today the CPU), else PyTorch in processes of its own.
    #[cosmetic(default = Backend::Auto)]
    pub backend: Backend,
    /// The kernels that compute, for the native backend.
    #[cosmetic(default = Kernels::Cpu)]
    pub kernels: Kernels,
    /// How several devices share the work, for the torch backend.
    #[cosmetic(default = Parallel::Ddp)]
    pub parallel: Parallel,
    /// The attention that the torch backend computes with.
    #[cosmetic(default = Attention::Auto)]
    pub attention: Attention,
    /// Environment variables of the torch backend's processes, such as `NCCL_DEBUG`; they change no result.
    /// Secrets are an error: those of the engine's environment are inherited.
    #[cosmetic(default)]
    pub env: Mapping<String>,
    /// Seconds that an exchange between several workers may take, or that one of the native backend may do nothing,
    /// before the stage is ended, with the worker, the step and the exchange named.
    #[cosmetic(default = 600, range = 1..)]
    pub watchdog_seconds: u64,
    /// Optimizer steps between two validations; the end of each epoch if left out.
    #[semantic(range = 1..)]
    pub eval_steps: Option<u64>,
    /// Whether the result is the step with the lowest validation loss, instead of the last one.
    #[semantic(default = false)]
    pub keep_best: bool,
    /// The figure of a validation that `keep_best` and `early_stopping` go by, in the place of the loss: for losses of
    /// preferences.
    #[semantic(default = BestBy::Loss, omit_default)]
    pub best_by: BestBy,
    /// Ends training once validation no longer improves.
    #[semantic]
    pub early_stopping: Option<EarlyStopping>,
    /// Evaluation tasks that the model is asked every few steps, for the native backend: their figures are curves, and
    /// nothing follows from them.
    #[semantic(omit_default)]
    pub validation_tasks: Option<ValidationTasks>,
    /// Optimizer steps between two saved states; an interrupted run goes on from the last one.
    #[cosmetic(default = 20, range = 1..)]
    pub save_every: u64,
    /// Saved states that are kept; with one alone, a damaged one costs the whole run.
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
            let message = "`loss_scale` is for computation in f16, and there is none here";
            problems.push(
                Problem::error("wrong-option", span, message, "not needed")
                    .at("loss_scale")
                    .with_help("leave it out: f32 and bf16 hold the smallest gradients without a factor"),
            );
        }
        problems.extend(self.problem_of_the_reference(span));
        problems.extend(self.problem_of_the_best(span));
        problems.extend(self.optimizer.problem(span));
        problems.extend(self.scheduler.problem(self.optimizer.learning_rate, span));
        problems.extend(self.without_validation(span));
        if let Some(validation) = self.validation.as_ref().filter(|rows| {
            (&rows.reference.stage, &rows.reference.output) == (&self.data.reference.stage, &self.data.reference.output)
        }) {
            let message = "`validation` is what is trained on: its loss says nothing about other rows";
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
                    "`reference.validation` is of validation rows, and there are none".to_owned()
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
    /// The weights that the run starts from; of an adapter that is gone on from, those with it.
    #[semantic(default)]
    Start {
        /// What those weights make of `data`.
        #[semantic]
        log_probs: Option<Input<LogProbs>>,
        /// What they make of `validation`.
        #[semantic]
        validation: Option<Input<LogProbs>>,
    },
    /// The model without its adapter.
    Disabled {
        /// What that model makes of `data`.
        #[semantic]
        log_probs: Option<Input<LogProbs>>,
        /// What it makes of `validation`.
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
    /// Validations without an improvement after which it ends.
    #[semantic(range = 1..)]
    pub patience: u64,
    /// A loss that is lower by no more than this is no improvement.
    #[semantic(default = 0.0, range = 0.0..)]
    pub min_delta: f64,
}

/// What is trained.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Low-rank adapters beside frozen weights (Hu et al., arXiv:2106.09685).
    Lora,
    /// Every weight.
    Full,
}

/// How the factor on the loss follows what the gradients bear, as `torch.amp.GradScaler`.
#[derive(Parameters, Debug, Clone, Copy, PartialEq)]
#[parameters(default)]
pub struct LossScale {
    /// The factor at first.
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
