//! Trains a model on tokens: an adapter beside frozen weights, or every weight.
//!
//! An optimizer step takes `micro_batch_size × gradient_accumulation_steps` rows; its loss is summed over their target
//! tokens and divided once by their number. An interrupted run goes on from its last saved step and ends with the very
//! bytes of an uninterrupted one.

mod checkpoints;
mod elsewhere;
mod failure;
mod figures;
mod fit;
mod forecast;
mod inputs;
mod learner;
mod less_memory;
mod order;
mod output;
mod parameters;
mod preference;
mod prepare;
mod rows;
mod session;
mod state;
mod summary;
mod tasks;
mod tensorboard;
mod validation;
mod workers;

use std::path::Path;
use std::sync::Arc;

use devices::DeviceKind;
use engine::artifact::Output;
use engine::context::StageContext;
use engine::error::StageError;
use engine::figure::Foreseen;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast};
use engine::parameter::{KeyWriter, Parameter as _};
use engine::pin::Pinned;
use engine::stage::{
    InputFacts, LessMemory, Outside, PinRequest, Secret, Smoke, Stage, StageKind, Threads, Workers, WorkingState,
};

pub use parameters::{
    BaseFormat, BestBy, Divergence, DpoDivergence, EarlyStopping, Given, Leftover, Likelihood, LoraParams, Loss,
    LossScale, Method, MinLr, OptimizerParams, QuantizeParams, Reference, SchedulerParams, Targets, Train, UpdateRule,
    ValidationTasks, Warmup,
};

use inputs::Inputs;
use model::blocks::Blocks;

use crate::compute::backend::Choice;
use crate::compute::checkpoint;
use crate::compute::kernels::{self, Kernels};
use crate::data::artifact::{Adapter, Metrics, Model, OutputKind};
use crate::kinds::dataset::pin_on_hub;
use crate::metrics;
use crate::smoke::{self, Lowered};

impl StageKind for Train {
    const NAME: &'static str = "train";
    const VERSION: u32 = 5; // 5: gradients of an adapter's B are summed over a micro-batch before they are added to those before.
    const ABOUT: &'static str = "Trains an adapter (LoRA) or every weight of a model.";
    const TEXTS: &'static [&'static str] = &["env"];
    const GOAL: bool = true;
    const ALSO_CALLED: &'static [&'static str] = &[
        "sft",
        "lora",
        "qlora",
        "dora",
        "dpo",
        "orpo",
        "kto",
        "pt",
        "pretrain",
        "full",
        "finetune",
        "fine_tune",
        "fine-tune",
        "lora_finetune_single_device",
        "full_finetune_single_device",
    ];
    const KEYS_ELSEWHERE: &'static [(&'static str, &'static str)] = elsewhere::KEYS;

    fn pin(request: &PinRequest) -> Result<Pinned, StageError> {
        pin_on_hub(request)
    }

    fn smoke(parameters: &serde_json::Value) -> Smoke {
        let lowered = Lowered::from(parameters)
            .at_most("max_steps", smoke::STEPS)
            .set("epochs", smoke::STEPS)
            .replace("gradient_accumulation_steps", 1)
            .replace("leftover", "step")
            .cut("scheduler.warmup_steps", 1)
            .cut("eval_steps", 1)
            .cut("quantize.after_steps", 1)
            .cut("validation_tasks.every_steps", 1);
        let has_tasks = lowered.file_says("validation_tasks").is_some();
        if has_tasks { lowered.at_most("validation_tasks.limit", smoke::ROWS).done() } else { lowered.done() }
    }
}

impl Stage for Train {
    fn outputs(&self) -> Vec<Output> {
        let trained = match self.method {
            Method::Lora => Adapter::output("adapter"),
            Method::Full => Model::output("model"),
        };
        vec![trained, Metrics::output("metrics")]
    }

    /// Evaluation tasks may be asked while it trains.
    fn figure(&self, name: &str) -> Foreseen {
        metrics::foreseen_of_task(name)
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let mut problems = self.problems(span);
        problems.extend(fit::problems(self, inputs, span));
        problems
    }

    fn check_on(&self, device: DeviceKind, span: Span) -> Vec<Problem> {
        self.problem_of_the_attention(device, span).into_iter().collect()
    }

    fn outside(&self) -> Vec<Outside> {
        self.validation_tasks.iter().flat_map(|tasks| tasks.choice.outside()).collect()
    }

    fn secrets(&self) -> Vec<Secret> {
        self.validation_tasks.iter().flat_map(|tasks| tasks.choice.secrets()).collect()
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        forecast::forecast(self, ahead)
    }

    fn peak_memory(&self, inputs: &InputFacts, workers: usize) -> Option<u64> {
        forecast::peak_memory(self, inputs, workers)
    }

    /// The product of micro-batch size and accumulation decides the result; how it is split does not.
    fn write_derived_key(&self, key: &mut KeyWriter<'_>) {
        key.field("rows_per_step", cache::Class::Semantic, |key| key.value(self.rows_per_step().to_string()));
        // A setting that the file gives must agree with an existing adapter even where it is the default.
        if self.adapter.is_some() {
            key.field("lora_given", cache::Class::Semantic, |key| self.lora.keys.write_key(key));
        }
        // Steps beyond those of the epochs were left out before. Saved states of such a training can be gone on from.
        if self.max_steps.is_some() {
            key.field("all_steps", cache::Class::Resumable, |key| key.value("of_max_steps".to_owned()));
        }
    }

    fn with_less_memory(&self, parameters: &serde_json::Value) -> LessMemory {
        less_memory::with_less_memory(parameters)
    }

    fn lacks(&self, span: Span) -> Vec<Problem> {
        self.backend.lacks(self.serves(), span).into_iter().collect()
    }

    fn derived_from(&self, entry: &str) -> &'static [&'static str] {
        match entry {
            "rows_per_step" => &["micro_batch_size", "gradient_accumulation_steps"],
            "lora_given" => &["lora"],
            "all_steps" => &["max_steps"],
            _ => &[],
        }
    }

    fn working_state(&self, folder: &Path, inputs: &InputFacts) -> Option<WorkingState> {
        checkpoints::standing(self, folder, inputs)
    }

    fn threads(&self) -> Threads {
        Threads::Many
    }

    fn workers(&self) -> Workers {
        Workers::Many
    }

    fn devices(&self) -> Vec<DeviceKind> {
        self.backend.devices(self.serves())
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        let architecture = checkpoint::architecture(&context.open(&self.model)?.folder)?;
        let choice = Choice::of(self.backend, self.serves(), &architecture, context)?;
        if choice.is_torch {
            let open = |inputs: &Inputs, context: &mut StageContext| learner::open_torch(self, inputs, context);
            let ended = session::run(self, open, Some(choice.report()), context);
            return ended.map_err(|error| checkpoints::with_saved_step(error, context));
        }
        let mut workers = workers::Workers::form(self, context)?;
        let compute = self.dtype.compute();
        match self.kernels.on(context.devices().kind) {
            Kernels::Cpu => {
                let of = self.matmul_precision.instructions_of(compute);
                let set = workers.instructions.map_or_else(|| kernels::instructions(of), Ok)?;
                let kernels = kernels::cpu_with(set, workers.threads, compute, context)?;
                let kernels = kernels.with_matmul_precision(self.matmul_precision.of_kernels());
                let kernels = match workers.weights.take() {
                    Some(weights) => kernels.sharing(weights),
                    None => kernels,
                };
                native(self, kernels, workers, context)
            }
            Kernels::Candle => {
                let kernels = kernels::candle_computing(compute, context)?;
                let kernels = workers.join_devices(kernels, context)?;
                native(self, kernels, workers, context)
            }
        }
    }
}

/// Runs the stage on a kernel set, as one of its workers.
fn native<B: Blocks>(
    params: &Train,
    kernels: B,
    workers: workers::Workers,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let open = |inputs: &Inputs, context: &mut StageContext| {
        learner::open_native(params, Arc::new(kernels), workers, inputs, context)
    };
    session::run(params, open, None, context)
}
