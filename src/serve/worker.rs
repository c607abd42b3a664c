//! The one thread that owns the model: takes requests between steps, and sends what they are answered as it comes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use engine::error::StageError;
use stages::compute::inference::{
    AdapterWeights, ChosenToken, CompletionText, GenerateError, InferenceEngine, Progress, QueuedRequest, RequestId,
    Stop, StopStrings, TokenLogprobs,
};
use stages::data::tokenizer::TokenizerError;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::metrics::Metrics;
use crate::inference::Vocabulary;

/// How often it is looked whether all is well while nothing is requested.
const IDLE_CHECK: Duration = Duration::from_secs(1);

/// What the thread is asked to do.
pub(super) enum Order {
    Complete(Box<Job>),
    /// Adds an adapter, and answers with its number.
    Load {
        adapter: Box<AdapterWeights>,
        reply: oneshot::Sender<Result<usize, StageError>>,
    },
    /// Forgets an adapter once no request is for it.
    Unload {
        number: usize,
    },
}

/// A completion to make.
pub(super) struct Job {
    pub(super) request: QueuedRequest,
    pub(super) stops: StopStrings,
    /// Of no tokens yet.
    pub(super) text: CompletionText,
    /// What it is answered goes here; a client that is gone has closed it.
    pub(super) reply: UnboundedSender<Update>,
    /// Its place among those that the server takes.
    pub(super) place: OwnedSemaphorePermit,
}

/// News of a completion.
#[derive(Debug)]
pub(super) enum Update {
    /// Log-probabilities of further tokens of the prompt, from the second on.
    Prompt(Vec<TokenLogprobs>),
    /// The next token, and what text is settled by it.
    Token { id: u32, logprobs: Option<TokenLogprobs>, text: String },
    /// The end: the token that the model ended it with, what text was left, and the whole of it.
    Ended { finish: Finish, stop_token: Option<ChosenToken>, rest: String, whole: String },
    /// It cannot be completed.
    Failed(Failed),
}

/// Why a completion ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Finish {
    /// The model ended it, or a stop string did.
    Stop,
    /// The limit did.
    Length,
}

/// Why one cannot be completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failed {
    /// The request is at fault.
    Request(String),
    /// It took longer than a request may.
    Timeout,
    /// No token can follow: the same request ends there again.
    Stuck(String),
    /// The server cannot go on.
    Server(String),
}

/// What the thread works with.
pub(super) struct Worker {
    pub(super) engine: Box<dyn InferenceEngine>,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) orders: Receiver<Order>,
    /// How long a request may take, from its arrival to its end.
    pub(super) timeout: Duration,
}

/// A completion in progress, or waiting for that.
struct Growing {
    adapter: usize,
    reply: UnboundedSender<Update>,
    stops: StopStrings,
    text: CompletionText,
    began: Instant,
    last_token: Option<Instant>,
    /// Whether a grammar says which tokens may follow.
    is_constrained: bool,
    _place: OwnedSemaphorePermit,
}

impl Growing {
    /// Why it ends where no token follows: the request was right as far as could be seen.
    fn stuck(&self, error: &dyn std::fmt::Display) -> Failed {
        let cause = match self.is_constrained {
            true => {
                ": its schema comes to where nothing may follow, has too many states, or needs what the model's vocabulary \
                 cannot write"
            }
            false => "",
        };
        Failed::Stuck(format!("no next token can be chosen: {error}{cause}"))
    }
}

impl Worker {
    /// Works until nobody can send requests any more.
    ///
    /// # Errors
    /// Fails where the device does; all requests have been told then.
    pub(super) fn run(mut self) -> Result<(), StageError> {
        let mut growing: BTreeMap<RequestId, Growing> = BTreeMap::new();
        self.metrics.set_limits(self.engine.most_cached_tokens(), self.engine.most_prefix_tokens());
        let mut unloaded = Unloaded::default();
        loop {
            if growing.is_empty() {
                self.metrics.set_load(self.engine.load());
                match self.orders.recv_timeout(IDLE_CHECK) {
                    Ok(order) => self.obey(order, &mut growing, &mut unloaded),
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                    // What computes may be gone, which a step finds.
                    Err(RecvTimeoutError::Timeout) => {}
                }
            }
            while let Ok(order) = self.orders.try_recv() {
                self.obey(order, &mut growing, &mut unloaded);
            }
            self.drop_the_gone(&mut growing);
            for number in unloaded.unused(&growing) {
                self.engine.remove_adapter(number);
            }
            let progress = match self.engine.step() {
                Ok(progress) => progress,
                Err(error) => {
                    let failed = Failed::Server(error.to_string());
                    // Whoever is gone need not be told.
                    growing.into_values().for_each(|it| drop(it.reply.send(Update::Failed(failed.clone()))));
                    return Err(error);
                }
            };
            for progress in progress {
                self.advance(progress, &mut growing);
            }
            self.metrics.set_load(self.engine.load());
        }
    }

    fn obey(&mut self, order: Order, growing: &mut BTreeMap<RequestId, Growing>, unloaded: &mut Unloaded) {
        match order {
            // It was on its way when its adapter was unloaded.
            Order::Complete(job) if unloaded.numbers.contains(&job.request.adapter) => {
                let message = "the adapter has been unloaded".to_owned();
                drop(job.reply.send(Update::Failed(Failed::Request(message))));
            }
            Order::Complete(job) => self.take(*job, growing),
            // Whoever asked may be gone; the adapter is there all the same, without a name.
            Order::Load { adapter, reply } => drop(reply.send(self.engine.add_adapter(&adapter))),
            Order::Unload { number } => unloaded.add(number),
        }
    }

    fn take(&mut self, job: Job, growing: &mut BTreeMap<RequestId, Growing>) {
        let Job { request, stops, text, reply, place } = job;
        let (tokens, adapter) = (request.prompt.len() as u64, request.adapter);
        let is_constrained = request.constraint.is_some();
        match self.engine.push(request) {
            Ok(id) => {
                self.metrics.prompt_tokens.fetch_add(tokens, Ordering::Relaxed);
                let began = Instant::now();
                let of_job =
                    Growing { adapter, reply, stops, text, began, last_token: None, is_constrained, _place: place };
                growing.insert(id, of_job);
            }
            Err(error) => drop(reply.send(Update::Failed(refused(&error)))),
        }
    }

    /// Frees the places of clients that went away, and of those whose time is over.
    fn drop_the_gone(&mut self, growing: &mut BTreeMap<RequestId, Growing>) {
        let (engine, metrics, timeout) = (&mut self.engine, &self.metrics, self.timeout);
        growing.retain(|id, it| {
            let is_late = it.began.elapsed() > timeout;
            if it.reply.is_closed() {
                metrics.cancelled.fetch_add(1, Ordering::Relaxed);
            } else if is_late {
                drop(it.reply.send(Update::Failed(Failed::Timeout)));
            } else {
                return true;
            }
            engine.cancel(*id);
            false
        });
    }

    fn advance(&mut self, progress: Progress, growing: &mut BTreeMap<RequestId, Growing>) {
        let Progress { id, prompt_logprobs, token, stop_token, ended } = progress;
        let Some(it) = growing.get_mut(&id) else { return };
        // Who is gone is found before the next step.
        if !prompt_logprobs.is_empty() {
            drop(it.reply.send(Update::Prompt(prompt_logprobs)));
        }
        let mut finish = ended.map(|ended| match ended {
            Ok(Stop::Length) => Ok(Finish::Length),
            Ok(Stop::EndOfText | Stop::Listener) => Ok(Finish::Stop),
            Err(error) => Err(it.stuck(&error)),
        });
        if let Some(token) = token {
            self.metrics.completion_tokens.fetch_add(1, Ordering::Relaxed);
            let now = Instant::now();
            match it.last_token.replace(now) {
                None => self.metrics.first_token.observe(now - it.began),
                Some(last) => self.metrics.between_tokens.observe(now - last),
            }
            match it.text.push(token.id, &self.vocabulary.tokenizer, &it.stops) {
                Ok(()) => {
                    let text = it.text.take_settled(&it.stops).to_owned();
                    drop(it.reply.send(Update::Token { id: token.id, logprobs: token.logprobs, text }));
                    if it.text.stopped().is_some() {
                        finish = Some(Ok(Finish::Stop));
                    }
                }
                Err(error) => finish = Some(Err(of_tokenizer(&error))),
            }
        }
        let Some(finish) = finish else { return };
        self.engine.cancel(id);
        let Some(it) = growing.remove(&id) else { return };
        let update = finish.and_then(|finish| self.end(it.text, &it.stops, finish, stop_token));
        drop(it.reply.send(update.unwrap_or_else(Update::Failed)));
    }

    fn end(
        &self,
        mut text: CompletionText,
        stops: &StopStrings,
        finish: Finish,
        stop_token: Option<ChosenToken>,
    ) -> Result<Update, Failed> {
        let tokenizer = &self.vocabulary.tokenizer;
        text.finish(tokenizer, stops).map_err(|error| of_tokenizer(&error))?;
        let rest = text.take_rest().to_owned();
        let finish = if text.stopped().is_some() { Finish::Stop } else { finish };
        let whole = text.whole().to_owned();
        Ok(Update::Ended { finish, stop_token, rest, whole })
    }
}

/// Adapters that no further request is for.
#[derive(Default)]
struct Unloaded {
    numbers: BTreeSet<usize>,
    /// Those that are still in memory.
    held: BTreeSet<usize>,
}

impl Unloaded {
    fn add(&mut self, number: usize) {
        self.numbers.insert(number);
        self.held.insert(number);
    }

    /// Takes those that no request in progress or waiting is for.
    fn unused(&mut self, growing: &BTreeMap<RequestId, Growing>) -> BTreeSet<usize> {
        let is_used = |number: &usize| growing.values().any(|it| it.adapter == *number);
        let (used, unused) = std::mem::take(&mut self.held).into_iter().partition(is_used);
        self.held = used;
        unused
    }
}

fn of_tokenizer(error: &TokenizerError) -> Failed {
    Failed::Server(format!("the tokenizer failed: {error}"))
}

fn refused(error: &GenerateError) -> Failed {
    match error {
        GenerateError::Prompt { .. } | GenerateError::Sampling(_) | GenerateError::Session(_) => {
            let cause = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
            Failed::Request(format!("{error}{cause}"))
        }
        GenerateError::Room(_) | GenerateError::Listener(_) | GenerateError::Cancelled => {
            Failed::Server(error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::{Semaphore, mpsc};

    use super::*;

    #[test]
    fn a_completion_without_a_next_token_is_the_servers_fault() {
        let growing = |is_constrained| Growing {
            adapter: 0,
            reply: mpsc::unbounded_channel().0,
            stops: StopStrings::default(),
            text: CompletionText::default(),
            began: Instant::now(),
            last_token: None,
            is_constrained,
            _place: Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap(),
        };
        let Failed::Stuck(said) = growing(true).stuck(&"none is left") else { panic!("the request is at fault") };
        assert!(said.contains("none is left") && said.contains("schema") && said.contains("vocabulary"), "{said}");
        let Failed::Stuck(said) = growing(false).stuck(&"none is left") else { panic!("the request is at fault") };
        assert!(!said.contains("schema"), "{said}");
    }
}
