//! Trains a model on tokens: an adapter beside frozen weights, or every weight.
//!
//! An optimizer step takes `micro_batch_size × gradient_accumulation_steps` rows; its loss is summed over their target
//! tokens and divided once by their number. An interrupted run goes on from its last saved step and ends with the very
//! bytes of an uninterrupted one.

mod fit;
mod order;
mod output;
mod parameters;
mod session;
mod state;

use engine::artifact::Output;
use engine::context::StageContext;
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::KeyWriter;
use engine::stage::{InputFacts, Stage, Threads};
use serde_json::Value;

pub use parameters::{
    Dtype, Kernels, Leftover, LoraParams, Method, OptimizerName, OptimizerParams, SchedulerName, SchedulerParams,
    TrainParams,
};

use crate::artifact::{Adapter, Metrics, Model, OutputKind, TokensFacts};
use crate::kernels;
use crate::tokenize::facts_of;

/// The stage kind.
pub struct Train;

impl Stage for Train {
    const NAME: &'static str = "train";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "Trains an adapter (LoRA) or every weight of a model.";
    type Params = TrainParams;

    fn outputs(params: &TrainParams) -> Vec<Output> {
        let trained = match params.method {
            Method::Lora => Adapter::output("adapter"),
            Method::Full => Model::output("model"),
        };
        vec![trained, Metrics::output("metrics")]
    }

    fn check(params: &TrainParams, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let mut problems = params.problems(span);
        let tokens = facts_of(&params.data.reference, inputs).and_then(TokensFacts::from_facts);
        if let (Some(tokens), Some(model)) = (tokens, facts_of(&params.model.reference, inputs)) {
            let size = |name: &str| model.get(name).and_then(Value::as_u64).unwrap_or(u64::MAX);
            let misfit = fit::check(&tokens, size("vocab_size"), size("max_position_embeddings"));
            problems.extend(misfit.err().map(|misfit| {
                Problem::error("wrong-input", span, misfit.to_string(), "they meet in this stage")
                    .with_help(misfit.help())
            }));
        }
        problems
    }

    fn write_derived_key(params: &TrainParams, key: &mut KeyWriter<'_>) {
        params.write_derived_key(key);
    }

    fn threads(_: &TrainParams) -> Threads {
        Threads::Many
    }

    fn run(params: &TrainParams, context: &mut StageContext) -> Result<(), StageError> {
        match params.kernels {
            Kernels::Cpu => session::run(params, kernels::cpu(context.threads())?, context),
            Kernels::Candle => session::run(params, kernels::candle(), context),
        }
    }
}
