//! Inference without a stage: a model and its adapters, opened from folders, which requests are pushed to.
//!
//! It leaves to others: text, and who asks. `pipeline serve` and `pipeline chat` open it; the stages open a model from
//! artefacts (see [`super::InferenceSession`]).

use std::path::Path;

use devices::DeviceKind;
use engine::artifact::Facts;
use engine::device::HeldDevice;
use engine::error::{Cause, StageError};
use model::config::Architecture;
use model::generation::{GenerateError, Load, Progress, QueuedRequest, RequestId};
use model::peft::Adapter as AdapterWeights;
use profile::Profile;

use super::{ON_QUANTIZED, native, static_batches};
use crate::compute::adapter::{self, record};
use crate::compute::backend::{Backend, Choice, Serves, failure_without_worker};
use crate::compute::kernels::Dtype;
use crate::compute::precision::Precision;
use crate::compute::quantize::WeightFormat;
use crate::compute::{aware, checkpoint, torch};
use crate::data::artifact::{Adapter, Model, OutputKind};

/// A model, and adapters on it, which requests are pushed to.
///
/// Adapters are known by number: 0 is the base alone, or with the one that it was opened with.
pub trait InferenceEngine: Send {
    /// Positions there are: the most tokens of prompt and completion together.
    fn max_position_embeddings(&self) -> usize;

    /// When requests join others.
    fn batching(&self) -> Batching;

    /// Size of its vocabulary.
    fn vocab_size(&self) -> usize;

    /// Adds a request, which begins when there is room.
    ///
    /// # Errors
    /// Fails if it cannot be completed: see [`model::generation::Growing::new`].
    fn push(&mut self, request: QueuedRequest) -> Result<RequestId, GenerateError>;

    /// Adds a token to each completion in progress, after reading a bounded part of the prompts of new ones.
    ///
    /// # Errors
    /// Fails if the device does, or what computes is gone, which ends all requests.
    fn step(&mut self) -> Result<Vec<Progress>, StageError>;

    /// Forgets a request, wherever it is.
    fn cancel(&mut self, id: RequestId);

    /// Adds an adapter, and returns its number.
    ///
    /// # Errors
    /// Fails if it does not fit the model.
    fn add_adapter(&mut self, adapter: &AdapterWeights) -> Result<usize, StageError>;

    /// Forgets an adapter that no request is for. Its number is not used again.
    fn remove_adapter(&mut self, number: usize);

    /// How many requests there are, and what they use.
    fn load(&self) -> Load;

    /// Tokens whose keys and values may be cached at once.
    fn most_cached_tokens(&self) -> usize;

    /// Tokens whose keys and values may be kept, beside those, for prompts that begin with them.
    fn most_prefix_tokens(&self) -> usize;
}

/// When requests join others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batching {
    /// Between any two tokens.
    Continuous,
    /// Those that wait together begin together, and none joins them.
    Static,
}

impl Batching {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Continuous => "continuous",
            Self::Static => "static",
        }
    }
}

/// How an engine is opened.
#[derive(Clone)]
pub struct EngineSettings {
    /// What computes.
    pub backend: Backend,
    /// The kind of device; the first that the backend prefers and the machine has if absent.
    pub device: Option<DeviceKind>,
    /// What is computed in, and how weights are stored.
    pub precision: Precision,
    /// Threads that compute.
    pub threads: usize,
    /// Requests in progress at once.
    pub sequences: usize,
    /// Tokens of a prompt and its completion together, where that is to be less than the model's positions.
    pub positions: Option<usize>,
    /// Bytes of keys and values that are kept for prompts that begin alike, where the engine keeps any.
    pub prefix_bytes: u64,
    /// Whom a device is leased for, in words for others.
    pub holder: &'static str,
    /// Gets what processes that compute print.
    pub log: fn(&str),
    /// Where its time goes is recorded here.
    pub profile: Profile,
}

/// An engine, and who computes.
pub struct OpenedEngine {
    /// The engine.
    pub engine: Box<dyn InferenceEngine>,
    /// Who computes, and why.
    pub choice: Choice,
}

/// Opens a model from its folder, with adapters, which get the numbers from 1 on.
///
/// # Errors
/// Fails if a folder cannot be read, the settings do not go together or with the model, the machine lacks what they ask
/// for, or an adapter does not fit the model.
pub fn open(folder: &Path, adapters: &[AdapterWeights], settings: &EngineSettings) -> Result<OpenedEngine, StageError> {
    let architecture = checkpoint::architecture(folder)?;
    let (backend, serves) = (settings.backend, serves(&settings.precision, &architecture, folder)?);
    if let Architecture::Transformers(outline) = &architecture {
        if let Some((message, help)) = backend.refusal(serves, outline) {
            return Err(StageError::new(Cause::BadParameters, message).with_help(help));
        }
        if let Some(failure) = failure_without_worker(outline, torch::what_it_lacks) {
            return Err(failure);
        }
    }
    let serves = serves.on(&architecture);
    if let (Backend::Native, Serves::Torch(what)) | (Backend::Torch, Serves::Native(what)) = (backend, serves) {
        let (other, named) = if backend == Backend::Native { ("torch", "native") } else { ("native", "torch") };
        let message = format!("{what} is for `--backend {other}`, and `--backend {named}` is given");
        return Err(StageError::new(Cause::BadParameters, message).with_help("leave `--backend` out"));
    }
    let mut kinds = backend.devices(serves);
    if backend == Backend::Native || matches!(serves, Serves::Native(_)) {
        // Requests that come and go are computed by our own kernels alone.
        kinds.retain(|kind| *kind == DeviceKind::Cpu);
    }
    if let Some(device) = settings.device {
        if !kinds.contains(&device) {
            let message = format!("nothing here serves this model on {}", device.in_words());
            let help = "leave `--device` out, or what asks for `--backend native`";
            return Err(StageError::new(Cause::BadParameters, message).with_help(help));
        }
        kinds = vec![device];
    }
    let device = HeldDevice::take(&kinds, settings.holder)?;
    let kind = device.grant.kind;
    let mut choice = backend.choose(serves, kind, 1);
    if kind != DeviceKind::Cpu && !choice.is_torch {
        choice = Choice { is_torch: true, because: "this program serves only on the CPU".to_owned(), ..choice };
    }
    let engine = match choice.is_torch {
        true => static_batches::open(folder, &architecture, adapters, device, settings)?,
        false => native::open(folder, adapters, settings)?,
    };
    Ok(OpenedEngine { engine, choice })
}

/// Which backend computes a model in a precision.
fn serves(precision: &Precision, model: &Architecture, folder: &Path) -> Result<Serves, StageError> {
    let format = precision.quantize.as_ref().unwrap_or(&WeightFormat::AsStored);
    let of_format = match (format, model) {
        (WeightFormat::Blocks(_), _) => format.serves("`--quantize`"),
        (WeightFormat::Base(_) | WeightFormat::Aware(_), _) => format.serves(ON_QUANTIZED),
        (WeightFormat::AsStored, _) if aware::is_aware(folder) => Serves::Native(aware::WHAT),
        (WeightFormat::AsStored, _) => Serves::Both.on(model),
    };
    match (precision.dtype, of_format) {
        (Dtype::F16, Serves::Native(quantized)) => {
            let message = format!("{quantized} is for the native backend, which does not compute in f16");
            Err(StageError::new(Cause::BadParameters, message).with_help("give `--dtype bf16`"))
        }
        (Dtype::F16, _) => Ok(Serves::Torch("`--dtype f16`")),
        (Dtype::F32 | Dtype::Bf16, serves) => Ok(serves),
    }
}

/// What is known of a model in a folder, if it was published here; empty otherwise.
pub fn facts_of_model(folder: &Path) -> Facts {
    record::facts(folder, Model::NAME).unwrap_or_default()
}

/// What is known of an adapter in a folder, if it was published here; empty otherwise.
pub fn facts_of_adapter(folder: &Path) -> Facts {
    record::facts(folder, Adapter::NAME).unwrap_or_default()
}

/// Reads an adapter from a folder, to be used with a model. These are facts of both, as far as they are known.
///
/// # Errors
/// Fails if the adapter cannot be read, holds a value that is not finite, or is known to have been trained on another
/// model.
pub fn read_adapter(folder: &Path, facts: &Facts, model: &Facts) -> Result<AdapterWeights, StageError> {
    if adapter::is_of_others(Some(facts), Some(model)) {
        return Err(adapter::of_another_model().with_help("use it with the model that it was trained on"));
    }
    adapter::load(folder)
}
