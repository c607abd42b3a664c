//! Requests computed by the torch worker: it gives logits, and tokens are chosen here, as natively.
//!
//! Batches are static: requests for one adapter that wait together begin together, and none joins them. A row that ends
//! leaves its batch. Batches take turns, token by token.

use std::collections::VecDeque;
use std::path::Path;

use devices::lease::Lease;
use engine::device::HeldDevice;
use engine::error::{Cause, OrFail, StageError};
use engine::execute::Follower;
use model::config::Architecture;
use model::generation::{GenerateError, Growing, Load, Progress, QueuedRequest, RequestId};
use model::peft::Adapter as AdapterWeights;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::requests::{Batching, EngineSettings, InferenceEngine};
use crate::compute::quantize::WeightFormat;
use crate::compute::torch::job::Job;
use crate::compute::torch::{Connection, Work};

/// Batches in progress at once: each costs a pass over the weights for a token of its rows.
const BATCHES: usize = 4;

/// Tokens of a prompt whose logits come at once where they are all wanted.
const LOGITS_AT_ONCE: usize = 64;

/// Positions of a model that has no bound.
const POSITIONS: usize = 32_768;

/// What the worker is to do.
#[derive(Serialize)]
#[serde(tag = "request", rename_all = "snake_case")]
enum BatchRequest<'a> {
    BeginBatch { batch: u64, adapter: Option<String>, prompts: Vec<&'a [u32]>, each: bool },
    NextTokens { batch: u64, rows: Vec<usize>, tokens: Vec<&'a [u32]>, each: bool },
    EndBatch { batch: u64 },
    LoadAdapter { adapter: String, folder: &'a Path },
    UnloadAdapter { adapter: String },
}

/// What the worker says of itself.
#[derive(Deserialize)]
struct Described {
    vocab_size: usize,
    /// Whether a batch can have only one row.
    is_alone: bool,
}

/// Logits of each row of a batch, after each of some tokens.
#[derive(Deserialize)]
struct Logits {
    /// Rows, tokens and size of the vocabulary.
    shape: [usize; 3],
}

#[derive(Deserialize)]
struct Loaded {
    /// Why it is not.
    error: Option<String>,
}

/// A command that has the worker compute.
struct Command {
    log: fn(&str),
}

impl Follower for Command {
    fn log(&self, line: &str) {
        (self.log)(line);
    }

    fn cancelled(&self) -> bool {
        // It drops the engine.
        false
    }
}

/// Requests that began together.
struct Batch {
    number: u64,
    adapter: usize,
    /// Those that the worker has rows of; none for one that has ended.
    rows: Vec<Option<Growing>>,
    /// Tokens that the worker has of the first row; a row whose prompt is read in pieces is the only one.
    read: usize,
}

impl Batch {
    /// What is sent next of each row that is left, and whether logits are wanted after each token of it.
    fn next(&self, at_once: usize) -> (Vec<&[u32]>, bool) {
        let rows: Vec<&Growing> = self.rows.iter().flatten().collect();
        if let [row] = rows.as_slice()
            && row.wants_prompt_logprobs()
            && self.read < row.prompt_tokens()
        {
            let end = self.read.saturating_add(at_once).min(row.prompt_tokens());
            return (vec![&row.tokens()[self.read..end]], true);
        }
        let begin = |row: &Growing| if self.read == 0 { 0 } else { row.tokens().len() - 1 };
        (rows.iter().map(|row| &row.tokens()[begin(row)..]).collect(), false)
    }

    /// Asks for the logits of what comes next; rows that have ended leave.
    fn ask(&mut self, at_once: usize, connection: &mut Connection) {
        let (tokens, each) = self.next(at_once);
        let (batch, has_begun, new) = (self.number, self.read > 0, tokens.first().map_or(0, |tokens| tokens.len()));
        let left = self.rows.iter().enumerate().filter(|(_, row)| row.is_some());
        let asked = match has_begun {
            true => BatchRequest::NextTokens { batch, rows: left.map(|(index, _)| index).collect(), tokens, each },
            false => BatchRequest::BeginBatch { batch, adapter: name(self.adapter), prompts: tokens, each },
        };
        connection.request(&asked, &[]);
        self.rows.retain(Option::is_some);
        self.read += new;
    }

    /// Adds a token to each row by the logits that were asked for, `[rows, tokens, vocab_size]`.
    fn add(&mut self, logits: &[u8], shape: [usize; 3], progress: &mut Vec<Progress>) {
        let [_, tokens, vocab_size] = shape;
        let mut logits = logits.chunks_exact(vocab_size * size_of::<f32>()).map(floats);
        for place in &mut self.rows {
            let Some(growing) = place else { continue };
            let (mut prompt_logprobs, mut last) = (Vec::new(), Vec::new());
            for (position, logits) in (self.read.saturating_sub(tokens)..).zip(logits.by_ref().take(tokens)) {
                prompt_logprobs.extend(growing.prompt_logprobs_after(position, &logits));
                last = logits;
            }
            let is_read = !growing.wants_prompt_logprobs() || self.read >= growing.prompt_tokens();
            let added = if is_read { growing.choose(&last) } else { growing.nothing_new() };
            if added.ended.is_some() {
                *place = None;
            }
            progress.push(Progress { prompt_logprobs, ..added });
        }
    }

    fn is_over(&self) -> bool {
        self.rows.iter().all(Option::is_none)
    }
}

/// Numbers as the worker sends them.
fn floats(bytes: &[u8]) -> Vec<f32> {
    let (numbers, _) = bytes.as_chunks();
    numbers.iter().map(|number| f32::from_le_bytes(*number)).collect()
}

/// What the worker calls an adapter; none for the base. PEFT looks for names within those of tensors, so none may begin
/// with another.
fn name(adapter: usize) -> Option<String> {
    (adapter > 0).then(|| format!("adapter_{adapter}_"))
}

/// A model that the torch worker has, with its adapters.
pub(super) struct TorchEngine {
    connection: Connection,
    command: Command,
    /// Private, for what requests name.
    folder: TempDir,
    _lease: Option<Lease>,
    described: Described,
    positions: usize,
    sequences: usize,
    waiting: VecDeque<Growing>,
    batches: Vec<Batch>,
    /// Requests, batches and adapters so far.
    pushed: u64,
    begun: u64,
    adapters: usize,
}

/// Opens a model in the torch worker, with adapters, which get the numbers from 1 on.
///
/// # Errors
/// Fails if the worker is not installed, cannot load the model, or an adapter does not fit it.
pub(super) fn open(
    model: &Path,
    architecture: &Architecture,
    adapters: &[AdapterWeights],
    device: HeldDevice,
    settings: &EngineSettings,
) -> Result<Box<dyn InferenceEngine>, StageError> {
    let folder = tempfile::tempdir().or_fail(Cause::Machine, || "cannot create a folder".to_owned())?;
    let model = std::path::absolute(model).or_fail(Cause::Machine, || "there is no current folder".to_owned())?;
    let HeldDevice { grant, env, lease } = device;
    let mut work = Work::on(folder.path().to_owned(), grant, settings.threads)?;
    work.env.extend(env.into_iter().map(|(name, value)| (name.to_owned(), value)));
    work.inherit = lease.as_ref().map(Lease::descriptors).unwrap_or_default();
    let quantize = settings.precision.quantize.as_ref().map_or(Ok(None), WeightFormat::of_worker)?;
    let job = Job::Serve(work.common(settings.precision.dtype.in_job(), model, quantize));
    let (mut connection, mut command) = (Connection::start(&work, &job)?, Command { log: settings.log });
    let (described, _) = connection.numbers(&mut command)?;
    let positions = architecture.max_position_embeddings().unwrap_or(POSITIONS);
    let mut engine = TorchEngine {
        connection,
        command,
        folder,
        _lease: lease,
        described,
        positions: settings.positions.unwrap_or(usize::MAX).min(positions),
        sequences: settings.sequences,
        waiting: VecDeque::new(),
        batches: Vec::new(),
        pushed: 0,
        begun: 0,
        adapters: 0,
    };
    for adapter in adapters {
        engine.add_adapter(adapter)?;
    }
    Ok(Box::new(engine))
}

impl TorchEngine {
    fn in_progress(&self) -> impl Iterator<Item = &Growing> {
        self.batches.iter().flat_map(|batch| batch.rows.iter().flatten())
    }

    /// Makes batches of requests that wait, in their order.
    fn admit(&mut self) {
        while self.batches.len() < BATCHES
            && let Some(first) = self.waiting.front()
        {
            let (adapter, is_alone) = (first.adapter(), self.described.is_alone || first.wants_prompt_logprobs());
            let free = self.sequences - self.in_progress().count();
            if free == 0 {
                return;
            }
            let mut rows = Vec::new();
            for growing in std::mem::take(&mut self.waiting) {
                let may_join = !is_alone && growing.adapter() == adapter && !growing.wants_prompt_logprobs();
                match rows.is_empty() || (may_join && rows.len() < free) {
                    true => rows.push(Some(growing)),
                    false => self.waiting.push_back(growing),
                }
            }
            self.batches.push(Batch { number: self.begun, adapter, rows, read: 0 });
            self.begun += 1;
        }
    }

    /// Forgets batches of which no row is left.
    fn end_batches(&mut self) {
        for batch in self.batches.extract_if(.., |batch| batch.is_over()) {
            if batch.read > 0 {
                self.connection.request(&BatchRequest::EndBatch { batch: batch.number }, &[]);
            }
        }
    }

    /// The logits that were asked for first, `[rows, tokens, vocab_size]`.
    fn logits(&mut self, rows: usize) -> Result<([usize; 3], Vec<u8>), StageError> {
        let (Logits { shape }, numbers) = self.connection.numbers(&mut self.command)?;
        let [found, tokens, vocab_size] = shape;
        let expected = (rows, self.described.vocab_size, shape.iter().product::<usize>() * size_of::<f32>());
        match (found, vocab_size, numbers.len()) == expected && tokens > 0 {
            true => Ok((shape, numbers)),
            false => Err(StageError::internal(format!("the torch worker's logits have the shape {shape:?}"))),
        }
    }
}

impl InferenceEngine for TorchEngine {
    fn max_position_embeddings(&self) -> usize {
        self.positions
    }

    fn batching(&self) -> Batching {
        Batching::Static
    }

    fn vocab_size(&self) -> usize {
        self.described.vocab_size
    }

    fn push(&mut self, request: QueuedRequest) -> Result<RequestId, GenerateError> {
        let growing = Growing::new(self.pushed, request, self.positions, self.described.vocab_size)?;
        let id = growing.id();
        self.waiting.push_back(growing);
        self.pushed += 1;
        Ok(id)
    }

    fn step(&mut self) -> Result<Vec<Progress>, StageError> {
        self.end_batches();
        self.admit();
        if self.batches.is_empty() {
            return self.connection.check(&mut self.command).map(|()| Vec::new());
        }
        // What turns a long text in another way than a short one has to have it whole.
        let at_once = if self.described.is_alone { usize::MAX } else { LOGITS_AT_ONCE };
        for batch in &mut self.batches {
            batch.ask(at_once, &mut self.connection);
        }
        let mut progress = Vec::new();
        for index in 0..self.batches.len() {
            let (shape, logits) = self.logits(self.batches[index].rows.len())?;
            self.batches[index].add(&logits, shape, &mut progress);
        }
        self.end_batches();
        progress.retain(|it| it.token.is_some() || it.ended.is_some() || !it.prompt_logprobs.is_empty());
        Ok(progress)
    }

    fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|waiting| waiting.id() != id);
        let rows = self.batches.iter_mut().flat_map(|batch| &mut batch.rows);
        rows.filter(|row| row.as_ref().is_some_and(|growing| growing.id() == id)).for_each(|row| *row = None);
    }

    fn add_adapter(&mut self, adapter: &AdapterWeights) -> Result<usize, StageError> {
        let number = self.adapters + 1;
        let folder = self.folder.path().join(number.to_string());
        let written = std::fs::create_dir(&folder).or_fail(Cause::Machine, || "cannot create a folder".to_owned());
        written?;
        adapter.save(&folder).or_fail(Cause::Machine, || "the adapter cannot be written".to_owned())?;
        let adapter = name(number).unwrap_or_default();
        self.connection.request(&BatchRequest::LoadAdapter { adapter, folder: &folder }, &[]);
        let (Loaded { error }, _) = self.connection.numbers(&mut self.command)?;
        // It is in the worker's memory; what is left here goes with the engine.
        let _ = std::fs::remove_dir_all(&folder);
        self.adapters = number;
        match error {
            None => Ok(number),
            Some(error) => Err(StageError::bad_data("the adapter does not fit the model").with_source(error)),
        }
    }

    fn remove_adapter(&mut self, number: usize) {
        self.connection.request(&BatchRequest::UnloadAdapter { adapter: name(number).unwrap_or_default() }, &[]);
    }

    fn load(&self) -> Load {
        Load {
            waiting: self.waiting.len(),
            in_progress: self.in_progress().count(),
            cached_tokens: self.in_progress().map(|growing| growing.tokens().len()).sum(),
            ..Load::default()
        }
    }

    fn most_cached_tokens(&self) -> usize {
        self.sequences * self.positions
    }

    fn most_prefix_tokens(&self) -> usize {
        0
    }
}
