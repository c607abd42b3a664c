//! Inference by a decoder of this program.

use std::path::Path;
use std::sync::Arc;

use engine::error::{Cause, OrFail, StageError};
use model::batch::Batch;
use model::blocks::Blocks;
use model::decoder::{Adapters, Carried, Decoder, RunError, TargetScore};
use model::generation::{
    CACHE_BYTES, Completion, GenerateError, GenerationStats, Generator, Limits, Listener, Load, Options, Prefill,
    Progress, Queue, QueuedRequest, Request, RequestId,
};
use model::memory::cache_bytes;
use model::peft::Adapter as AdapterWeights;
use model::sampling::SamplingError;
use model::scoring::{Context, Scorer};
use model::session::SessionError;

use super::requests::{Batching, EngineSettings, InferenceEngine};
use super::score::ContinuationScores;
use crate::compute::kernels;
use crate::compute::quantize::WeightFormat;

/// Tokens of prompts that are read between two tokens of every completion in progress.
const PREFILL_TOKENS: usize = 128;

/// A model that scores, and completes prompts that are all known.
pub trait Evaluator: InferenceEngine {
    /// Bytes of weights that a step of generation reads, whatever the number of completions that grow together.
    fn weight_bytes_per_step(&self) -> u64;

    /// Scores each target of a batch, by adapter 0.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model or the device fails.
    fn score(&mut self, batch: &Batch) -> Result<Vec<TargetScore>, StageError>;

    /// Scores the tokens of continuations, by adapter 0: `[context][continuation][token]`. What each scores does not
    /// depend on what else is asked.
    ///
    /// # Errors
    /// Fails if a context does not fit the model or the device fails.
    fn score_continuations(&mut self, contexts: &[Context<'_>]) -> Result<ContinuationScores, StageError>;

    /// Completes prompts that are all known, several at a time, by adapter 0. Each must have a token at least, and
    /// fewer than the model has positions.
    ///
    /// # Errors
    /// Fails if a prompt does not fit the model, the model computes something that is no number, the device fails, or
    /// the listener does or gives up.
    fn complete(
        &mut self,
        requests: &[Request<'_>],
        options: &Options,
        listener: &mut dyn Listener,
    ) -> Result<(Vec<Completion>, GenerationStats), StageError>;
}

/// Opens a model on the CPU, which requests are pushed to, with adapters, which get the numbers from 1 on.
///
/// # Errors
/// Fails if the folder cannot be read, or an adapter does not fit the model.
pub(super) fn open(
    folder: &Path,
    adapters: &[AdapterWeights],
    settings: &EngineSettings,
) -> Result<Box<dyn InferenceEngine>, StageError> {
    let EngineSettings { precision, threads, profile, .. } = settings;
    let ops = kernels::cpu_recorded(*threads, precision.dtype.compute(), profile)?;
    let format = precision.quantize.clone().unwrap_or(WeightFormat::AsStored);
    let mut engine = NativeEngine::load(Arc::new(format.applied_to(ops)), folder, &format)?;
    engine.limits.sequences = settings.sequences;
    engine.limits.positions = settings.positions.unwrap_or(usize::MAX).min(engine.limits.positions);
    engine.limits.prefix_tokens = (settings.prefix_bytes / bytes_per_token(&engine.decoder)) as usize;
    for adapter in adapters {
        engine.add_adapter(adapter)?;
    }
    Ok(Box::new(engine))
}

fn not_fitting() -> String {
    "the adapter does not fit the model".to_owned()
}

/// What the keys and values of a token take.
fn bytes_per_token<B: Blocks>(decoder: &Decoder<B>) -> u64 {
    cache_bytes(decoder.config(), 1).max(1)
}

/// A decoder of this program.
pub(super) struct NativeEngine<B: Blocks> {
    decoder: Decoder<B>,
    /// None where the decoder was given its adapter when it was opened.
    adapters: Option<Adapters<B>>,
    limits: Limits,
    /// From the first request on.
    queue: Option<Queue<B>>,
    scorer: Scorer<B>,
}

impl<B: Blocks> NativeEngine<B> {
    fn load(ops: Arc<B>, folder: &Path, format: &WeightFormat) -> Result<Self, StageError> {
        let decoder = format.load(ops, folder);
        Ok(Self::of(decoder.or_fail(Cause::BadData, || "the model cannot be loaded".to_owned())?))
    }

    fn of(decoder: Decoder<B>) -> Self {
        let bytes_per_token = bytes_per_token(&decoder);
        let limits = Limits {
            sequences: 1,
            positions: decoder.config().max_position_embeddings,
            cached_tokens: (CACHE_BYTES as u64 / bytes_per_token) as usize,
            prefix_tokens: 0,
            prefill: Prefill::Interleaved { tokens: PREFILL_TOKENS },
        };
        Self { decoder, adapters: Some(Adapters::default()), limits, queue: None, scorer: Scorer::default() }
    }

    /// A model that has no adapter but this one, if any.
    ///
    /// # Errors
    /// Fails if the model cannot be loaded or the adapter does not fit it.
    pub(super) fn with_adapter(
        ops: Arc<B>,
        folder: &Path,
        format: &WeightFormat,
        adapter: Option<&AdapterWeights>,
    ) -> Result<Self, StageError> {
        let mut engine = Self::load(ops, folder, format)?;
        if let Some(adapter) = adapter {
            engine.decoder.attach(adapter).or_fail(Cause::BadData, not_fitting)?;
            engine.adapters = None;
        }
        Ok(engine)
    }

    fn select(&mut self, carried: Carried) {
        if let Some(adapters) = &mut self.adapters {
            adapters.select(&mut self.decoder, carried);
        }
    }
}

impl<B: Blocks> InferenceEngine for NativeEngine<B>
where
    Self: Send,
{
    fn max_position_embeddings(&self) -> usize {
        self.limits.positions
    }

    fn batching(&self) -> Batching {
        Batching::Continuous
    }

    fn vocab_size(&self) -> usize {
        self.decoder.config().vocab_size
    }

    fn push(&mut self, request: QueuedRequest) -> Result<RequestId, GenerateError> {
        let queue = match &mut self.queue {
            Some(queue) => queue,
            none => none.insert(Queue::new(&self.decoder, self.limits)?),
        };
        queue.push(request)
    }

    fn step(&mut self) -> Result<Vec<Progress>, StageError> {
        let mut progress = Vec::new();
        for carried in self.queue.as_mut().map(|queue| queue.admit(&self.decoder)).unwrap_or_default() {
            self.select(carried);
            let Some(queue) = &mut self.queue else { continue };
            progress.extend(queue.step(&self.decoder, carried).map_err(failure)?);
        }
        Ok(progress)
    }

    fn cancel(&mut self, id: RequestId) {
        if let Some(queue) = &mut self.queue {
            queue.cancel(&self.decoder, id);
        }
    }

    fn add_adapter(&mut self, adapter: &AdapterWeights) -> Result<usize, StageError> {
        let Some(adapters) = self.adapters.as_mut() else {
            return Err(StageError::internal("a model that was opened with an adapter cannot use another one"));
        };
        adapters.add(&mut self.decoder, adapter).or_fail(Cause::BadData, not_fitting)
    }

    fn remove_adapter(&mut self, number: usize) {
        if let Some(adapters) = &mut self.adapters {
            adapters.remove(&mut self.decoder, number);
        }
        if let Some(queue) = &mut self.queue {
            queue.forget_adapter(number);
        }
    }

    fn load(&self) -> Load {
        self.queue.as_ref().map(Queue::load).unwrap_or_default()
    }

    fn most_cached_tokens(&self) -> usize {
        self.limits.cached_tokens.max(self.limits.positions)
    }

    fn most_prefix_tokens(&self) -> usize {
        self.limits.prefix_tokens
    }
}

impl<B: Blocks> Evaluator for NativeEngine<B>
where
    Self: Send,
{
    fn weight_bytes_per_step(&self) -> u64 {
        self.decoder.weight_bytes_per_step()
    }

    fn score(&mut self, batch: &Batch) -> Result<Vec<TargetScore>, StageError> {
        self.select(Carried::Nothing);
        self.decoder.score(batch).map_err(not_scored)
    }

    fn score_continuations(&mut self, contexts: &[Context<'_>]) -> Result<ContinuationScores, StageError> {
        self.select(Carried::Nothing);
        self.scorer.score(&self.decoder, contexts).map_err(not_scored)
    }

    fn complete(
        &mut self,
        requests: &[Request<'_>],
        options: &Options,
        listener: &mut dyn Listener,
    ) -> Result<(Vec<Completion>, GenerationStats), StageError> {
        self.select(Carried::Nothing);
        let mut generator = Generator::new(&self.decoder, options.clone()).map_err(failure)?;
        let completions = generator.complete(requests, listener).map_err(failure)?;
        Ok((completions, generator.stats()))
    }
}

/// A batch that could not be scored.
pub fn not_scored(error: RunError) -> StageError {
    let cause = match &error {
        RunError::Batch(_) => Cause::BadData,
        RunError::Kernel(_) => Cause::Machine,
    };
    StageError::new(cause, "the model cannot score a batch").with_source(error)
}

/// A failed generation as a stage's failure.
fn failure(error: GenerateError) -> StageError {
    let cause = match &error {
        GenerateError::Prompt { .. } | GenerateError::Listener(_) => Cause::BadData,
        GenerateError::Sampling(SamplingError::NotFinite { .. }) => Cause::Numeric,
        GenerateError::Sampling(SamplingError::OutOfRange { .. } | SamplingError::Empty) => Cause::BadParameters,
        GenerateError::Session(SessionError::Kernel(_)) | GenerateError::Room(_) => Cause::Machine,
        GenerateError::Session(SessionError::NoTokens(_) | SessionError::Vocabulary { .. }) => Cause::BadData,
        GenerateError::Session(SessionError::Sequence { .. } | SessionError::Full { .. }) => Cause::Internal,
        GenerateError::Cancelled => Cause::Cancelled,
    };
    let help = matches!(cause, Cause::Numeric)
        .then_some("weights of the model that are not finite or too great do that: did its training diverge?");
    let failure = StageError::new(cause, "prompts cannot be completed").with_source(error);
    match help {
        Some(help) => failure.with_help(help),
        None => failure,
    }
}
