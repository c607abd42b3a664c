//! A model that is asked: opened from artefacts, scored on batches, and made to complete prompts.
//!
//! It leaves to others: what the prompts are, and what becomes of the answers.

mod answer;
#[cfg(test)]
mod conformance;
mod detokenizer;
mod grammar;
mod less_memory;
mod native;
mod pieces;
mod requests;
mod score;
mod speed;
mod static_batches;
mod stop;
mod text;
mod worker;

use std::path::Path;
use std::sync::Arc;

use devices::DeviceKind;
use engine::artifact::Facts;
use engine::context::{Artifact, StageContext};
use engine::error::{Cause, StageError};
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::Forecast;
use engine::parameter::{Input, Mapping, Parameters};
use engine::stage::InputFacts;
use model::generation::{CACHE_BYTES, Flow, GenerationStats, Options, TOKENS_PER_PASS};
use model::memory::cache_bytes;
use model::ops::{Compute, Ops};
use model::scoring::Context;

pub use answer::{ANSWER_INDENT, Answer, BatchProgress, Ended, StreamMode, indented, visible};
pub use detokenizer::Detokenizer;
pub use grammar::{GrammarError, Grammars};
use less_memory::BATCH_SIZE;
pub use less_memory::with_less_memory;
pub use model::generation::{ChosenToken, GenerateError, Load, Progress, QueuedRequest, RequestId, Stop};
pub use model::peft::Adapter as AdapterWeights;
pub use model::sampling::{Adjustments, Constraint, Sampling, TokenLogprobs};
use native::NativeEngine;
pub use native::{Evaluator, not_scored};
use pieces::Pieces;
pub use requests::{
    Batching, EngineSettings, InferenceEngine, OpenedEngine, facts_of_adapter, facts_of_model, open as open_engine,
    read_adapter,
};
pub use score::{ContinuationScores, continuations as score_continuations};
use speed::speed;
pub use stop::{StopStrings, StopToken, token_ids_of_model};
pub use text::CompletionText;
pub use worker::RowScore;
use worker::Worker;

use crate::compute::backend::{self, Backend, Choice, Serves};
use crate::compute::checkpoint;
use crate::compute::kernels::{self, Dtype, Kernels};
use crate::compute::precision::Precision;
use crate::compute::quantize::{WeightFormat, weight_format};
use crate::compute::resources::peak_resident_bytes;
use crate::compute::variable::VariableText;
use crate::compute::{adapter, aware};
use crate::data::artifact::{Adapter, Model, Tokenizer as TokenizerArtifact};
use crate::data::prompt::Encoded;
use crate::data::tokenizer::Tokenizer;
use crate::forecast::{inference_bytes, model_config, not_native, say_not_native, stored_dtype};
use crate::smoke::{self, Lowered};

/// Tokens of a completion at most, where a file does not say it.
pub const DEFAULT_NEW_TOKENS: usize = 128;

/// Which model is asked, and when its answers end: the same keys in `evaluate` and `generate`.
#[derive(Parameters, Debug)]
pub struct InferenceParams {
    /// The model.
    #[semantic]
    pub model: Input<Model>,
    /// An adapter for the model.
    #[semantic]
    pub adapter: Option<Input<Adapter>>,
    /// Its tokenizer; default: the model's own.
    #[semantic]
    pub tokenizer: Option<Input<TokenizerArtifact>>,
    /// Maximum length of a completion, in tokens.
    #[semantic(default = DEFAULT_NEW_TOKENS, range = 1..)]
    pub max_new_tokens: usize,
    /// Minimum length of a completion: no end of text and no stop token before.
    #[semantic(default = 0)]
    pub min_new_tokens: usize,
    /// A completion ends before the first of these strings, wherever tokens begin and end.
    #[semantic(default = Vec::new())]
    pub stop_strings: Vec<String>,
    /// Additional tokens that end a completion, besides those of the model and its tokenizer: ids, or strings such as
    /// `<|im_end|>`.
    #[semantic(default = Vec::new())]
    pub stop_tokens: Vec<StopToken>,
    /// Completions that are generated together: changes speed and memory, not the completions.
    #[cosmetic(default = BATCH_SIZE, range = 1..)]
    pub batch_size: usize,
    /// What is computed in, and how weights are stored.
    #[semantic(flatten)]
    pub precision: Precision,
    /// The backend: this program, or PyTorch in separate processes.
    #[cosmetic(default = Backend::Auto)]
    pub backend: Backend,
    /// The kernels of the native backend.
    #[cosmetic(default = Kernels::Cpu)]
    pub kernels: Kernels,
    /// Environment variables of the torch backend's processes, such as `NCCL_DEBUG`; they change no result. A number
    /// or a boolean is its text.
    #[cosmetic(default)]
    pub env: Mapping<VariableText>,
}

/// The shorter answers of a smoke run.
pub fn lowered(parameters: &serde_json::Value) -> Lowered<'_> {
    Lowered::from(parameters).at_most("max_new_tokens", smoke::NEW_TOKENS).cut("min_new_tokens", 1)
}

impl InferenceParams {
    /// What is known of the model and of the adapter on it.
    pub fn facts<'a>(&self, inputs: &'a InputFacts) -> (Option<&'a Facts>, Option<&'a Facts>) {
        let adapter = self.adapter.as_ref().and_then(|adapter| adapter.reference.facts_in(inputs));
        (self.model.reference.facts_in(inputs), adapter)
    }

    /// What is known of the tokenizer that its prompts are encoded with.
    pub fn tokenizer_facts<'a>(&self, inputs: &'a InputFacts) -> Option<&'a Facts> {
        let own = || self.model.reference.facts_in(inputs);
        self.tokenizer.as_ref().map_or_else(own, |tokenizer| tokenizer.reference.facts_in(inputs))
    }

    /// What this machine lacks to compute it.
    pub fn lacks(&self, span: Span) -> Vec<Problem> {
        self.backend.lacks(self.serves(), span).into_iter().collect()
    }

    /// The memory that asking it takes, with prompts of [`TOKENS_PER_PASS`] tokens where the model has so many
    /// positions.
    pub fn forecast(&self, inputs: &InputFacts) -> Forecast {
        let mut forecast = Forecast::default();
        say_not_native(&self.model.reference, inputs, &mut forecast);
        if let Some(config) = model_config(&self.model.reference, inputs) {
            let (positions, stored) = (config.max_position_embeddings, stored_dtype(&self.model.reference, inputs));
            let each = (TOKENS_PER_PASS + self.max_new_tokens).min(positions);
            let cached = cache_bytes(&config, (self.batch_size * each) as u64).min(CACHE_BYTES as u64);
            let passing = TOKENS_PER_PASS.min(positions) as u64;
            let dtype = self.precision.dtype;
            let format = self.weight_format(self.facts(inputs).1);
            let asked = inference_bytes(&config, dtype, stored, &format, passing);
            forecast.peak_memory_bytes = Some(asked + cached);
        }
        forecast
    }

    /// Which backend can compute what is asked for.
    pub fn serves(&self) -> Serves {
        let of_format = self.of_format();
        match (of_format, self.precision.dtype, self.kernels) {
            (_, Dtype::F16, _) => Serves::Torch("`dtype: f16`"),
            (Serves::Native(_), ..) => of_format,
            (_, Dtype::F32 | Dtype::Bf16, Kernels::Candle) => Serves::Native("`kernels: candle`"),
            (_, Dtype::F32 | Dtype::Bf16, Kernels::Cpu) => of_format,
        }
    }

    /// Which backend can compute the format that is asked for.
    fn of_format(&self) -> Serves {
        match (&self.precision.quantize, self.precision.says()) {
            (Some(format), Some(said)) => format.serves(said),
            _ => Serves::Both,
        }
    }

    /// The kinds of device that it can be computed on.
    pub fn devices(&self) -> Vec<DeviceKind> {
        self.backend.devices(self.serves())
    }

    /// As [`InferenceParams::serves`], where what is known of the model and the adapter decides it, too.
    ///
    /// # Errors
    /// Fails where they are for the native backend and `dtype` is for the other one.
    fn serves_with(&self, is_aware: bool, adapter: Option<&Facts>) -> Result<Serves, String> {
        let trained_on = adapter.filter(|_| self.precision.quantize.is_none()).map(WeightFormat::of_adapter);
        let of_inputs = match trained_on {
            // What this program does not know it says where it reads it.
            Some(Ok(format)) if format != WeightFormat::AsStored => format.serves(ON_QUANTIZED),
            _ if is_aware => Serves::Native(aware::WHAT),
            _ => Serves::Both,
        };
        match (self.serves(), of_inputs) {
            (serves, Serves::Both) => Ok(serves),
            (Serves::Both, of_inputs) => Ok(of_inputs),
            (Serves::Torch(asked), Serves::Native(native)) => Err(format!("{native} is not computed with {asked}")),
            (serves, _) => Ok(serves),
        }
    }

    /// The format of the model's weights with an adapter of these facts, as far as it is known.
    fn weight_format(&self, adapter: Option<&Facts>) -> WeightFormat {
        let trained_on = || adapter.and_then(|facts| WeightFormat::of_adapter(facts).ok());
        self.precision.quantize.clone().or_else(trained_on).unwrap_or(WeightFormat::AsStored)
    }

    /// What is wrong with the values on the model and the adapter, where they are known.
    pub fn misfits(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let of_model = not_native(&self.model.reference, inputs);
        let of_model = of_model.and_then(|outline| self.backend.problem_on(self.serves(), &outline, span));
        let (model, adapter) = self.facts(inputs);
        let of_format = match self.serves_with(model.is_some_and(aware::is_noted), adapter) {
            Ok(serves) => self.backend.problem(serves, span).filter(|_| serves != self.serves()),
            Err(message) => {
                let problem = Problem::error("bad-value", span, message, "they do not go together");
                Some(problem.with_help("set `dtype: bf16`, or leave it out").at("dtype"))
            }
        };
        let of_base = match (&self.precision.quantize, model_config(&self.model.reference, inputs)) {
            (Some(WeightFormat::Base(base)), Some(config)) => base.problem_on(&config, span),
            _ => None,
        };
        of_model.into_iter().chain(self.misfit_of_adapter(inputs, span)).chain(of_format).chain(of_base).collect()
    }

    /// The problem of an adapter that belongs to another model, where both are known.
    fn misfit_of_adapter(&self, inputs: &InputFacts, span: Span) -> Option<Problem> {
        let (model, trained_on) = self.facts(inputs);
        let adapter = self.adapter.as_ref().filter(|_| adapter::is_of_others(trained_on, model))?;
        Some(adapter::problem(&adapter.reference, &self.model.reference, span))
    }

    /// What is wrong with the values taken together.
    pub fn problems(&self, span: Span) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self.backend.problem(self.serves(), span).into_iter().collect();
        problems.extend(backend::problems_of_env(&self.env, span));
        problems.extend(self.precision.problem(span));
        if let (Dtype::F16, Serves::Native(quantized)) = (self.precision.dtype, self.of_format()) {
            let message = format!("{quantized} is computed in `f32` or `bf16`, and `dtype` is `f16`");
            problems.push(Problem::error("bad-value", span, message, "in this stage").at("dtype"));
        }
        if self.precision.dtype == Dtype::F16 && self.kernels == Kernels::Candle {
            let message = "`kernels: candle` does not compute in f16";
            problems.push(Problem::error("bad-value", span, message, "in this stage").at("kernels"));
        }
        if self.stop_strings.iter().any(String::is_empty) {
            let message = "`stop_strings` has an empty string, which would end every completion at once";
            let problem = Problem::error("bad-value", span, message, "in this stage");
            problems.push(problem.with_help("take it out of the list").at("stop_strings"));
        }
        if let (Kernels::Candle, Some(WeightFormat::Blocks(_)), Some(quantized)) =
            (self.kernels, &self.precision.quantize, self.precision.says())
        {
            let message = format!("`kernels: candle` has no quantised weights, as {quantized} asks for");
            let problem = Problem::error("bad-value", span, message, "in this stage");
            problems.push(problem.with_help("leave one of the two out").at("kernels"));
        }
        if self.min_new_tokens > self.max_new_tokens {
            let message = format!(
                "`min_new_tokens` is {}, more than `max_new_tokens`, which is {}",
                self.min_new_tokens, self.max_new_tokens
            );
            let problem = Problem::error("bad-value", span, message, "in this stage");
            problems.push(problem.with_help("raise `max_new_tokens`, or lower `min_new_tokens`").at("min_new_tokens"));
        }
        problems
    }
}

/// What an adapter is called whose base is computed with in another format than it is stored in.
pub(super) const ON_QUANTIZED: &str = "an adapter that was trained on a quantised base";

/// Positions that the model of a folder has, without its weights.
///
/// # Errors
/// Fails where its configuration cannot be read.
pub fn positions(model: &Path) -> Result<usize, StageError> {
    Ok(checkpoint::architecture(model)?.max_position_embeddings().unwrap_or(usize::MAX))
}

/// What computes a model.
enum Engine {
    /// This process.
    Native(Box<dyn Evaluator>),
    /// Processes of the torch worker.
    Torch(Box<Worker>),
}

/// What the files of a model say of answers to tasks.
struct OfTasks {
    stop_token_ids: Vec<u32>,
    repetition_penalty: Option<f64>,
}

/// A model, its tokenizer and the options of its completions.
pub struct InferenceSession {
    model: Engine,
    pub tokenizer: Tokenizer,
    options: Options,
    stop_strings: StopStrings,
    of_tasks: OfTasks,
    stats: GenerationStats,
    /// What has been answered and scored, for an attempt after this one.
    pieces: Pieces,
}

impl InferenceSession {
    /// Opens what the parameters name.
    ///
    /// # Errors
    /// Fails if the checkpoint, the adapter or the tokenizer cannot be used, the vocabulary has no such stop token, or
    /// the kernel set cannot be made.
    pub fn open(params: &InferenceParams, sampling: Sampling, context: &mut StageContext) -> Result<Self, StageError> {
        let model = context.open(&params.model)?;
        let adapter = params.adapter.as_ref().map(|input| context.open(input)).transpose()?;
        let tokenizer = params.tokenizer.as_ref().map(|input| context.open(input)).transpose()?;
        let tokenizer_folder = tokenizer.as_ref().map_or(&model.folder, |artifact| &artifact.folder);
        let tokenizer = Tokenizer::from_folder(tokenizer_folder)?;
        let options = Options {
            max_new_tokens: params.max_new_tokens,
            min_new_tokens: params.min_new_tokens,
            stop_token_ids: stop::token_ids(params, &model.folder, &tokenizer)?,
            sampling,
            batch_size: params.batch_size,
        };
        let of_tasks = OfTasks {
            stop_token_ids: stop::token_ids_of_tasks(params, &model.folder, &tokenizer)?,
            repetition_penalty: stop::repetition_penalty(&model.folder)?,
        };
        let architecture = checkpoint::architecture(&model.folder)?;
        let adapter_facts = adapter.as_ref().map(|adapter| &adapter.description.facts);
        let serves = params
            .serves_with(aware::is_aware(&model.folder), adapter_facts)
            .map_err(|message| StageError::new(Cause::BadParameters, message))?;
        let choice = Choice::of(params.backend, serves, &architecture, context)?;
        let format = weight_format(params.precision.quantize.as_ref(), adapter.as_ref(), context)?;
        let (model, computed_by) = match choice.is_torch {
            true => {
                context.report(choice.report());
                let worker = Worker::open(params, &model, adapter.as_ref(), architecture, &format)?;
                let (devices, batch_size) = (context.devices(), params.batch_size);
                let computed_by = format!("torch, {} {}, by {batch_size}", devices.workers(), devices.kind);
                (Engine::Torch(Box::new(worker)), Some(computed_by))
            }
            false => {
                if context.devices().workers() > 1 {
                    context.warn("the native backend runs inference in one process: `resources.count` has no effect");
                }
                let kernels = params.kernels.on(context.devices().kind);
                let with = (params.precision.dtype.compute(), kernels);
                let Opened { model, computed_by } = open_native(&model, adapter.as_ref(), with, &format, context)?;
                // Only the kernels of this program give a request the same bits in any batch.
                (Engine::Native(model), (kernels == Kernels::Cpu).then_some(computed_by))
            }
        };
        let stop_strings = StopStrings::new(&params.stop_strings);
        let mut pieces = Pieces::open(computed_by, context);
        pieces.complete_as(params.max_new_tokens, &params.stop_strings, sampling);
        Ok(Self { model, tokenizer, options, stop_strings, of_tasks, stats: GenerationStats::default(), pieces })
    }

    /// Completions end before these texts, too, unless they end by `stop_strings` as it is.
    pub fn end_at(&mut self, params: &InferenceParams, texts: &[String]) {
        if texts.is_empty() {
            return;
        }
        let texts = [params.stop_strings.as_slice(), texts].concat();
        self.stop_strings = StopStrings::new(&texts);
        self.pieces.complete_as(self.options.max_new_tokens, &texts, self.options.sampling);
    }

    /// How it answers a task next: when answers end (after so many tokens, at the end of text, or before one of these
    /// texts), and how their tokens are chosen, beside a penalty that the model itself asks for.
    pub fn answer_task_as(&mut self, max_new_tokens: usize, stop_strings: &[String], sampling: Sampling) {
        let repetition_penalty = sampling.repetition_penalty.or(self.of_tasks.repetition_penalty);
        let sampling = Sampling { repetition_penalty, ..sampling };
        let special = stop::special(stop_strings, &self.tokenizer);
        self.options.stop_token_ids = self.of_tasks.stop_token_ids.iter().copied().chain(special).collect();
        self.options.max_new_tokens = max_new_tokens;
        self.options.sampling = sampling;
        self.stop_strings = StopStrings::new(stop_strings);
        self.pieces.complete_as(max_new_tokens, stop_strings, sampling);
    }

    /// Positions the model has.
    pub fn max_position_embeddings(&self) -> usize {
        match &self.model {
            Engine::Native(model) => model.max_position_embeddings(),
            Engine::Torch(worker) => worker.architecture().max_position_embeddings().unwrap_or(usize::MAX),
        }
    }

    /// Whether it is best asked everything at once: ranks share it out, and complete prompts of one length together.
    pub fn prefers_all_at_once(&self) -> bool {
        matches!(self.model, Engine::Torch(_))
    }

    /// Scores rows: each is a document of its own. `told` hears how many are done.
    ///
    /// # Errors
    /// Fails if a row does not fit the model, the device fails, or the user ends it.
    pub fn score(
        &mut self,
        rows: &[Encoded],
        told: &mut dyn FnMut(usize, &mut StageContext),
        context: &mut StageContext,
    ) -> Result<Vec<RowScore>, StageError> {
        match &mut self.model {
            Engine::Native(model) => score::rows(&mut **model, rows, told, &mut self.pieces, context),
            Engine::Torch(worker) => worker.score(rows, told, &mut self.pieces, context),
        }
    }

    /// Scores continuations of contexts, each as if it were the only one. `told` hears how many are done.
    ///
    /// # Errors
    /// As for [`InferenceSession::score`].
    pub fn score_continuations(
        &mut self,
        contexts: &[Context<'_>],
        told: &mut dyn FnMut(usize, &mut StageContext),
        context: &mut StageContext,
    ) -> Result<Vec<Vec<RowScore>>, StageError> {
        match &mut self.model {
            Engine::Native(model) => {
                let pieces = &mut self.pieces;
                let mut scores: Vec<_> = contexts.iter().map(|context| pieces.scores_of(context)).collect();
                let missing: Vec<usize> = (0..contexts.len()).filter(|at| scores[*at].is_none()).collect();
                let asked: Vec<Context<'_>> = missing.iter().map(|at| contexts[*at].clone()).collect();
                let there: usize = scores.iter().flatten().map(Vec::len).sum();
                let mut score = |some: &[Context<'_>]| {
                    let found = model.score_continuations(some)?;
                    for (context, tokens) in some.iter().zip(&found) {
                        pieces.add_scores_of(context, tokens.iter().map(|tokens| score::of_tokens(tokens)).collect());
                    }
                    Ok(found)
                };
                let mut told = |done, context: &mut StageContext| told(there + done, context);
                let found = score::continuations(&mut score, &asked, &mut told, context)?;
                missing.into_iter().zip(found).for_each(|(at, found)| scores[at] = Some(found));
                Ok(scores.into_iter().map(|scores| scores.expect("each context is scored")).collect())
            }
            Engine::Torch(worker) => {
                let all = contexts.iter().flat_map(|of| of.continuations.iter().map(|ids| score::row(of.ids, ids)));
                let rows: Vec<Encoded> = all.collect();
                // Those of one length together, so that little is padded; the longest first, which show the memory.
                let mut order: Vec<usize> = (0..rows.len()).collect();
                order.sort_by_key(|at| std::cmp::Reverse(rows[*at].input_ids.len()));
                let sorted: Vec<Encoded> = order.iter().map(|at| rows[*at].clone()).collect();
                let mut found = vec![RowScore::default(); rows.len()];
                for (at, score) in order.into_iter().zip(worker.score(&sorted, told, &mut self.pieces, context)?) {
                    found[at] = score;
                }
                let mut found = found.into_iter();
                Ok(contexts.iter().map(|of| found.by_ref().take(of.continuations.len()).collect()).collect())
            }
        }
    }

    /// Checks that tokens are in the model's vocabulary; `whose` says where they come from.
    ///
    /// # Errors
    /// Fails with the first that is not.
    pub fn check_vocabulary(&self, ids: &[u32], whose: impl FnOnce() -> String) -> Result<(), StageError> {
        let vocab_size = match &self.model {
            Engine::Native(model) => model.vocab_size(),
            Engine::Torch(worker) => worker.architecture().vocab_size().unwrap_or(usize::MAX),
        };
        let Some(id) = ids.iter().find(|id| **id as usize >= vocab_size) else { return Ok(()) };
        let text = self.tokenizer.decode_with_special(&[*id])?;
        let message =
            format!("{} has the token `{text}` with id {id}, and the model's vocabulary ends at {vocab_size}", whose());
        Err(StageError::bad_data(message)
            .with_help("this tokenizer is not the model's: name the right one in `tokenizer`"))
    }

    /// Why a prompt cannot be asked, if it cannot.
    pub fn misfit(&self, prompt: &[u32]) -> Option<String> {
        let positions = self.max_position_embeddings();
        match prompt.len() {
            0 => Some("it has no tokens".to_owned()),
            tokens if tokens >= positions => {
                Some(format!("it has {tokens} tokens, and the model has {positions} positions"))
            }
            _ => None,
        }
    }

    /// Time, bandwidth and memory that answering took so far, in lines for a person.
    pub fn speed(&self) -> String {
        match &self.model {
            Engine::Native(model) => speed(&self.stats, model.weight_bytes_per_step(), peak_resident_bytes()),
            Engine::Torch(worker) => worker.speed(),
        }
    }
}

/// A model that this program computes, opened to score and complete.
pub struct Opened {
    pub model: Box<dyn Evaluator>,
    /// The kernel set and its instructions.
    pub computed_by: String,
}

/// Opens a model with its weights in a format, and with an adapter on it where there is one.
///
/// # Errors
/// Fails if the kernel set cannot be made, the model cannot be loaded, or the adapter does not fit it.
pub fn open_native(
    model: &Artifact,
    adapter: Option<&Artifact>,
    (compute, kernels): (Compute, Kernels),
    format: &WeightFormat,
    context: &mut StageContext,
) -> Result<Opened, StageError> {
    let adapter = adapter.map(|artifact| adapter::open(artifact, model)).transpose()?;
    context.record("threads", context.threads());
    let opened = match kernels {
        Kernels::Cpu => {
            let ops = Arc::new(format.applied_to(kernels::cpu_on(context.threads(), compute, context)?));
            let computed_by = ops.describe();
            let engine = NativeEngine::with_adapter(ops, &model.folder, format, adapter.as_ref())?;
            Opened { model: Box::new(engine), computed_by }
        }
        Kernels::Candle => {
            let ops = Arc::new(kernels::candle_computing(compute, context)?);
            let computed_by = ops.describe();
            let engine = NativeEngine::with_adapter(ops, &model.folder, format, adapter.as_ref())?;
            Opened { model: Box::new(engine), computed_by }
        }
    };
    context.record("kernel_set", opened.computed_by.clone());
    Ok(opened)
}
