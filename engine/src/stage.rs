//! Stage kinds: the trait that each implements, and the registry the engine works with.
//!
//! The engine sees [`StageKind`] and [`BoundStage`], which are object-safe, and no kind in particular.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use devices::DeviceKind;
use serde::Serialize;

pub use crate::artifact::InputFacts;
use crate::artifact::Output;
use crate::change::{StoredArtifact, TableChange};
use crate::context::StageContext;
use crate::error::StageError;
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::Node;
use crate::metadata::FetchedFile;
use crate::parameter::{DeclaredField, KeyWriter, Parameter, Reader, Reference, declared_fields};
use crate::pin::Pinned;
use crate::preflight::Preflight;
use crate::protocol::Network;
use crate::survey::{LocalFiles, Survey};

/// Something outside the pipeline that a stage reads. Its content or commit is part of the key.
#[derive(Debug, Clone, PartialEq)]
pub enum Outside {
    /// Local files: a path, a folder (every file in it) or a glob, relative to the pipeline file.
    Files {
        /// What the files are for; unique within the stage.
        role: String,
        pattern: String,
        /// Where the pattern stands.
        span: Span,
    },
    /// Something with versions on a server, pinned to one of them in `pipeline.lock`.
    Pin(PinRequest),
}

/// A request to fix a mutable reference (a branch of a hub repository) to what it is now.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PinRequest {
    /// Kind of thing: `hub-model`, `hub-dataset`.
    pub kind: String,
    /// Its name, such as `meta-llama/Llama-3.1-8B-Instruct`.
    pub name: String,
    /// The revision asked for, such as `main`.
    pub revision: String,
    /// The environment variable that holds the access token, where the file names one; never the token.
    pub token_env: Option<String>,
    /// Where it stands.
    pub span: Span,
}

/// What a stage does in a smoke run, which finds out in a minute whether a whole file works.
#[derive(Debug, Clone, PartialEq)]
pub enum Smoke {
    /// The same as ever: its result has the key of a real run, and serves one.
    Same,
    /// Less: parameters by dotted path, and the values they have in place of the file's. Its result has a key of its
    /// own, also where nothing is replaced.
    With(Vec<(String, serde_json::Value)>),
}

/// An environment variable with a secret that a stage names and reads by itself. Its value is in no plan.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Secret {
    pub variable: String,
    /// The parameter that names it, where the file does: the stage then fails without it.
    pub field: Option<&'static str>,
}

impl Secret {
    /// A token for a server: of a variable that the file names, which must then be set, else of the one that is used
    /// where it is.
    pub fn token(named: Option<&str>, by_default: &str) -> Self {
        Self { variable: named.unwrap_or(by_default).to_owned(), field: named.map(|_| "token_env") }
    }

    /// Whether the stage fails without it.
    pub fn is_required(&self) -> bool {
        self.field.is_some()
    }
}

/// How many threads a stage can use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// It works on one thread, or waits for something else most of the time.
    One,
    /// It uses as many as it is given.
    Many,
}

/// Over how many devices a stage can spread its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workers {
    /// It computes on one device.
    One,
    /// One worker for each device that it is given; on the CPU, workers that share its cores.
    Many,
}

/// What a stage can do where its memory did not suffice.
#[derive(Debug, Clone, PartialEq)]
pub enum LessMemory {
    /// Make the same result with less memory.
    Set {
        /// All its parameters, of which only cosmetic ones differ: the key is the same.
        parameters: serde_json::Value,
        /// What differs, such as `micro_batch_size 8 → 4, gradient_accumulation_steps 1 → 2`.
        change: String,
    },
    /// Nothing that leaves the result as it is; what a person can do.
    Advice(String),
    /// Nothing that it knows of.
    Nothing,
}

/// What an earlier attempt left for this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum WorkingState {
    /// It goes on where that one was cut off.
    GoesOn {
        /// What is counted, in the singular: `step`.
        unit: String,
        done: u64,
        /// How many there will be, where that is known.
        of: Option<u64>,
    },
    /// There is some, and the kind does not say how far it is.
    Unmeasured,
    /// There is some, and it cannot be gone on from.
    StartsOver {
        /// Why, as a lower-case fragment.
        because: String,
    },
}

impl fmt::Display for WorkingState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GoesOn { unit, done, of: Some(of) } => write!(f, "continues from {unit} {done} of {of}"),
            Self::GoesOn { unit, done, of: None } => write!(f, "continues from {unit} {done}"),
            Self::Unmeasured => f.write_str("continues from saved working state"),
            Self::StartsOver { because } => write!(f, "starts over: {because}"),
        }
    }
}

/// One kind of stage, such as `tokenize`.
pub trait Stage: 'static {
    /// What a pipeline file says after `uses:`.
    const NAME: &'static str;
    /// Part of the key: raised when equal inputs would give a different output.
    const VERSION: u32;
    /// One line for `pipeline schema` and editors.
    const ABOUT: &'static str;
    /// What the file may say under `with:`.
    type Params: Parameter + Send + Sync + 'static;
    /// The first names of references in texts that the kind replaces itself: with `inputs` among them, `${inputs.rows}`
    /// reaches it as it is, where every other kind's file would be refused.
    const PLACEHOLDERS: &'static [&'static str] = &[];
    /// Whether pipelines are run for what it makes, so that nothing else need read it.
    const GOAL: bool = false;
    /// What users of other programs look for under `uses:` where they mean this kind.
    const ALSO_CALLED: &'static [&'static str] = &[];
    /// Keys that other programs have, each with what to write here instead.
    const KEYS_ELSEWHERE: &'static [(&'static str, &'static str)] = &[];

    /// The outputs, by the parameters (train: an adapter or a model, by its method).
    fn outputs(params: &Self::Params) -> Vec<Output>;

    /// Everything that can be known to be wrong without running; `span` is that of the stage's `with:`.
    fn check(_params: &Self::Params, _inputs: &InputFacts, _span: Span) -> Vec<Problem> {
        Vec::new()
    }

    /// What is certain of its outputs before it runs, and what its local files show to be wrong. `inputs` are facts
    /// that are certain; there may be others. Of a file no more than [`crate::survey::MOST_READ`] bytes are read: a
    /// header, the first rows, a configuration.
    fn survey(_params: &Self::Params, _inputs: &InputFacts, _files: &LocalFiles, _span: Span) -> Survey {
        Survey::default()
    }

    /// What this machine lacks that the stage needs to run on it, whatever it reads.
    fn lacks(_params: &Self::Params, _span: Span) -> Vec<Problem> {
        Vec::new()
    }

    /// What the stage reads from outside the pipeline.
    fn outside(_params: &Self::Params) -> Vec<Outside> {
        Vec::new()
    }

    /// The secrets that it reads from the environment by itself.
    fn secrets(_params: &Self::Params) -> Vec<Secret> {
        Vec::new()
    }

    /// Goes out and finds what a mutable reference is currently: a branch's commit, and the files there.
    ///
    /// # Errors
    /// Fails where the thing does not exist or cannot be reached.
    fn pin(request: &PinRequest) -> Result<Pinned, StageError> {
        Err(StageError::internal(format!("stage kind `{}` pins nothing, asked for `{}`", Self::NAME, request.name)))
    }

    /// Goes out and fetches of what the stage has pinned as much as its [`Stage::survey`] reads of the files of
    /// [`crate::survey::PINNED`]: configurations, headers, first rows; no weights. Each file is put under its own path into `folder`;
    /// the answer says of all files of the repository how much is there. `None` where nothing of them is read ahead.
    ///
    /// # Errors
    /// Fails where the server does.
    fn fetch_metadata(
        _params: &Self::Params,
        _pinned: &Pinned,
        _folder: &Path,
        _network: Network,
    ) -> Result<Option<Vec<FetchedFile>>, StageError> {
        Ok(None)
    }

    /// Adds to the key what follows from several parameters together and from none alone (the rows of an optimizer
    /// step: the product decides the result, its split does not).
    fn write_derived_key(_params: &Self::Params, _key: &mut KeyWriter<'_>) {}

    /// What it does in a smoke run, given the parameters as the file has them: a few rows, two steps.
    fn smoke(_parameters: &serde_json::Value) -> Smoke {
        Smoke::With(Vec::new())
    }

    /// The parameters that an entry of [`Stage::write_derived_key`] is made of, for explanations.
    fn derived_from(_entry: &str) -> &'static [&'static str] {
        &[]
    }

    /// What it would do and cost. Inputs that are not made yet have the facts that their own stages expect, marked by
    /// [`crate::preflight::EXPECTED`], or none.
    fn preflight(_params: &Self::Params, _inputs: &InputFacts, _span: Span) -> Preflight {
        Preflight::default()
    }

    /// The most memory that it holds on the CPU with several workers, all together; that of one is part of
    /// [`Stage::preflight`].
    fn peak_memory(_params: &Self::Params, _inputs: &InputFacts, _workers: usize) -> Option<u64> {
        None
    }

    /// Whether a result will do whose files lie partly outside the store, where an equal stage has left them.
    fn takes_files_outside(_params: &Self::Params) -> bool {
        true
    }

    /// How far the attempt came that left its working state in `folder`, which is not empty; `None` where the kind
    /// cannot tell. It reads little: a plan asks for it.
    fn working_state(_params: &Self::Params, _folder: &Path, _inputs: &InputFacts) -> Option<WorkingState> {
        None
    }

    /// How two versions of an output of this kind of artefact differ, for kinds that are tables; `None` where they
    /// cannot be compared.
    fn compare(_kind: &str, _old: &StoredArtifact, _new: &StoredArtifact) -> Option<TableChange> {
        None
    }

    /// How many threads it can use.
    fn threads(_params: &Self::Params) -> Threads {
        Threads::One
    }

    /// The kinds of device that it can compute on, the one that `device: auto` prefers first.
    fn devices(_params: &Self::Params) -> Vec<DeviceKind> {
        vec![DeviceKind::Cpu]
    }

    /// Over how many devices it can spread its work.
    fn workers(_params: &Self::Params) -> Workers {
        Workers::One
    }

    /// What to do where the memory of the machine or of a device did not suffice for these parameters, as the file
    /// gives them.
    fn with_less_memory(_parameters: &serde_json::Value) -> LessMemory {
        LessMemory::Nothing
    }

    /// Does the work, in a process of its own.
    ///
    /// # Errors
    /// Whatever stops the stage, with its cause.
    fn run(params: &Self::Params, context: &mut StageContext) -> Result<(), StageError>;
}

/// A stage kind, without its types.
pub trait StageKind: Send + Sync {
    /// What a pipeline file says after `uses:`.
    fn name(&self) -> &'static str;
    /// Part of the key.
    fn version(&self) -> u32;
    /// One line about it.
    fn about(&self) -> &'static str;
    /// See [`Stage::GOAL`].
    fn is_goal(&self) -> bool;
    /// See [`Stage::ALSO_CALLED`].
    fn also_called(&self) -> &'static [&'static str];
    /// See [`Stage::KEYS_ELSEWHERE`].
    fn keys_elsewhere(&self) -> &'static [(&'static str, &'static str)];
    /// The JSON Schema of its parameters.
    fn schema(&self) -> serde_json::Value;
    /// See [`Stage::PLACEHOLDERS`].
    fn placeholders(&self) -> &'static [&'static str];
    /// See [`Stage::smoke`].
    fn smoke(&self, parameters: &serde_json::Value) -> Smoke;
    /// Reads the parameters; `None` where problems were reported that leave nothing to go on with.
    fn read(&self, node: &Node, reader: &mut Reader) -> Option<Box<dyn BoundStage>>;
    /// See [`Stage::pin`].
    ///
    /// # Errors
    /// As there.
    fn pin(&self, request: &PinRequest) -> Result<Pinned, StageError>;
}

/// A stage kind with its parameters read.
pub trait BoundStage: Send + Sync {
    /// See [`Stage::outputs`].
    fn outputs(&self) -> Vec<Output>;
    /// References to other stages' outputs, with the kinds that each accepts.
    fn inputs(&self) -> Vec<(Reference, &'static [&'static str])>;
    /// See [`Stage::check`].
    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem>;
    /// See [`Stage::survey`].
    fn survey(&self, inputs: &InputFacts, files: &LocalFiles, span: Span) -> Survey;
    /// See [`Stage::preflight`].
    fn preflight(&self, inputs: &InputFacts, span: Span) -> Preflight;
    /// See [`Stage::peak_memory`].
    fn peak_memory(&self, inputs: &InputFacts, workers: usize) -> Option<u64>;
    /// See [`Stage::takes_files_outside`].
    fn takes_files_outside(&self) -> bool;
    /// See [`Stage::derived_from`].
    fn derived_from(&self, entry: &str) -> &'static [&'static str];
    /// See [`Stage::working_state`].
    fn working_state(&self, folder: &Path, inputs: &InputFacts) -> Option<WorkingState>;
    /// See [`Stage::compare`].
    fn compare(&self, kind: &str, old: &StoredArtifact, new: &StoredArtifact) -> Option<TableChange>;
    /// The fields of its kind, flat.
    fn declared(&self) -> Vec<DeclaredField>;
    /// See [`Stage::lacks`].
    fn lacks(&self, span: Span) -> Vec<Problem>;
    /// See [`Stage::fetch_metadata`].
    ///
    /// # Errors
    /// As there.
    fn fetch_metadata(
        &self,
        pinned: &Pinned,
        folder: &Path,
        network: Network,
    ) -> Result<Option<Vec<FetchedFile>>, StageError>;
    /// See [`Stage::outside`].
    fn outside(&self) -> Vec<Outside>;
    /// See [`Stage::secrets`].
    fn secrets(&self) -> Vec<Secret>;
    /// See [`Stage::threads`].
    fn threads(&self) -> Threads;
    /// See [`Stage::devices`].
    fn devices(&self) -> Vec<DeviceKind>;
    /// See [`Stage::workers`].
    fn workers(&self) -> Workers;
    /// See [`Stage::with_less_memory`].
    fn with_less_memory(&self, parameters: &serde_json::Value) -> LessMemory;
    /// Writes the parameters, defaults filled in, into a key.
    fn write_key(&self, key: &mut KeyWriter<'_>);
    /// See [`Stage::run`].
    ///
    /// # Errors
    /// As there.
    fn run(&self, context: &mut StageContext) -> Result<(), StageError>;
}

struct Kind<S>(std::marker::PhantomData<fn() -> S>);

struct Bound<S: Stage>(S::Params);

impl<S: Stage> StageKind for Kind<S> {
    fn name(&self) -> &'static str {
        S::NAME
    }
    fn version(&self) -> u32 {
        S::VERSION
    }
    fn about(&self) -> &'static str {
        S::ABOUT
    }
    fn is_goal(&self) -> bool {
        S::GOAL
    }
    fn also_called(&self) -> &'static [&'static str] {
        S::ALSO_CALLED
    }
    fn keys_elsewhere(&self) -> &'static [(&'static str, &'static str)] {
        S::KEYS_ELSEWHERE
    }
    fn schema(&self) -> serde_json::Value {
        S::Params::schema()
    }
    fn placeholders(&self) -> &'static [&'static str] {
        S::PLACEHOLDERS
    }
    fn smoke(&self, parameters: &serde_json::Value) -> Smoke {
        S::smoke(parameters)
    }
    fn read(&self, node: &Node, reader: &mut Reader) -> Option<Box<dyn BoundStage>> {
        let params = S::Params::read(node, reader)?;
        Some(Box::new(Bound::<S>(params)))
    }
    fn pin(&self, request: &PinRequest) -> Result<Pinned, StageError> {
        S::pin(request)
    }
}

impl<S: Stage> BoundStage for Bound<S> {
    fn outputs(&self) -> Vec<Output> {
        S::outputs(&self.0)
    }
    fn inputs(&self) -> Vec<(Reference, &'static [&'static str])> {
        let mut inputs = Vec::new();
        self.0.visit_inputs(&mut |reference, kinds| inputs.push((reference.clone(), kinds)));
        inputs
    }
    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        S::check(&self.0, inputs, span)
    }
    fn survey(&self, inputs: &InputFacts, files: &LocalFiles, span: Span) -> Survey {
        S::survey(&self.0, inputs, files, span)
    }
    fn preflight(&self, inputs: &InputFacts, span: Span) -> Preflight {
        S::preflight(&self.0, inputs, span)
    }
    fn peak_memory(&self, inputs: &InputFacts, workers: usize) -> Option<u64> {
        S::peak_memory(&self.0, inputs, workers)
    }
    fn takes_files_outside(&self) -> bool {
        S::takes_files_outside(&self.0)
    }
    fn derived_from(&self, entry: &str) -> &'static [&'static str] {
        S::derived_from(entry)
    }
    fn working_state(&self, folder: &Path, inputs: &InputFacts) -> Option<WorkingState> {
        S::working_state(&self.0, folder, inputs)
    }
    fn compare(&self, kind: &str, old: &StoredArtifact, new: &StoredArtifact) -> Option<TableChange> {
        S::compare(kind, old, new)
    }
    fn declared(&self) -> Vec<DeclaredField> {
        declared_fields(&S::Params::schema())
    }
    fn lacks(&self, span: Span) -> Vec<Problem> {
        S::lacks(&self.0, span)
    }
    fn fetch_metadata(
        &self,
        pinned: &Pinned,
        folder: &Path,
        network: Network,
    ) -> Result<Option<Vec<FetchedFile>>, StageError> {
        S::fetch_metadata(&self.0, pinned, folder, network)
    }
    fn outside(&self) -> Vec<Outside> {
        S::outside(&self.0)
    }
    fn secrets(&self) -> Vec<Secret> {
        S::secrets(&self.0)
    }
    fn threads(&self) -> Threads {
        S::threads(&self.0)
    }
    fn devices(&self) -> Vec<DeviceKind> {
        S::devices(&self.0)
    }
    fn workers(&self) -> Workers {
        S::workers(&self.0)
    }
    fn with_less_memory(&self, parameters: &serde_json::Value) -> LessMemory {
        S::with_less_memory(parameters)
    }
    fn write_key(&self, key: &mut KeyWriter<'_>) {
        self.0.write_key(key);
        S::write_derived_key(&self.0, key);
    }
    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        S::run(&self.0, context)
    }
}

/// The stage kinds that a program knows.
#[derive(Default)]
pub struct Registry(BTreeMap<&'static str, Box<dyn StageKind>>);

impl Registry {
    /// A registry without kinds.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a kind.
    #[must_use]
    pub fn with<S: Stage>(mut self) -> Self {
        self.0.insert(S::NAME, Box::new(Kind::<S>(std::marker::PhantomData)));
        self
    }

    pub fn get(&self, name: &str) -> Option<&dyn StageKind> {
        self.0.get(name).map(Box::as_ref)
    }

    /// All kinds, by name.
    pub fn kinds(&self) -> impl Iterator<Item = &dyn StageKind> {
        self.0.values().map(Box::as_ref)
    }
}
