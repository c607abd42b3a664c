//! Completes prompts: several at a time, and where one is answered the next takes its place.
//!
//! Prompts are read in passes of their own, in pieces of a bounded length, so that reading and writing can be timed
//! apart and memory stays bounded whatever a prompt's length. What a prompt is answered does not depend on its company.
//!
//! [`Generator`] completes requests that are all known and share their options. [`Queue`], which it is a loop over,
//! takes requests as they come, each with options and an adapter of its own.

mod growing;
mod prefixes;
mod queue;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::adapter::Projection;
use crate::blocks::Blocks;
use crate::decoder::{Carried, Decoder};
use crate::ops::KernelError;
use crate::sampling::{Adjustments, Sampler, Sampling, SamplingError};
use crate::session::SessionError;
pub use growing::Growing;
pub use queue::{ChosenToken, Limits, Load, Prefill, Progress, Queue, QueuedRequest, RequestId};

/// Tokens of prompts that are read in one pass.
pub const TOKENS_PER_PASS: usize = 1024;

/// What the keys and values of all sequences together may take, unless a single one takes more.
pub const CACHE_BYTES: usize = 2 << 30;

/// Cached keys and values are 32-bit floats.
const BYTES_PER_ELEMENT: usize = 4;

/// A prompt to complete.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Its tokens: one at least, and fewer than the model has positions.
    pub prompt: &'a [u32],
    /// Its number: decides the draws, so that a prompt is answered alike in whatever company.
    pub row: u64,
}

/// How prompts are completed.
#[derive(Debug, Clone)]
pub struct Options {
    /// An answer ends after so many tokens, or where the model's positions end.
    pub max_new_tokens: usize,
    /// No stop token is chosen before so many others.
    pub min_new_tokens: usize,
    /// An answer ends before one of these.
    pub stop_token_ids: Vec<u32>,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Sequences that grow together, at most: speed and memory, not the answers.
    pub batch_size: usize,
}

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The model ended it with a stop token.
    EndOfText,
    /// The limit did.
    Length,
    /// The listener did.
    Listener,
}

/// What a model adds to a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// The new tokens, without a stop token.
    pub ids: Vec<u32>,
    /// Why there are no more.
    pub stop: Stop,
}

/// Whether an answer goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// With the next token.
    Continue,
    /// No further: the answer says what it had to.
    Stop,
}

/// Follows the answers token by token.
pub trait Listener {
    /// A token was added to the answer of the request at this index.
    ///
    /// # Errors
    /// Whatever ends the generation.
    fn token(&mut self, request: usize, token: u32) -> Result<Flow, Box<dyn std::error::Error + Send + Sync>>;

    /// The answer of the request at this index is whole.
    fn answered(&mut self, _request: usize, _completion: &Completion) {}

    /// Whether to give up.
    fn cancelled(&self) -> bool {
        false
    }
}

/// Nobody follows.
impl Listener for () {
    fn token(&mut self, _: usize, _: u32) -> Result<Flow, Box<dyn std::error::Error + Send + Sync>> {
        Ok(Flow::Continue)
    }
}

/// Why prompts are not completed.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// A prompt has no tokens, or as many as the model has positions.
    #[error("prompt {request} has {tokens} tokens, and the model has {positions} positions")]
    Prompt {
        /// Index of the request.
        request: usize,
        /// Its tokens.
        tokens: usize,
        /// Positions of the model.
        positions: usize,
    },
    /// The settings make no sense, or the model computed something that is no number.
    #[error("no next token can be chosen")]
    Sampling(#[from] SamplingError),
    /// The model cannot go on.
    #[error("the model cannot continue a prompt")]
    Session(#[from] SessionError),
    /// The device has no room for the keys and values.
    #[error("there is no room for the keys and values")]
    Room(#[source] KernelError),
    /// The listener failed.
    #[error("the answer cannot be followed")]
    Listener(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The listener gave up.
    #[error("ended by the user")]
    Cancelled,
}

/// What it took to complete prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GenerationStats {
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Time to read them and to choose the first token of each answer.
    pub prefill: Duration,
    /// First tokens of answers, which the prompts' logits give; a stop token counts.
    pub first_tokens: u64,
    /// Tokens chosen after these; stop tokens count.
    pub decode_tokens: u64,
    /// Passes over the weights in which these were chosen, one token of each sequence at a time.
    pub decode_steps: u64,
    /// Time for these.
    pub decode: Duration,
}

impl std::ops::AddAssign for GenerationStats {
    fn add_assign(&mut self, other: Self) {
        self.prompt_tokens += other.prompt_tokens;
        self.prefill += other.prefill;
        self.first_tokens += other.first_tokens;
        self.decode_tokens += other.decode_tokens;
        self.decode_steps += other.decode_steps;
        self.decode += other.decode;
    }
}

/// Completes prompts on a decoder.
pub struct Generator<'a, B: Blocks> {
    decoder: &'a Decoder<B>,
    options: Options,
    stats: GenerationStats,
}

impl<'a, B: Blocks> Generator<'a, B> {
    /// A generator.
    ///
    /// # Errors
    /// Fails if a setting of the sampling lies outside of its range.
    pub fn new(decoder: &'a Decoder<B>, options: Options) -> Result<Self, GenerateError> {
        Sampler::new(options.sampling)?;
        Ok(Self { decoder, options, stats: GenerationStats::default() })
    }

    /// Completes each request; the answers are in their order.
    ///
    /// # Errors
    /// Any [`GenerateError`]; a prompt that does not fit is found before anything is computed.
    pub fn complete(
        &mut self,
        requests: &[Request<'_>],
        listener: &mut dyn Listener,
    ) -> Result<Vec<Completion>, GenerateError> {
        let positions = self.decoder.config().max_position_embeddings;
        let bad = requests.iter().position(|request| !(1..positions).contains(&request.prompt.len()));
        if let Some(request) = bad {
            return Err(GenerateError::Prompt { request, tokens: requests[request].prompt.len(), positions });
        }
        let mut answers: Vec<Option<Completion>> = vec![None; requests.len()];
        for group in self.groups(requests) {
            self.complete_group(requests, group, listener, &mut answers)?;
        }
        Ok(answers.into_iter().map(|answer| answer.expect("each request is in one group")).collect())
    }

    /// What it took so far.
    pub fn stats(&self) -> GenerationStats {
        self.stats
    }

    /// Tokens that a request may have in the end.
    fn most(&self, request: &Request<'_>) -> usize {
        let positions = self.decoder.config().max_position_embeddings;
        request.prompt.len().saturating_add(self.options.max_new_tokens).min(positions)
    }

    /// Splits the requests so that the caches of each group have room: those that are too long to stand beside others
    /// are a group of their own.
    fn groups(&self, requests: &[Request<'_>]) -> Vec<Group> {
        let positions = self.decoder.attention_shapes().map(|shape| 2 * shape.num_key_value_heads * shape.head_dim);
        let room = CACHE_BYTES / (positions.sum::<usize>() * BYTES_PER_ELEMENT).max(1);
        let batch_size = self.options.batch_size.clamp(1, requests.len().max(1));
        let (long, short): (Vec<usize>, Vec<usize>) =
            (0..requests.len()).partition(|index| self.most(&requests[*index]) > room / batch_size);
        let group = |requests_of: Vec<usize>| {
            let capacity = requests_of.iter().map(|index| self.most(&requests[*index])).max()?;
            let sequences = (room / capacity).clamp(1, batch_size.min(requests_of.len()));
            Some(Group { requests: requests_of, sequences, capacity })
        };
        [long, short].into_iter().filter_map(group).collect()
    }

    fn complete_group(
        &mut self,
        requests: &[Request<'_>],
        group: Group,
        listener: &mut dyn Listener,
        answers: &mut [Option<Completion>],
    ) -> Result<(), GenerateError> {
        let Group { requests: indices, sequences, capacity } = group;
        let limits = Limits {
            sequences,
            positions: capacity,
            cached_tokens: usize::MAX,
            prefix_tokens: 0,
            prefill: Prefill::First,
        };
        let mut queue = Queue::new(self.decoder, limits)?;
        let mut growing = BTreeMap::new();
        for index in indices {
            let id = queue.push(self.queued(&requests[index]))?;
            growing.insert(id, (index, Vec::new()));
        }
        while !queue.is_empty() {
            if listener.cancelled() {
                return Err(GenerateError::Cancelled);
            }
            queue.admit(self.decoder);
            for Progress { id, token, ended, .. } in queue.step(self.decoder, Carried::Nothing)? {
                let (index, ids) = growing.get_mut(&id).expect("a request in progress was pushed");
                let mut stop = ended.transpose()?;
                if let Some(token) = token {
                    ids.push(token.id);
                    if listener.token(*index, token.id).map_err(GenerateError::Listener)? == Flow::Stop {
                        queue.cancel(self.decoder, id);
                        stop = Some(Stop::Listener);
                    }
                }
                if let Some(stop) = stop {
                    let completion = Completion { ids: std::mem::take(ids), stop };
                    listener.answered(*index, &completion);
                    answers[*index] = Some(completion);
                }
            }
        }
        self.stats += queue.stats();
        Ok(())
    }

    fn queued(&self, request: &Request<'_>) -> QueuedRequest {
        let Options { max_new_tokens, min_new_tokens, stop_token_ids, sampling, .. } = &self.options;
        QueuedRequest {
            prompt: request.prompt.to_vec(),
            row: request.row,
            adapter: 0,
            max_new_tokens: *max_new_tokens,
            min_new_tokens: *min_new_tokens,
            stop_token_ids: stop_token_ids.clone(),
            sampling: *sampling,
            adjustments: Adjustments::default(),
            constraint: None,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

/// Requests whose caches have the same capacity.
struct Group {
    /// Their indices.
    requests: Vec<usize>,
    /// Sequences that grow together.
    sequences: usize,
    /// Tokens that each of them may have.
    capacity: usize,
}

impl<B: Blocks> Decoder<B> {
    /// Bytes of weights that a step of generation reads, whatever the number of sequences: every projection, with its
    /// adapter, and the output matrix. Of the embedding a step reads a few rows, and norms are small; neither
    /// counts.
    pub fn weight_bytes_per_step(&self) -> u64 {
        let of_projection = |projection: &Projection<B>| {
            let (out_features, in_features) = (projection.matrix.out_features, projection.matrix.in_features);
            let rank = projection.lora.as_ref().map_or(0, |lora| lora.a.shape[0]);
            self.ops().weight_bytes(&projection.matrix.weight)
                + (rank * (out_features + in_features) * size_of::<f32>()) as u64
        };
        self.projections().into_iter().map(of_projection).sum()
    }
}
