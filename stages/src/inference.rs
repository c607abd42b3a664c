//! A model that is asked: opened from artefacts, scored on batches, and made to complete prompts.
//!
//! It leaves to others: what the prompts are, and what becomes of the answers.

use std::path::Path;
use std::sync::Arc;

use engine::context::{Artifact, StageContext};
use engine::error::{Cause, OrFail, StageError};
use model::batch::Batch;
use model::blocks::Blocks;
use model::decoder::{Decoder, RunError, TargetScore};
use model::ops::Ops;
use model::parameter::Keep;
use model::peft::Adapter;
use model::sampling::{Sampler, Sampling, SamplingError};
use model::session::{Append, Session, SessionError};
use serde_json::Value;

use crate::adapter;
use crate::kernels;
use crate::tokenizer::Tokenizer;
use crate::train::Kernels;

/// A prompt to complete.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Its tokens.
    pub prompt: &'a [u32],
    /// Its number: decides the draws, so that a prompt is answered alike in whatever company.
    pub row: u64,
}

/// When a completion ends.
#[derive(Debug, Clone, Copy)]
pub struct Limits<'a> {
    /// After so many tokens, or where the model's positions end.
    pub max_new_tokens: usize,
    /// Before one of these.
    pub stop_token_ids: &'a [u32],
}

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The model ended it.
    EndOfText,
    /// The limit did.
    Length,
}

/// What a model adds to a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// The new tokens, without the one that ended them.
    pub ids: Vec<u32>,
    /// Why there are no more.
    pub stop: Stop,
}

/// A decoder that is only asked, on whichever kernel set.
pub trait Inference {
    /// Positions the model has: the most tokens of prompt and completion together.
    fn max_position_embeddings(&self) -> usize;

    /// Scores each target of a batch.
    ///
    /// # Errors
    /// Fails if the batch does not fit the model or the device fails.
    fn score(&mut self, batch: &Batch) -> Result<Vec<TargetScore>, StageError>;

    /// Completes prompts, all of them together. Each must have a token at least, and fewer than the model has positions.
    ///
    /// # Errors
    /// Fails if a prompt does not fit the model, the model computes something that is no number, the device fails, or
    /// `cancelled` says so.
    fn complete(
        &self,
        requests: &[Request<'_>],
        limits: Limits<'_>,
        sampling: Sampling,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<Completion>, StageError>;
}

/// Opens a model, with an adapter on it where there is one.
///
/// # Errors
/// Fails if the checkpoint or the adapter cannot be used, or the kernel set cannot be made.
pub fn open(
    model: &Artifact,
    adapter: Option<&Artifact>,
    kernel_set: Kernels,
    context: &mut StageContext,
) -> Result<Box<dyn Inference>, StageError> {
    let adapter = adapter.map(|artifact| adapter::open(artifact, model)).transpose()?;
    context.record("threads", context.threads());
    match kernel_set {
        Kernels::Cpu => {
            let ops = kernels::cpu(context.threads())?;
            context.record("kernel_set", ops.describe());
            load(ops, &model.folder, adapter.as_ref())
        }
        Kernels::Candle => {
            let ops = kernels::candle();
            context.record("kernel_set", ops.describe());
            load(ops, &model.folder, adapter.as_ref())
        }
    }
}

fn load<B: Blocks>(ops: Arc<B>, folder: &Path, adapter: Option<&Adapter>) -> Result<Box<dyn Inference>, StageError> {
    let mut decoder =
        Decoder::load(ops, folder, Keep::Frozen).or_fail(Cause::BadData, || "the model cannot be loaded".to_owned())?;
    if let Some(adapter) = adapter {
        decoder.attach(adapter).or_fail(Cause::BadData, || "the adapter does not fit the model".to_owned())?;
    }
    Ok(Box::new(decoder))
}

impl<B: Blocks> Inference for Decoder<B> {
    fn max_position_embeddings(&self) -> usize {
        self.config().max_position_embeddings
    }

    fn score(&mut self, batch: &Batch) -> Result<Vec<TargetScore>, StageError> {
        Decoder::score(self, batch).map_err(|error| {
            let cause = match &error {
                RunError::Batch(_) => Cause::BadData,
                RunError::Kernel(_) => Cause::Machine,
            };
            StageError::new(cause, "the model cannot score a batch").with_source(error)
        })
    }

    fn complete(
        &self,
        requests: &[Request<'_>],
        limits: Limits<'_>,
        sampling: Sampling,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<Completion>, StageError> {
        let positions = self.config().max_position_embeddings;
        let longest = requests.iter().map(|request| request.prompt.len()).max().unwrap_or(0);
        let capacity = longest.saturating_add(limits.max_new_tokens).min(positions);
        let mut session = Session::new(self, requests.len(), capacity)
            .or_fail(Cause::Machine, || "there is no room for the keys and values".to_owned())?;
        let mut sampler =
            Sampler::new(sampling).or_fail(Cause::BadParameters, || "the sampling is wrong".to_owned())?;
        let mut growing: Vec<Growing> =
            requests.iter().map(|request| Growing::new(request, limits, positions)).collect();
        loop {
            let active: Vec<usize> = (0..growing.len()).filter(|at| growing[*at].stop.is_none()).collect();
            if active.is_empty() {
                return Ok(growing.into_iter().map(Growing::finish).collect());
            }
            if cancelled() {
                return Err(StageError::new(Cause::Cancelled, "ended by the user"));
            }
            let new: Vec<Append<'_>> =
                active.iter().map(|at| Append { sequence: *at, tokens: growing[*at].unread() }).collect();
            let logits = session.append(&new).map_err(session_failure)?;
            for (at, logits) in active.into_iter().zip(logits) {
                let sequence = &mut growing[at];
                sequence.read = sequence.tokens.len();
                let position = sequence.tokens.len() as u64;
                let token = sampler
                    .next_token(&logits, &sequence.tokens, requests[at].row, position)
                    .map_err(sampling_failure)?;
                sequence.push(token, limits.stop_token_ids);
            }
        }
    }
}

/// A prompt and its completion so far.
struct Growing {
    tokens: Vec<u32>,
    prompt_length: usize,
    /// Tokens that the session has.
    read: usize,
    /// Tokens at most.
    most: usize,
    stop: Option<Stop>,
}

impl Growing {
    fn new(request: &Request<'_>, limits: Limits<'_>, positions: usize) -> Self {
        let prompt_length = request.prompt.len();
        let most = prompt_length.saturating_add(limits.max_new_tokens).min(positions);
        let stop = (prompt_length >= most).then_some(Stop::Length);
        Self { tokens: request.prompt.to_vec(), prompt_length, read: 0, most, stop }
    }

    fn unread(&self) -> &[u32] {
        &self.tokens[self.read..]
    }

    fn push(&mut self, token: u32, stop_token_ids: &[u32]) {
        if stop_token_ids.contains(&token) {
            self.stop = Some(Stop::EndOfText);
            return;
        }
        self.tokens.push(token);
        if self.tokens.len() >= self.most {
            self.stop = Some(Stop::Length);
        }
    }

    fn finish(mut self) -> Completion {
        let ids = self.tokens.split_off(self.prompt_length);
        Completion { ids, stop: self.stop.expect("a completion ends for a reason") }
    }
}

fn session_failure(error: SessionError) -> StageError {
    let cause = match &error {
        SessionError::Kernel(_) => Cause::Machine,
        SessionError::NoTokens(_) | SessionError::Vocabulary { .. } => Cause::BadData,
        SessionError::Sequence { .. } | SessionError::Full { .. } => Cause::Internal,
    };
    StageError::new(cause, "the model cannot continue a prompt").with_source(error)
}

fn sampling_failure(error: SamplingError) -> StageError {
    let cause = match &error {
        SamplingError::NotFinite { .. } => Cause::Numeric,
        SamplingError::OutOfRange { .. } => Cause::BadParameters,
        SamplingError::Empty => Cause::Internal,
    };
    StageError::new(cause, "no next token can be chosen").with_source(error)
}

/// The ids that end a completion: those of `generation_config.json` and `config.json`, and those of the tokenizer.
///
/// # Errors
/// Fails if one of the files is no JSON.
pub fn stop_token_ids(model: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>, StageError> {
    let mut ids = tokenizer.stop_token_ids();
    for name in ["generation_config.json", "config.json"] {
        let Ok(text) = std::fs::read(model.join(name)) else { continue };
        let config: Value =
            serde_json::from_slice(&text).or_fail(Cause::BadData, || format!("the model's `{name}` is not JSON"))?;
        match &config["eos_token_id"] {
            Value::Array(several) => ids.extend(several.iter().filter_map(as_id)),
            one => ids.extend(as_id(one)),
        }
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn as_id(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}
