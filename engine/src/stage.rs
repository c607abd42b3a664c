//! Stage kinds: the two traits that each implements on its parameters, and the registry the engine works with.
//!
//! The engine sees [`Kind`], which has no type parameter, and [`Stage`], which is object-safe, and no kind in
//! particular.

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
use crate::figure::Foreseen;
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::Node;
use crate::forecast::{Ahead, Forecast};
use crate::metadata::FetchedFile;
use crate::parameter::{KeyWriter, Parameter, Reader};
use crate::pin::Pinned;
use crate::protocol::Network;

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
        /// Which files of a folder or a glob count.
        count: Counted,
    },
    /// Something with versions on a server, pinned to one of them in `pipeline.lock`.
    Pin(PinRequest),
}

/// Which files of a folder or a glob count; a file that is named by itself always does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    /// All of them.
    All,
    /// Those whose names have one of these extensions, in any case; none below a name that begins with a dot, and none
    /// twice.
    WithExtension(&'static [&'static str]),
}

impl Counted {
    /// Whether a file counts, by its path below the folder.
    pub(crate) fn has(self, relative: &str) -> bool {
        let Self::WithExtension(known) = self else { return true };
        let is_hidden = relative.split('/').any(|name| name.starts_with('.'));
        let extension = Path::new(relative).extension().and_then(|extension| extension.to_str());
        !is_hidden && extension.is_some_and(|found| known.iter().any(|known| found.eq_ignore_ascii_case(known)))
    }
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

/// A stage of a plan: the parameters of its kind, and what follows from them. It is object-safe, so that a plan holds
/// stages of all kinds; what kinds can do in addition is a method here that has a default.
pub trait Stage: Parameter + Send + Sync + 'static {
    /// The outputs, by the parameters (train: an adapter or a model, by its method).
    fn outputs(&self) -> Vec<Output>;

    /// Everything that can be known to be wrong without running; `span` is that of the stage's `with:`.
    fn check(&self, _inputs: &InputFacts, _span: Span) -> Vec<Problem> {
        Vec::new()
    }

    /// What is wrong with the parameters on a kind of device, where the file asks for that one; `span` is as in
    /// [`Stage::check`].
    fn check_on(&self, _device: DeviceKind, _span: Span) -> Vec<Problem> {
        Vec::new()
    }

    /// What it would do and cost, what is known of its outputs before it runs, and what its files show to be wrong.
    fn forecast(&self, _ahead: &Ahead<'_>) -> Forecast {
        Forecast::default()
    }

    /// What is known of a figure of its result, which a gate names, before it runs.
    fn figure(&self, _name: &str) -> Foreseen {
        Foreseen::Nothing
    }

    /// What this machine lacks that the stage needs to run on it, whatever it reads.
    fn lacks(&self, _span: Span) -> Vec<Problem> {
        Vec::new()
    }

    /// What the stage reads from outside the pipeline.
    fn outside(&self) -> Vec<Outside> {
        Vec::new()
    }

    /// The secrets that it reads from the environment by itself.
    fn secrets(&self) -> Vec<Secret> {
        Vec::new()
    }

    /// Goes out and fetches of what the stage has pinned as much as its [`Stage::forecast`] reads of the files of
    /// [`crate::local_files::PINNED`]: configurations, headers, first rows; no weights. Each file is put under its own
    /// path into `folder`; the answer says of all files of the repository how much is there. `None` where nothing of
    /// them is read ahead.
    ///
    /// # Errors
    /// Fails where the server does.
    fn fetch_metadata(
        &self,
        _pinned: &Pinned,
        _folder: &Path,
        _network: Network,
    ) -> Result<Option<Vec<FetchedFile>>, StageError> {
        Ok(None)
    }

    /// Adds to the key what follows from several parameters together and from none alone (the rows of an optimizer
    /// step: the product decides the result, its split does not).
    fn write_derived_key(&self, _key: &mut KeyWriter<'_>) {}

    /// Writes all that the parameters add to the key, defaults filled in: [`Parameter::write_key`] writes the fields
    /// alone.
    fn write_whole_key(&self, key: &mut KeyWriter<'_>) {
        self.write_key(key);
        self.write_derived_key(key);
    }

    /// The parameters that an entry of [`Stage::write_derived_key`] is made of, for explanations.
    fn derived_from(&self, _entry: &str) -> &'static [&'static str] {
        &[]
    }

    /// The most memory that it holds on the CPU with several workers, all together; that of one is part of
    /// [`Stage::forecast`].
    fn peak_memory(&self, _inputs: &InputFacts, _workers: usize) -> Option<u64> {
        None
    }

    /// Whether a result will do whose files lie partly outside the store, where an equal stage has left them.
    fn takes_files_outside(&self) -> bool {
        true
    }

    /// How far the attempt came that left its working state in `folder`, which is not empty; `None` where the kind
    /// cannot tell. It reads little: a plan asks for it.
    fn working_state(&self, _folder: &Path, _inputs: &InputFacts) -> Option<WorkingState> {
        None
    }

    /// How two versions of an output of this kind of artefact differ, for kinds that are tables; `None` where they
    /// cannot be compared.
    fn compare(&self, _kind: &str, _old: &StoredArtifact, _new: &StoredArtifact) -> Option<TableChange> {
        None
    }

    /// How many threads it can use.
    fn threads(&self) -> Threads {
        Threads::One
    }

    /// The kinds of device that it can compute on, the one that `device: auto` prefers first.
    fn devices(&self) -> Vec<DeviceKind> {
        vec![DeviceKind::Cpu]
    }

    /// Over how many devices it can spread its work.
    fn workers(&self) -> Workers {
        Workers::One
    }

    /// What to do where the memory of the machine or of a device did not suffice for these parameters, as the file
    /// gives them.
    fn with_less_memory(&self, _parameters: &serde_json::Value) -> LessMemory {
        LessMemory::Nothing
    }

    /// Does the work, in a process of its own.
    ///
    /// # Errors
    /// Whatever stops the stage, with its cause.
    fn run(&self, context: &mut StageContext) -> Result<(), StageError>;
}

/// A kind of stage, such as `tokenize`: what is known of it before any parameters are read. The type is that of its
/// parameters, which are a [`Stage`].
pub trait StageKind: Stage + Sized {
    /// What a pipeline file says after `uses:`.
    const NAME: &'static str;
    /// Part of the key: raised when equal inputs would give a different output.
    const VERSION: u32;
    /// One line for `pipeline schema` and editors.
    const ABOUT: &'static str;
    /// The first names of references in texts that the kind replaces itself: with `inputs` among them, `${inputs.rows}`
    /// reaches it as it is, where every other kind's file would be refused.
    const PLACEHOLDERS: &'static [&'static str] = &[];
    /// Parameters that are mappings to texts, in which a number or a boolean means the text that the file has for it.
    const TEXTS: &'static [&'static str] = &[];
    /// Whether pipelines are run for what it makes, so that nothing else need read it.
    const GOAL: bool = false;
    /// What users of other programs look for under `uses:` where they mean this kind.
    const ALSO_CALLED: &'static [&'static str] = &[];
    /// Keys that other programs have, each with what to write here instead. Nested ones have dots (`lora.r`); one
    /// without counts at any level where nothing else is known. `max_steps: -1` is a value of a key, in the form that
    /// JSON has, and `epochs: <a number>` any value of the type that messages name so.
    const KEYS_ELSEWHERE: &'static [(&'static str, &'static str)] = &[];

    /// Goes out and finds what a mutable reference is currently: a branch's commit, and the files there.
    ///
    /// # Errors
    /// Fails where the thing does not exist or cannot be reached.
    fn pin(request: &PinRequest) -> Result<Pinned, StageError> {
        Err(StageError::internal(format!("stage kind `{}` pins nothing, asked for `{}`", Self::NAME, request.name)))
    }

    /// What it does in a smoke run, given the parameters as the file has them: a few rows, two steps.
    fn smoke(_parameters: &serde_json::Value) -> Smoke {
        Smoke::With(Vec::new())
    }
}

/// A stage kind, without its type.
pub struct Kind {
    /// See [`StageKind::NAME`].
    pub name: &'static str,
    /// See [`StageKind::VERSION`].
    pub version: u32,
    /// See [`StageKind::ABOUT`].
    pub about: &'static str,
    /// See [`StageKind::PLACEHOLDERS`].
    pub placeholders: &'static [&'static str],
    /// See [`StageKind::TEXTS`].
    pub texts: &'static [&'static str],
    /// See [`StageKind::GOAL`].
    pub is_goal: bool,
    /// See [`StageKind::ALSO_CALLED`].
    pub also_called: &'static [&'static str],
    /// See [`StageKind::KEYS_ELSEWHERE`].
    pub keys_elsewhere: &'static [(&'static str, &'static str)],
    /// The JSON Schema of its parameters.
    pub schema: fn() -> serde_json::Value,
    /// See [`StageKind::pin`].
    pub pin: fn(&PinRequest) -> Result<Pinned, StageError>,
    /// See [`StageKind::smoke`].
    pub smoke: fn(&serde_json::Value) -> Smoke,
    read: fn(&Node, &mut Reader) -> Option<Box<dyn Stage>>,
}

impl Kind {
    fn of<K: StageKind>() -> Self {
        Self {
            name: K::NAME,
            version: K::VERSION,
            about: K::ABOUT,
            placeholders: K::PLACEHOLDERS,
            texts: K::TEXTS,
            is_goal: K::GOAL,
            also_called: K::ALSO_CALLED,
            keys_elsewhere: K::KEYS_ELSEWHERE,
            schema: K::schema,
            pin: K::pin,
            smoke: K::smoke,
            read: |node, reader| Some(Box::new(K::read(node, reader)?)),
        }
    }

    /// Reads the parameters; `None` where problems were reported that leave nothing to go on with.
    pub fn read(&self, node: &Node, reader: &mut Reader) -> Option<Box<dyn Stage>> {
        (self.read)(node, reader)
    }
}

/// The stage kinds that a program knows.
#[derive(Default)]
pub struct Registry(BTreeMap<&'static str, Kind>);

impl Registry {
    /// A registry without kinds.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a kind.
    #[must_use]
    pub fn with<K: StageKind>(mut self) -> Self {
        self.0.insert(K::NAME, Kind::of::<K>());
        self
    }

    pub fn get(&self, name: &str) -> Option<&Kind> {
        self.0.get(name)
    }

    /// All kinds, by name.
    pub fn kinds(&self) -> impl Iterator<Item = &Kind> {
        self.0.values()
    }
}
