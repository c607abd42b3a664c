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
mod inputs;
mod learner;
mod less_memory;
mod order;
mod output;
mod parameters;
mod preference;
mod preflight;
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
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::KeyWriter;
use engine::pin::Pinned;
use engine::preflight::Preflight;
use engine::stage::{
    InputFacts, LessMemory, Outside, PinRequest, Secret, Smoke, Stage, Threads, Workers, WorkingState,
};
use engine::survey::{LocalFiles, Survey};

pub use parameters::{
    BaseFormat, BestBy, Divergence, DpoDivergence, EarlyStopping, Given, Leftover, Likelihood, LoraParams, Loss,
    LossScale, Method, MinLr, OptimizerParams, QuantizeParams, Reference, SchedulerParams, Targets, TrainParams,
    UpdateRule, ValidationTasks, Warmup,
};

use inputs::Inputs;
use model::blocks::Blocks;

use crate::compute::backend::Choice;
use crate::compute::checkpoint;
use crate::compute::kernels::{self, Kernels};
use crate::compute::quantize::QUANTIZE;
use crate::data::artifact::{Adapter, Metrics, Model, OutputKind};
use crate::data::prompt::PROMPT;
use crate::kinds::dataset::pin_on_hub;
use crate::smoke::{self, Lowered};

/// The stage kind.
pub struct Train;

impl Stage for Train {
    const NAME: &'static str = "train";
    const VERSION: u32 = 5; // 5: gradients of an adapter's B are summed over a micro-batch before they are added to those before.
    const ABOUT: &'static str = "Trains an adapter (LoRA) or every weight of a model.";
    type Params = TrainParams;
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

    fn outputs(params: &TrainParams) -> Vec<Output> {
        let trained = match params.method {
            Method::Lora => Adapter::output("adapter"),
            Method::Full => Model::output("model"),
        };
        vec![trained, Metrics::output("metrics")]
    }

    fn check(params: &TrainParams, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let mut problems = params.problems(span);
        problems.extend(fit::problems(params, inputs, span));
        problems
    }

    fn outside(params: &TrainParams) -> Vec<Outside> {
        params.validation_tasks.iter().flat_map(|tasks| tasks.choice.outside()).collect()
    }

    fn secrets(params: &TrainParams) -> Vec<Secret> {
        params.validation_tasks.iter().flat_map(|tasks| tasks.choice.secrets()).collect()
    }

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

    fn survey(params: &TrainParams, inputs: &InputFacts, _: &LocalFiles, _: Span) -> Survey {
        let mut survey = Survey::default();
        let trained = match params.method {
            Method::Lora => "adapter",
            Method::Full => {
                let names: Vec<&str> = checkpoint::config_facts().collect();
                survey.pass("model", params.model.reference.facts_in(inputs), &names);
                "model"
            }
        };
        survey.pass(trained, params.data.reference.facts_in(inputs), &[PROMPT]);
        if let Some(quantize) = &params.quantize {
            survey.fact(trained, QUANTIZE, quantize.fact());
        }
        survey
    }

    fn preflight(params: &TrainParams, inputs: &InputFacts, span: Span) -> Preflight {
        preflight::preflight(params, inputs, span)
    }

    fn peak_memory(params: &TrainParams, inputs: &InputFacts, workers: usize) -> Option<u64> {
        preflight::peak_memory(params, inputs, workers)
    }

    fn write_derived_key(params: &TrainParams, key: &mut KeyWriter<'_>) {
        params.write_derived_key(key);
    }

    fn with_less_memory(parameters: &serde_json::Value) -> LessMemory {
        less_memory::with_less_memory(parameters)
    }

    fn lacks(params: &TrainParams, span: Span) -> Vec<Problem> {
        params.backend.lacks(params.serves(), span).into_iter().collect()
    }

    fn derived_from(entry: &str) -> &'static [&'static str] {
        match entry {
            "rows_per_step" => &["micro_batch_size", "gradient_accumulation_steps"],
            "lora_given" => &["lora"],
            _ => &[],
        }
    }

    fn working_state(params: &TrainParams, folder: &Path, inputs: &InputFacts) -> Option<WorkingState> {
        checkpoints::standing(params, folder, inputs)
    }

    fn threads(_: &TrainParams) -> Threads {
        Threads::Many
    }

    fn workers(_: &TrainParams) -> Workers {
        Workers::Many
    }

    fn devices(params: &TrainParams) -> Vec<DeviceKind> {
        params.backend.devices(params.serves())
    }

    fn run(params: &TrainParams, context: &mut StageContext) -> Result<(), StageError> {
        let architecture = checkpoint::architecture(&context.open(&params.model)?.folder)?;
        let choice = Choice::of(params.backend, params.serves(), &architecture, context)?;
        if choice.is_torch {
            let open = |inputs: &Inputs, context: &mut StageContext| learner::open_torch(params, inputs, context);
            let ended = session::run(params, open, Some(choice.report()), context);
            return ended.map_err(|error| checkpoints::with_saved_step(error, context));
        }
        let mut workers = workers::Workers::form(params, context)?;
        let compute = params.dtype.compute();
        match params.kernels.on(context.devices().kind) {
            Kernels::Cpu => {
                let of = params.matmul_precision.instructions_of(compute);
                let set = workers.instructions.map_or_else(|| kernels::instructions(of), Ok)?;
                let kernels = kernels::cpu_with(set, workers.threads, compute, context)?;
                let kernels = kernels.with_matmul_precision(params.matmul_precision.of_kernels());
                let kernels = match workers.weights.take() {
                    Some(weights) => kernels.sharing(weights),
                    None => kernels,
                };
                native(params, kernels, workers, context)
            }
            Kernels::Candle => {
                let kernels = kernels::candle_computing(compute, context)?;
                let kernels = workers.join_devices(kernels, context)?;
                native(params, kernels, workers, context)
            }
        }
    }
}

/// Runs the stage on a kernel set, as one of its workers.
fn native<B: Blocks>(
    params: &TrainParams,
    kernels: B,
    workers: workers::Workers,
    context: &mut StageContext,
) -> Result<(), StageError> {
    let open = |inputs: &Inputs, context: &mut StageContext| {
        learner::open_native(params, Arc::new(kernels), workers, inputs, context)
    };
    session::run(params, open, None, context)
}
