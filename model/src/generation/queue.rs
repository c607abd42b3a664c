//! Continuous batching: requests wait in a queue, join those in progress between two passes over the weights, and leave
//! when they are complete or cancelled.
//!
//! What a request is answered depends on nothing but itself. Its prompt is read in pieces whose borders follow from its
//! length alone, and [`Session`] computes each piece in the same order of sums in whatever company.

use std::collections::{BTreeSet, VecDeque};
use std::time::Instant;

use super::prefixes::{BLOCK_TOKENS, Prefixes};
use super::{GenerateError, GenerationStats, Growing, Stop, TOKENS_PER_PASS};
use crate::blocks::Blocks;
use crate::decoder::{Carried, Decoder};
use crate::sampling::{Adjustments, Constraint, Sampling, SamplingError, TokenLogprobs};
use crate::session::Session;

/// A request in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

/// A prompt to complete, and how.
#[derive(Debug, Clone)]
pub struct QueuedRequest {
    /// Its tokens: one at least, and no more than the queue has positions for.
    pub prompt: Vec<u32>,
    /// With the seed and the position it addresses the draws.
    pub row: u64,
    /// The adapter that completes it, by its number.
    pub adapter: usize,
    /// A completion ends after so many tokens, or where the positions end.
    pub max_new_tokens: usize,
    /// No stop token is chosen before so many others.
    pub min_new_tokens: usize,
    /// A completion ends before one of these.
    pub stop_token_ids: Vec<u32>,
    /// How the next token is chosen.
    pub sampling: Sampling,
    /// Changes of the logits before that.
    pub adjustments: Adjustments,
    /// What the completion must hold to, after those changes.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Whether log-probabilities of the tokens of the completion are wanted, and of how many likely ones beside each.
    pub logprobs: Option<usize>,
    /// Likewise of the tokens of the prompt, from the second on.
    pub prompt_logprobs: Option<usize>,
}

/// What a queue may use.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Requests in progress at once, at most.
    pub sequences: usize,
    /// Tokens of a prompt and its completion, at most.
    pub positions: usize,
    /// Tokens of all requests in progress, at most, unless there is only one: each counts with all that it may have.
    pub cached_tokens: usize,
    /// Tokens whose keys and values are kept for prompts that begin with them, at most, beside those in progress.
    pub prefix_tokens: usize,
    /// When prompts are read.
    pub prefill: Prefill,
}

/// When prompts are read. It changes the order of work and not one bit of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prefill {
    /// Before anything is added to a completion: the fastest where nobody waits for a single token.
    First,
    /// At most so many tokens between two tokens of each completion, so that those in progress do not stall.
    Interleaved {
        /// The tokens: more than [`FEW_ROWS`](crate::ops::FEW_ROWS).
        tokens: usize,
    },
}

/// What a step added to a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// The request.
    pub id: RequestId,
    /// The log-probabilities of further tokens of the prompt, where they are wanted.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// The next token of the completion.
    pub token: Option<ChosenToken>,
    /// The stop token that was chosen in its place.
    pub stop_token: Option<ChosenToken>,
    /// Why there are no more, and the request has left the queue.
    pub ended: Option<Result<Stop, SamplingError>>,
}

/// A token of a completion.
#[derive(Debug, Clone, PartialEq)]
pub struct ChosenToken {
    /// The token.
    pub id: u32,
    /// Its log-probability, where that is wanted.
    pub logprobs: Option<TokenLogprobs>,
}

/// How full a queue is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that wait for a place.
    pub waiting: usize,
    /// Requests in progress.
    pub in_progress: usize,
    /// Tokens whose keys and values are cached.
    pub cached_tokens: usize,
    /// Tokens whose keys and values are kept for prompts that begin with them.
    pub prefix_tokens: usize,
    /// Tokens of prompts so far that were not computed, because they were kept.
    pub reused_tokens: u64,
}

/// Requests that wait, and those in progress.
pub struct Queue<B: Blocks> {
    session: Session<B>,
    limits: Limits,
    vocab_size: usize,
    slots: Vec<Option<Growing>>,
    waiting: VecDeque<Growing>,
    prefixes: Prefixes,
    reused_tokens: u64,
    pushed: u64,
    stats: GenerationStats,
}

impl<B: Blocks> Queue<B> {
    /// An empty queue for a decoder, whatever adapter it carries.
    ///
    /// # Errors
    /// Fails if the device has no room for the keys and values.
    pub fn new(decoder: &Decoder<B>, limits: Limits) -> Result<Self, GenerateError> {
        let session = Session::new(decoder, limits.sequences, limits.positions).map_err(GenerateError::Room)?;
        // What was computed for a short sequence is void in a long one where the frequencies change between them.
        let turns_anew = decoder.config().rope.turns_anew(0, limits.positions);
        let prefix_tokens = if turns_anew { 0 } else { limits.prefix_tokens };
        Ok(Self {
            session,
            limits,
            prefixes: Prefixes::new(prefix_tokens),
            reused_tokens: 0,
            vocab_size: decoder.config().vocab_size,
            slots: (0..limits.sequences).map(|_| None).collect(),
            waiting: VecDeque::new(),
            pushed: 0,
            stats: GenerationStats::default(),
        })
    }

    /// Adds a request.
    ///
    /// # Errors
    /// As [`Growing::new`]; nothing is added then.
    pub fn push(&mut self, request: QueuedRequest) -> Result<RequestId, GenerateError> {
        let growing = Growing::new(self.pushed, request, self.limits.positions, self.vocab_size)?;
        let id = growing.id;
        self.waiting.push_back(growing);
        self.pushed += 1;
        Ok(id)
    }

    /// Forgets a request, wherever it is. One that has left is none.
    pub fn cancel(&mut self, decoder: &Decoder<B>, id: RequestId) {
        self.waiting.retain(|waiting| waiting.id != id);
        if let Some(slot) = self.slots.iter().position(|slot| slot.as_ref().is_some_and(|growing| growing.id == id)) {
            self.free(decoder, slot);
        }
    }

    /// Forgets what is kept of prompts for an adapter, which no request is for.
    pub fn forget_adapter(&mut self, adapter: usize) {
        self.prefixes.forget(adapter);
    }

    /// Whether nothing waits or is in progress.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.slots.iter().all(Option::is_none)
    }

    /// How full it is.
    pub fn load(&self) -> Load {
        let in_progress = || self.slots.iter().flatten();
        Load {
            waiting: self.waiting.len(),
            in_progress: in_progress().count(),
            cached_tokens: in_progress().map(|growing| growing.read).sum(),
            prefix_tokens: self.prefixes.tokens(),
            reused_tokens: self.reused_tokens,
        }
    }

    /// What it took so far.
    pub fn stats(&self) -> GenerationStats {
        self.stats
    }

    /// Gives requests that wait their places, in their order, and returns what the decoder has to carry for all that
    /// are in progress: [`Queue::step`] is due with each.
    pub fn admit(&mut self, decoder: &Decoder<B>) -> BTreeSet<Carried> {
        let mut reserved: usize = self.slots.iter().flatten().map(|growing| growing.most).sum();
        while let (Some(slot), Some(next)) = (self.slots.iter().position(Option::is_none), self.waiting.front()) {
            if reserved > 0 && reserved + next.most > self.limits.cached_tokens {
                break;
            }
            reserved += next.most;
            self.slots[slot] = self.waiting.pop_front();
        }
        self.slots.iter().flatten().map(|growing| decoder.carried_for(growing.request.adapter)).collect()
    }

    /// Goes on with the requests that the decoder carries the right thing for: reads more of their prompts, or adds a
    /// token to each completion, or both.
    ///
    /// # Errors
    /// Fails if the device does. A request over whose logits no token can be chosen ends, and the others go on.
    pub fn step(&mut self, decoder: &Decoder<B>, carried: Carried) -> Result<Vec<Progress>, GenerateError> {
        let is_due = |growing: &&Growing| decoder.carried_for(growing.request.adapter) == carried;
        // One prompt after the other, whichever adapter it is for: a step with whatever is carried follows.
        let next_to_read = self.slots.iter().flatten().filter(|growing| growing.is_new()).min_by_key(|it| it.id);
        let (reads, tokens) = match self.limits.prefill {
            Prefill::First => (self.slots.iter().flatten().filter(is_due).any(Growing::is_new), TOKENS_PER_PASS),
            Prefill::Interleaved { tokens } => (next_to_read.as_ref().is_some_and(is_due), tokens),
        };
        let mut progress = Vec::new();
        if reads {
            let began = Instant::now();
            self.read_prompts(decoder, carried, tokens, &mut progress)?;
            self.stats.prefill += began.elapsed();
            if self.limits.prefill == Prefill::First {
                return Ok(progress);
            }
        }
        let began = Instant::now();
        if self.add_tokens(decoder, carried, &mut progress)? {
            self.stats.decode += began.elapsed();
        }
        Ok(progress)
    }

    /// Reads up to so many tokens of prompts, the oldest request's first, in one pass, and chooses the first token of
    /// each completion whose prompt has been read.
    fn read_prompts(
        &mut self,
        decoder: &Decoder<B>,
        carried: Carried,
        tokens: usize,
        progress: &mut Vec<Progress>,
    ) -> Result<(), GenerateError> {
        let (mut pieces, mut left) = (Vec::new(), tokens);
        for slot in self.in_progress(decoder, carried, Growing::is_new) {
            self.reuse(decoder, slot);
            let growing = self.growing(slot);
            let end = growing.piece_end(tokens);
            // The first is read however long it is: a last piece may be a little longer than the others.
            if pieces.is_empty() || end - growing.read <= left {
                left = left.saturating_sub(end - growing.read);
                pieces.push((slot, end));
            }
        }
        self.append(decoder, &pieces, progress)
    }

    /// Takes what is kept of the beginning of a prompt of which nothing has been read.
    fn reuse(&mut self, decoder: &Decoder<B>, slot: usize) {
        let Self { session, slots, prefixes, reused_tokens, .. } = self;
        let Some(growing) = slots[slot].as_mut().filter(|growing| growing.read == 0) else { return };
        let beginning = &growing.tokens[..growing.reusable()];
        for block in prefixes.find(growing.request.adapter, beginning) {
            let end = growing.read + BLOCK_TOKENS;
            session.extend(decoder, slot, &growing.tokens[growing.read..end], block);
            growing.read = end;
        }
        *reused_tokens += growing.read as u64;
    }

    /// Adds one token to each completion; says whether there are any.
    fn add_tokens(
        &mut self,
        decoder: &Decoder<B>,
        carried: Carried,
        progress: &mut Vec<Progress>,
    ) -> Result<bool, GenerateError> {
        let grows = |growing: &Growing| !growing.is_new() && growing.read < growing.tokens.len();
        let mut slots = self.in_progress(decoder, carried, grows);
        // The rows of an adapter lie together.
        slots.sort_by_key(|&slot| self.growing(slot).request.adapter);
        let pieces: Vec<(usize, usize)> =
            slots.into_iter().map(|slot| (slot, self.growing(slot).tokens.len())).collect();
        self.append(decoder, &pieces, progress)?;
        self.stats.decode_steps += u64::from(!pieces.is_empty());
        Ok(!pieces.is_empty())
    }

    /// The places of requests in some state that something has to be carried for, the oldest first.
    fn in_progress(&self, decoder: &Decoder<B>, carried: Carried, is: impl Fn(&Growing) -> bool) -> Vec<usize> {
        let found = self.slots.iter().enumerate().filter_map(|(slot, growing)| Some((slot, growing.as_ref()?)));
        let is_due = |growing: &Growing| decoder.carried_for(growing.request.adapter) == carried && is(growing);
        let due = found.filter(|(_, growing)| is_due(growing));
        let mut found: Vec<(RequestId, usize)> = due.map(|(slot, growing)| (growing.id, slot)).collect();
        found.sort_unstable();
        found.into_iter().map(|(_, slot)| slot).collect()
    }

    fn growing(&self, slot: usize) -> &Growing {
        self.slots[slot].as_ref().expect("a place that is in use")
    }

    /// Computes the tokens of some places up to the given ends, chooses what follows where all of them are computed
    /// then, and frees the places of requests that have ended.
    fn append(
        &mut self,
        decoder: &Decoder<B>,
        pieces: &[(usize, usize)],
        progress: &mut Vec<Progress>,
    ) -> Result<(), GenerateError> {
        let Self { session, slots, .. } = &mut *self;
        let growing = |slot: usize| slots[slot].as_ref().expect("a place that is in use");
        let new = pieces.iter().map(|&(slot, end)| growing(slot).append(slot, end)).collect::<Vec<_>>();
        let mut found: Vec<Vec<TokenLogprobs>> = vec![Vec::new(); pieces.len()];
        let mut last: Vec<Vec<f32>> = vec![Vec::new(); pieces.len()];
        session.append_each(decoder, &new, &mut |index, token, logits| {
            let (slot, end) = pieces[index];
            let growing = growing(slot);
            found[index].extend(growing.prompt_logprobs_after(growing.read + token, logits));
            if growing.read + token + 1 == end {
                last[index] = logits.to_vec();
            }
        })?;
        for ((&(slot, end), prompt_logprobs), logits) in pieces.iter().zip(found).zip(last) {
            let growing = self.slots[slot].as_mut().expect("a place that is in use");
            let (was_new, read) = (growing.is_new(), end - growing.read);
            growing.read = end;
            let is_read = end == growing.tokens.len();
            if was_new && is_read {
                let beginning = &growing.tokens[..growing.read_in_passes()];
                let session = &self.session;
                self.prefixes.keep(growing.request.adapter, beginning, |tokens| session.read(decoder, slot, tokens));
            }
            match was_new {
                true => {
                    self.stats.prompt_tokens += read as u64;
                    self.stats.first_tokens += u64::from(is_read);
                }
                false => self.stats.decode_tokens += 1,
            }
            let added = if is_read { growing.choose(&logits) } else { growing.nothing_new() };
            let has_ended = added.ended.is_some();
            if added.token.is_some() || has_ended || !prompt_logprobs.is_empty() {
                progress.push(Progress { prompt_logprobs, ..added });
            }
            if has_ended {
                self.free(decoder, slot);
            }
        }
        Ok(())
    }

    fn free(&mut self, decoder: &Decoder<B>, slot: usize) {
        self.slots[slot] = None;
        self.session.clear(decoder, slot);
    }
}
