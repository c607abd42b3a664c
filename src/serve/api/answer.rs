//! Completions as they are sent: whole, or as events.

use std::collections::VecDeque;
use std::task::{Context, Poll};

use http_server::EventSource;
use serde_json::{Value, json};
use stages::compute::inference::{ChosenToken, TokenLogprobs};
use tokio::sync::mpsc::UnboundedReceiver;

use super::error::ApiError;
use crate::serve::worker::{Failed, Finish, Update};

/// A completion that is being made.
pub(super) struct Choice {
    /// Its index in the answer.
    pub(super) index: usize,
    /// Which of the request's prompts it completes.
    pub(super) prompt: usize,
    pub(super) updates: UnboundedReceiver<Update>,
}

/// A completion that has been made.
pub(super) struct Completed {
    pub(super) index: usize,
    pub(super) prompt: usize,
    pub(super) text: String,
    pub(super) finish: Finish,
    /// Its tokens, with log-probabilities where they are wanted.
    pub(super) tokens: Vec<(u32, Option<TokenLogprobs>)>,
    /// The token that the model ended it with.
    pub(super) stop_token: Option<ChosenToken>,
    /// Log-probabilities of the prompt from its second token on, where they are wanted.
    pub(super) of_prompt: Vec<TokenLogprobs>,
}

/// What a request cost.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Usage {
    pub(super) prompt_tokens: usize,
    pub(super) completion_tokens: usize,
}

impl Usage {
    pub(super) fn json(self) -> Value {
        let Self { prompt_tokens, completion_tokens } = self;
        json!({
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        })
    }
}

impl Finish {
    /// Its name in answers.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

impl Choice {
    /// Waits for the whole completion.
    pub(super) async fn completed(mut self) -> Result<Completed, ApiError> {
        let (mut tokens, mut of_prompt) = (Vec::new(), Vec::new());
        loop {
            match self.updates.recv().await {
                Some(Update::Prompt(logprobs)) => of_prompt.extend(logprobs),
                Some(Update::Token { id, logprobs, .. }) => tokens.push((id, logprobs)),
                Some(Update::Ended { finish, stop_token, whole, .. }) => {
                    let Self { index, prompt, .. } = self;
                    return Ok(Completed { index, prompt, text: whole, finish, tokens, stop_token, of_prompt });
                }
                Some(Update::Failed(failed)) => return Err(failed.into()),
                None => return Err(ApiError::unavailable("the server is ending")),
            }
        }
    }
}

impl From<Failed> for ApiError {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Request(message) => Self::bad(message),
            Failed::Timeout => Self::timeout(),
            Failed::Stuck(message) => Self::stuck(message),
            Failed::Server(message) => Self::unavailable(message),
        }
    }
}

/// What an endpoint calls its events.
pub(super) trait Chunks: Send {
    /// The events before any token of a choice.
    fn first(&self, index: usize) -> Option<Value>;

    /// The event of more text or a token of a choice; none where there is nothing to say.
    fn more(&mut self, index: usize, text: &str, token: Option<(u32, Option<&TokenLogprobs>)>) -> Option<Value>;

    /// The events of a choice's end.
    fn last(&mut self, index: usize, finish: Finish, stop_token: Option<&ChosenToken>) -> Vec<Value>;

    /// The event of what all of it cost.
    fn usage(&self, usage: Usage) -> Value;
}

/// Completions as events.
pub(super) struct Stream<C> {
    pub(super) choices: Vec<Choice>,
    pub(super) chunks: C,
    pub(super) usage: Usage,
    pub(super) include_usage: bool,
    /// Events that are to be sent before more is waited for.
    pub(super) ready: VecDeque<String>,
    pub(super) is_over: bool,
}

impl<C: Chunks> Stream<C> {
    pub(super) fn new(choices: Vec<Choice>, chunks: C, prompt_tokens: usize, include_usage: bool) -> Self {
        let ready = choices.iter().filter_map(|choice| chunks.first(choice.index)).map(|event| event.to_string());
        let (ready, usage) = (ready.collect(), Usage { prompt_tokens, completion_tokens: 0 });
        Self { choices, chunks, usage, include_usage, ready, is_over: false }
    }

    /// Takes news of the choice at a place; removes it where it has ended.
    fn update(&mut self, place: usize, update: Option<Update>) {
        let index = self.choices[place].index;
        match update {
            Some(Update::Prompt(_)) => {}
            Some(Update::Token { id, logprobs, text }) => {
                self.usage.completion_tokens += 1;
                let event = self.chunks.more(index, &text, Some((id, logprobs.as_ref())));
                self.ready.extend(event.map(|event| event.to_string()));
            }
            Some(Update::Ended { finish, stop_token, rest, .. }) => {
                let rest = self.chunks.more(index, &rest, None).map(|event| event.to_string());
                self.ready.extend(rest);
                self.ready.extend(self.chunks.last(index, finish, stop_token.as_ref()).iter().map(Value::to_string));
                self.choices.remove(place);
            }
            Some(Update::Failed(failed)) => self.fail(&failed.into()),
            None => self.fail(&ApiError::unavailable("the server is ending")),
        }
    }

    /// Ends all of it with an error; what is left of the choices is cancelled.
    fn fail(&mut self, error: &ApiError) {
        self.ready.push_back(error.json().to_string());
        self.choices.clear();
        self.is_over = true;
    }
}

impl<C: Chunks> EventSource for Stream<C> {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<String>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(event));
            }
            if self.is_over {
                return Poll::Ready(None);
            }
            if self.choices.is_empty() {
                if self.include_usage {
                    self.ready.push_back(self.chunks.usage(self.usage).to_string());
                }
                self.ready.push_back("[DONE]".to_owned());
                self.is_over = true;
                continue;
            }
            let found = self.choices.iter_mut().enumerate().find_map(|(place, choice)| {
                match choice.updates.poll_recv(context) {
                    Poll::Ready(update) => Some((place, update)),
                    Poll::Pending => None,
                }
            });
            match found {
                Some((place, update)) => self.update(place, update),
                None => return Poll::Pending,
            }
        }
    }
}
