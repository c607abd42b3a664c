//! Completes prompts: several at a time, and where one is answered the next takes its place.
//!
//! Prompts are read in passes of their own, in pieces of a bounded length, so that reading and writing can be timed
//! apart and memory stays bounded whatever a prompt's length. What a prompt is answered does not depend on its company.

use std::time::{Duration, Instant};

use crate::adapter::Projection;
use crate::blocks::Blocks;
use crate::decoder::Decoder;
use crate::ops::KernelError;
use crate::sampling::{Place, Sampler, Sampling, SamplingError};
use crate::session::{Append, Session, SessionError};

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
    fn answered(&mut self, _request: usize) {}

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
pub struct Effort {
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

impl std::ops::AddAssign for Effort {
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
    sampler: Sampler,
    effort: Effort,
}

impl<'a, B: Blocks> Generator<'a, B> {
    /// A generator.
    ///
    /// # Errors
    /// Fails if a setting of the sampling lies outside of its range.
    pub fn new(decoder: &'a Decoder<B>, options: Options) -> Result<Self, GenerateError> {
        Ok(Self { decoder, sampler: Sampler::new(options.sampling)?, options, effort: Effort::default() })
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
    pub fn effort(&self) -> Effort {
        self.effort
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
        let mut session = Session::new(self.decoder, group.sequences, group.capacity).map_err(GenerateError::Room)?;
        let mut waiting = group.requests.into_iter();
        let mut slots: Vec<Option<Growing<'_>>> = (0..group.sequences).map(|_| None).collect();
        loop {
            for (slot, place) in slots.iter_mut().enumerate() {
                if let Some(ended) = place.take_if(|growing| growing.stop.is_some()) {
                    let index = ended.index;
                    answers[index] = Some(ended.finish());
                    listener.answered(index);
                }
                if place.is_none() {
                    *place =
                        waiting.next().map(|index| Growing::new(index, requests[index], self.most(&requests[index])));
                    session.clear(slot);
                }
            }
            if listener.cancelled() {
                return Err(GenerateError::Cancelled);
            }
            let began = Instant::now();
            if slots.iter().flatten().any(Growing::is_new) {
                self.effort.prompt_tokens += self.read_prompts(&mut session, &mut slots, listener)?;
                self.effort.prefill += began.elapsed();
            } else if slots.iter().any(Option::is_some) {
                self.effort.decode_tokens += self.write_tokens(&mut session, &mut slots, listener)?;
                self.effort.decode_steps += 1;
                self.effort.decode += began.elapsed();
            } else {
                return Ok(());
            }
        }
    }

    /// Reads the prompts of the sequences that are new, in passes of a bounded length, and chooses the first token of
    /// each answer. Returns how many tokens were read.
    fn read_prompts(
        &mut self,
        session: &mut Session<'_, B>,
        slots: &mut [Option<Growing<'_>>],
        listener: &mut dyn Listener,
    ) -> Result<u64, GenerateError> {
        let mut tokens = 0;
        loop {
            let (mut pieces, mut left) = (Vec::new(), TOKENS_PER_PASS);
            for (slot, growing) in slots.iter().enumerate() {
                let Some(growing) = growing.as_ref().filter(|growing| growing.is_new()) else { continue };
                // Where a prompt is cut depends on the prompt alone.
                let end = growing.tokens.len().min(growing.read + TOKENS_PER_PASS);
                if end - growing.read <= left {
                    left -= end - growing.read;
                    pieces.push((slot, end));
                }
            }
            if pieces.is_empty() {
                return Ok(tokens);
            }
            let new: Vec<Append<'_>> = pieces
                .iter()
                .map(|(slot, end)| {
                    let growing = slots[*slot].as_ref().expect("a piece is of a sequence");
                    Append { sequence: *slot, tokens: &growing.tokens[growing.read..*end] }
                })
                .collect();
            let logits = session.append(&new)?;
            tokens += new.iter().map(|new| new.tokens.len() as u64).sum::<u64>();
            for ((slot, end), logits) in pieces.into_iter().zip(logits) {
                let growing = slots[slot].as_mut().expect("a piece is of a sequence");
                growing.read = end;
                if end == growing.tokens.len() {
                    self.effort.first_tokens += 1;
                    self.choose(growing, &logits, listener)?;
                }
            }
            if listener.cancelled() {
                return Err(GenerateError::Cancelled);
            }
        }
    }

    /// Adds one token to each sequence; returns how many there are.
    fn write_tokens(
        &mut self,
        session: &mut Session<'_, B>,
        slots: &mut [Option<Growing<'_>>],
        listener: &mut dyn Listener,
    ) -> Result<u64, GenerateError> {
        let new: Vec<Append<'_>> = slots
            .iter()
            .enumerate()
            .filter_map(|(slot, growing)| growing.as_ref().map(|growing| (slot, growing)))
            .map(|(slot, growing)| Append { sequence: slot, tokens: &growing.tokens[growing.read..] })
            .collect();
        let logits = session.append(&new)?;
        let count = new.len() as u64;
        for (growing, logits) in slots.iter_mut().flatten().zip(logits) {
            growing.read = growing.tokens.len();
            self.choose(growing, &logits, listener)?;
        }
        Ok(count)
    }

    /// Chooses a sequence's next token.
    fn choose(
        &mut self,
        growing: &mut Growing<'_>,
        logits: &[f32],
        listener: &mut dyn Listener,
    ) -> Result<(), GenerateError> {
        if growing.tokens.len() >= growing.most {
            growing.stop = Some(Stop::Length);
            return Ok(());
        }
        let stop_token_ids = self.options.stop_token_ids.as_slice();
        let new_tokens = growing.tokens.len() - growing.request.prompt.len();
        let place = Place {
            seen: &growing.tokens,
            banned: if new_tokens < self.options.min_new_tokens { stop_token_ids } else { &[] },
            row: growing.request.row,
            position: growing.tokens.len() as u64,
        };
        let token = self.sampler.next_token(logits, &place)?;
        if stop_token_ids.contains(&token) {
            growing.stop = Some(Stop::EndOfText);
            return Ok(());
        }
        growing.tokens.push(token);
        let flow = listener.token(growing.index, token).map_err(GenerateError::Listener)?;
        growing.stop = match flow {
            Flow::Stop => Some(Stop::Listener),
            Flow::Continue => (growing.tokens.len() >= growing.most).then_some(Stop::Length),
        };
        Ok(())
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

/// A prompt and its completion so far.
struct Growing<'a> {
    /// Index of the request.
    index: usize,
    request: Request<'a>,
    tokens: Vec<u32>,
    /// Tokens that the session has.
    read: usize,
    /// Tokens at most.
    most: usize,
    stop: Option<Stop>,
}

impl<'a> Growing<'a> {
    fn new(index: usize, request: Request<'a>, most: usize) -> Self {
        Self { index, request, tokens: request.prompt.to_vec(), read: 0, most, stop: None }
    }

    /// Whether a part of its prompt has not been read.
    fn is_new(&self) -> bool {
        self.read < self.request.prompt.len()
    }

    fn finish(mut self) -> Completion {
        let ids = self.tokens.split_off(self.request.prompt.len());
        Completion { ids, stop: self.stop.expect("a completion ends for a reason") }
    }
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
