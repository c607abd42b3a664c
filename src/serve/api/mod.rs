//! What is answered to which request, in the form that OpenAI's clients know.

mod adapters;
mod answer;
mod chat;
mod completions;
mod error;
mod fields;
mod options;
mod tokens;
mod tools;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use http_server::{Method, Refusal, Request, Response, Service, StatusCode};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};
use stages::compute::inference::{CompletionText, QueuedRequest};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, TryAcquireError, mpsc};

use super::metrics::{Computes, Metrics};
use super::worker::{Job, Order};
use crate::inference::{Named, Vocabulary};
use crate::progress::Verbosity;
use crate::terminal;
use answer::{Choice, Stream, Usage};
use chat::{ChatChunks, ChatRequest};
use completions::{CompletionChunks, CompletionRequest, Offsets};
use error::ApiError;
use options::Options;

/// What there is, for programs that make clients and requests of it.
const OPENAPI: &str = include_str!("openapi.json");

/// The paths of vLLM's API by which adapters come and go.
const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

const JSON: &str = "application/json";

/// What answers requests: all but the computation, which the worker does.
pub(super) struct Api {
    vocabulary: Arc<Vocabulary>,
    metrics: Arc<Metrics>,
    orders: Mutex<Sender<Order>>,
    /// Where adapters may be loaded from; empty where none may.
    adapter_folders: Vec<PathBuf>,
    /// A permit for each completion that is taken, in progress or waiting.
    places: Arc<Semaphore>,
    most_places: usize,
    draining: AtomicBool,
    answered: AtomicU64,
    /// When the server started, in seconds since 1970.
    started: u64,
    log: Log,
}

/// What is printed of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Log {
    pub(super) verbosity: Verbosity,
    pub(super) prompts: Prompts,
}

/// Whether prompts are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Prompts {
    Hidden,
    Printed,
}

/// What all parts of an answer begin with.
struct Head {
    id: String,
    created: u64,
    model: String,
}

impl Head {
    /// A whole answer, or the last event of one, which has no choices.
    fn whole(&self, object: &str, choices: Vec<Value>, usage: Usage) -> Value {
        let mut value = self.json(object, choices);
        value["usage"] = usage.json();
        value
    }

    /// An event before the last. Its usage is null where the last has one.
    fn chunk(&self, object: &str, choice: Value, include_usage: bool) -> Value {
        let mut value = self.json(object, vec![choice]);
        if include_usage {
            value["usage"] = Value::Null;
        }
        value
    }

    fn json(&self, object: &str, choices: Vec<Value>) -> Value {
        let Self { id, created, model } = self;
        json!({
            "id": id,
            "object": object,
            "created": created,
            "model": model,
            "system_fingerprint": null,
            "choices": choices,
        })
    }
}

fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The paths that there are, each with the method that it takes.
const PATHS: [(&str, Method); 10] = [
    ("/openapi.json", Method::GET),
    ("/health", Method::GET),
    ("/metrics", Method::GET),
    ("/v1/models", Method::GET),
    ("/v1/chat/completions", Method::POST),
    ("/v1/completions", Method::POST),
    ("/tokenize", Method::POST),
    ("/detokenize", Method::POST),
    (LOAD, Method::POST),
    (UNLOAD, Method::POST),
];

impl Api {
    pub(super) fn new(
        vocabulary: Arc<Vocabulary>,
        metrics: Arc<Metrics>,
        orders: Sender<Order>,
        adapter_folders: Vec<PathBuf>,
        most_places: usize,
        log: Log,
    ) -> Self {
        Self {
            vocabulary,
            metrics,
            orders: Mutex::new(orders),
            adapter_folders,
            places: Arc::new(Semaphore::new(most_places)),
            most_places,
            draining: AtomicBool::new(false),
            answered: AtomicU64::new(0),
            started: seconds_since_1970(),
            log,
        }
    }

    /// Takes no further requests on connections that are open.
    pub(super) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    async fn route(&self, request: &Request) -> Result<Response, ApiError> {
        let path = request.path.as_str();
        if let Some(name) = path.strip_prefix("/v1/models/") {
            expect(request, &Method::GET)?;
            let model = self.model(&percent_decode_str(name).decode_utf8_lossy())?;
            return Ok(Response::json(StatusCode::OK, self.model_json(&model).to_string()));
        }
        let (path, method) = known(path).ok_or_else(|| ApiError::no_path(path))?;
        if self.adapter_folders.is_empty() && [LOAD, UNLOAD].contains(&path) {
            return Err(ApiError::no_path(path));
        }
        expect(request, &method)?;
        if method == Method::POST && request.content_type.as_deref() != Some(JSON) {
            // A page of another site may send anything else without asking first.
            return Err(ApiError::bad("the `Content-Type` is not `application/json`"));
        }
        match path {
            "/health" if self.draining.load(Ordering::Relaxed) => Err(ApiError::unavailable("the server is ending")),
            "/health" => {
                let Computes { backend, device, batching } = self.metrics.computes;
                let health = json!({ "status": "ok", "backend": backend, "device": device, "batching": batching });
                Ok(Response::json(StatusCode::OK, health.to_string()))
            }
            "/metrics" => {
                Ok(Response::new(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", self.metrics.text()))
            }
            "/openapi.json" => Ok(Response::json(StatusCode::OK, OPENAPI)),
            "/v1/models" => {
                let models: Vec<Value> = self.vocabulary.models().iter().map(|model| self.model_json(model)).collect();
                Ok(Response::json(StatusCode::OK, json!({ "object": "list", "data": models }).to_string()))
            }
            "/v1/chat/completions" => self.chat(&request.body).await,
            "/v1/completions" => self.completions(&request.body).await,
            LOAD => adapters::load(self, &request.body).await,
            UNLOAD => adapters::unload(self, &request.body),
            "/tokenize" => {
                Ok(Response::json(StatusCode::OK, tokens::tokenize(&request.body, &self.vocabulary)?.to_string()))
            }
            _ => Ok(Response::json(StatusCode::OK, tokens::detokenize(&request.body, &self.vocabulary)?.to_string())),
        }
    }

    fn model(&self, name: &str) -> Result<Arc<Named>, ApiError> {
        self.vocabulary.model(name).ok_or_else(|| {
            let models = self.vocabulary.models();
            ApiError::no_model(name, &models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>())
        })
    }

    fn model_json(&self, model: &Named) -> Value {
        json!({
            "id": model.name,
            "object": "model",
            "created": self.started,
            "owned_by": "pipeline",
            "max_model_len": self.vocabulary.positions,
        })
    }

    async fn chat(&self, body: &[u8]) -> Result<Response, ApiError> {
        let request = ChatRequest::read(body, &self.vocabulary)?;
        let model = self.model(&request.model)?;
        let stop_text = model.stop_text(&request.messages);
        let request = request.ending_at(stop_text);
        let reader = request.call_reader(&model)?;
        let prompt = self.vocabulary.conversation(&model, &request.messages).map_err(|error| {
            let source = std::error::Error::source(&error).map(|source| format!(": {source}")).unwrap_or_default();
            ApiError::unprocessable("messages", format!("{error}{source}"))
        })?;
        self.log_prompt(&prompt);
        let prompt_tokens = prompt.len();
        // A great schema takes its time, which others on this thread need not wait.
        let constraint = tokio::task::block_in_place(|| request.constraint(reader, &self.vocabulary))?;
        let request = if constraint.is_some() { request.ending_by_grammar() } else { request };
        let plain = QueuedRequest { logprobs: request.logprobs, constraint, ..self.vocabulary.request(&model, prompt) };
        // The template ends with what parts the response from it.
        let choices = self.begin(&request.options, vec![(plain, CompletionText::default())], "messages")?;
        let head = self.head("chatcmpl", &request.model);
        let wants_logprobs = request.logprobs.is_some();
        if request.options.stream {
            let include_usage = request.options.include_usage;
            let vocabulary = Arc::clone(&self.vocabulary);
            let calls = reader.map(|reader| (reader, BTreeMap::new()));
            let chunks = ChatChunks { head, include_usage, wants_logprobs, vocabulary, calls };
            return Ok(Response::events(Box::new(Stream::new(choices, chunks, prompt_tokens, include_usage))));
        }
        let (completed, usage) = completed(choices, prompt_tokens).await?;
        let answer = chat::answer(&head, &completed, usage, wants_logprobs, reader, &self.vocabulary);
        Ok(Response::json(StatusCode::OK, answer.to_string()))
    }

    async fn completions(&self, body: &[u8]) -> Result<Response, ApiError> {
        let request = CompletionRequest::read(body, &self.vocabulary)?;
        let model = self.model(&request.model)?;
        let prompts = request.prompts(&model, &self.vocabulary)?;
        prompts.iter().for_each(|prompt| self.log_prompt(&prompt.ids));
        let plain = |prompt: &completions::Prompt| {
            let plain = QueuedRequest {
                logprobs: request.logprobs,
                prompt_logprobs: request.logprobs.filter(|_| request.echo),
                ..self.vocabulary.request(&model, prompt.ids.clone())
            };
            (plain, CompletionText::behind(&prompt.ids))
        };
        let prompt_tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        let choices = self.begin(&request.options, prompts.iter().map(plain).collect(), "prompt")?;
        let head = self.head("cmpl", &request.model);
        if request.options.stream {
            let (include_usage, wants_logprobs) = (request.options.include_usage, request.logprobs.is_some());
            let vocabulary = Arc::clone(&self.vocabulary);
            let prompts = prompts.into_iter().map(|prompt| prompt.ids).collect();
            let offsets = Offsets::new(prompts, request.options.choices);
            let chunks = CompletionChunks { head, include_usage, wants_logprobs, vocabulary, offsets };
            return Ok(Response::events(Box::new(Stream::new(choices, chunks, prompt_tokens, include_usage))));
        }
        let (completed, usage) = completed(choices, prompt_tokens).await?;
        let answer = completions::answer(&head, &request, &prompts, &completed, usage, &self.vocabulary);
        Ok(Response::json(StatusCode::OK, answer.to_string()))
    }

    fn head(&self, kind: &str, model: &str) -> Head {
        let number = self.answered.fetch_add(1, Ordering::Relaxed);
        Head {
            id: format!("{kind}-{:x}-{number:x}", self.started),
            created: seconds_since_1970(),
            model: model.to_owned(),
        }
    }

    /// Hands all completions of a request to the worker, or none.
    fn begin(
        &self,
        options: &Options,
        prompts: Vec<(QueuedRequest, CompletionText)>,
        field: &str,
    ) -> Result<Vec<Choice>, ApiError> {
        for (plain, _) in &prompts {
            let (tokens, positions) = (plain.prompt.len(), self.vocabulary.positions);
            let needs_a_token = options.max_tokens != Some(0);
            if tokens == 0 {
                return Err(ApiError::field(field, "the prompt has no tokens"));
            }
            if tokens + usize::from(needs_a_token) > positions {
                let message = format!("the prompt has {tokens} tokens, and the model has {positions} positions");
                return Err(ApiError::too_long(message).about(field));
            }
        }
        let mut places = self.places(prompts.len() * options.choices, if options.choices > 1 { "n" } else { field })?;
        let mut choices = Vec::new();
        for (prompt, (plain, text)) in prompts.into_iter().enumerate() {
            let mut request = options.request(plain, prompt, 0);
            request.stop_token_ids.extend(options.stop_tokens(&self.vocabulary));
            for choice in 0..options.choices {
                let place = places.split(1).ok_or_else(|| ApiError::unavailable("a place was lost"))?;
                let (reply, updates) = mpsc::unbounded_channel();
                let request = options.request(request.clone(), prompt, choice);
                let (stops, text) = (options.stop_strings(), text.clone());
                let job = Job { request, stops, text, reply, place };
                self.order(Order::Complete(Box::new(job)))?;
                choices.push(Choice { index: choices.len(), prompt, updates });
            }
        }
        Ok(choices)
    }

    fn places(&self, wanted: usize, field: &str) -> Result<OwnedSemaphorePermit, ApiError> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(ApiError::unavailable("the server is ending"));
        }
        if wanted > self.most_places {
            let message = format!(
                "the request has {wanted} completions, and this server computes at most {} at \
                    once",
                self.most_places
            );
            return Err(ApiError::field(field, message));
        }
        let places = Arc::clone(&self.places).try_acquire_many_owned(wanted as u32);
        places.map_err(|error| match error {
            TryAcquireError::NoPermits => ApiError::full(),
            TryAcquireError::Closed => ApiError::unavailable("the server is ending"),
        })
    }

    fn log_prompt(&self, ids: &[u32]) {
        if self.log.prompts == Prompts::Printed {
            let text = self.vocabulary.tokenizer.decode_with_special(ids).unwrap_or_default();
            terminal::tell_line(format_args!("prompt: {}", serde_json::Value::String(text)));
        }
    }

    fn log(&self, request: &Request, status: StatusCode, began: Instant) {
        let path = known(&request.path).map_or("other", |(path, _)| path);
        self.metrics.responded(path, status.as_u16());
        if self.log.verbosity == Verbosity::Verbose {
            let seconds = began.elapsed().as_secs_f64();
            terminal::tell_line(format_args!("{} {path} {} ({seconds:.3} s)", request.method, status.as_u16()));
        }
    }
}

fn known(path: &str) -> Option<(&'static str, Method)> {
    PATHS.into_iter().find(|(known, _)| *known == path)
}

fn expect(request: &Request, method: &Method) -> Result<(), ApiError> {
    match request.method == *method || (request.method == Method::HEAD && *method == Method::GET) {
        true => Ok(()),
        false => Err(ApiError::method(method.as_str())),
    }
}

/// Waits for all completions of a request, and adds up what they cost.
async fn completed(choices: Vec<Choice>, prompt_tokens: usize) -> Result<(Vec<answer::Completed>, Usage), ApiError> {
    let mut all = Vec::with_capacity(choices.len());
    // They grow at the same time, whichever is waited for.
    for choice in choices {
        all.push(choice.completed().await?);
    }
    let completion_tokens = all.iter().map(|completed| completed.tokens.len()).sum();
    Ok((all, Usage { prompt_tokens, completion_tokens }))
}

impl Service for Api {
    fn is_public(&self, path: &str) -> bool {
        path == "/health"
    }

    async fn respond(&self, request: Request) -> Response {
        let began = Instant::now();
        let response = self.route(&request).await.unwrap_or_else(|error| error.response());
        self.log(&request, response.status, began);
        response
    }

    fn refuse(&self, refusal: Refusal) -> Response {
        self.metrics.responded("refused", refusal.status().as_u16());
        ApiError::refused(refusal).response()
    }
}
