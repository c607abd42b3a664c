//! A bench for stage authors: runs one stage kind on given folders, in this process, without an engine or a pipeline
//! file.
//!
//! It uses the real store and the real context, so a stage that passes here sees the same in a run.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use cache::{Digest, OutputRecord, Store, Tree, Verify};
use serde_json::{Map, Value};

use crate::artifact::{Description, Facts};
use crate::context::{Artifact, Outcome, StageContext, Voice, stored};
use crate::device::DeviceGrant;
use crate::error::{Cause, OrFail, StageError};
use crate::file::tree::Node;
use crate::parameter::Reader;
use crate::pin::Pinned;
use crate::protocol::{FileGrant, InputGrant, Job, Named, Network, PROTOCOL};
use crate::stage::StageKind;

/// What a stage recorded about how its result came about.
pub type Recorded = Map<String, Value>;

/// A place to run stages in, below a folder that the test owns (and removes).
///
/// ```ignore
/// let folder = tempfile::tempdir()?;
/// let bench = TestBench::new(folder.path())
///     .input("base.tokenizer", "tokenizer", &tokenizer_folder, facts)?
///     .input_of("articles.rows", &artifact_folder_of_another_bench_run)?
///     .file("source", &path)?
///     .threads(2);
/// let outputs = bench.run::<Tokenize>(json!({"dataset": "articles", "tokenizer": "base", "max_seq_len": 64}))?;
/// let rows = &outputs["tokens"];
/// ```
pub struct TestBench {
    root: PathBuf,
    inputs: BTreeMap<String, InputGrant>,
    files: BTreeMap<String, Vec<FileGrant>>,
    pins: BTreeMap<String, Pinned>,
    threads: usize,
    devices: DeviceGrant,
}

impl TestBench {
    /// A bench in a folder. Benches in the same folder share a store and, per stage kind, the working state.
    pub fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            inputs: BTreeMap::new(),
            files: BTreeMap::new(),
            pins: BTreeMap::new(),
            threads: 1,
            devices: DeviceGrant::PROCESSOR,
        }
    }

    /// Grants a plain folder as the input `name` (`stage.output`), with its kind and facts.
    ///
    /// # Errors
    /// Fails where the folder cannot be read or stored.
    pub fn input(self, name: &str, kind: &str, folder: &Path, facts: Facts) -> Result<Self, StageError> {
        let identity = Tree::of_folder(folder).map_err(stored)?.identity();
        self.grant(name, folder, Description::new(kind, identity, facts))
    }

    /// Grants a folder that has its description beside it, such as an output of an earlier [`TestBench::run`].
    ///
    /// # Errors
    /// Fails where the folder cannot be read or stored.
    pub fn input_of(self, name: &str, folder: &Path) -> Result<Self, StageError> {
        self.grant(name, folder, Description::read_beside(folder)?)
    }

    /// Grants a source file of a role; call it once per file.
    ///
    /// # Errors
    /// Fails where the file cannot be read.
    pub fn file(mut self, role: &str, path: &Path) -> Result<Self, StageError> {
        let (digest, size) = Digest::of_file(path).map_err(stored)?;
        let relative = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let grant = FileGrant { path: path.to_owned(), relative, digest, size, named: Some(Named::Single) };
        self.files.entry(role.to_owned()).or_default().push(grant);
        Ok(self)
    }

    /// Pins `kind:name@revision` to a version.
    #[must_use]
    pub fn pin(mut self, name: &str, version: &str) -> Self {
        self.pins.insert(name.to_owned(), Pinned::commit(version));
        self
    }

    /// Pins `kind:name@revision` to a commit and the files there.
    #[must_use]
    pub fn pinned(mut self, name: &str, pinned: Pinned) -> Self {
        self.pins.insert(name.to_owned(), pinned);
        self
    }

    /// How many threads the stage may use; 1 by default.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// What the stage has to compute on; the CPU of one worker by default.
    #[must_use]
    pub fn devices(mut self, devices: DeviceGrant) -> Self {
        self.devices = devices;
        self
    }

    /// The working folder that a stage kind gets on this bench; it stays between runs.
    pub fn working<K: StageKind>(&self) -> PathBuf {
        self.root.join("working").join(K::NAME)
    }

    /// The folder that a stage kind gets on this bench for logs and curves.
    pub fn run_folder<K: StageKind>(&self) -> PathBuf {
        self.root.join("run").join(K::NAME)
    }

    /// Runs a stage kind and gives its outputs by name.
    ///
    /// # Errors
    /// The stage's own failure, or [`Cause::BadParameters`] where the parameters do not read.
    pub fn run<K: StageKind>(&self, parameters: Value) -> Result<BTreeMap<String, Artifact>, StageError> {
        Ok(self.run_recorded::<K>(parameters)?.0)
    }

    /// As [`TestBench::run`], with what the stage records about how the result came about.
    ///
    /// # Errors
    /// As there.
    pub fn run_recorded<K: StageKind>(
        &self,
        parameters: Value,
    ) -> Result<(BTreeMap<String, Artifact>, Recorded), StageError> {
        let mut reader = Reader::default();
        let stage = K::read(&Node::from_json(&parameters), &mut reader);
        let Some(stage) = stage.filter(|_| reader.problems.is_empty()) else {
            let problems: Vec<_> = reader.problems.into_iter().map(|problem| problem.message).collect();
            return Err(StageError::new(Cause::BadParameters, problems.join("; ")));
        };
        let store = self.store()?;
        let staging = store.staging().map_err(stored)?;
        let job = Job {
            protocol: PROTOCOL,
            stage: K::NAME.to_owned(),
            kind: K::NAME.to_owned(),
            parameters,
            inputs: self.inputs.clone(),
            files: self.files.clone(),
            pins: self.pins.clone(),
            network: Network::Online,
            outputs: stage.outputs(),
            store: store.root().to_owned(),
            inputs_folder: staging.path().join("inputs"),
            staging: staging.path().to_owned(),
            working: self.working::<K>(),
            run_folder: self.run_folder::<K>(),
            profile: None,
            key: Digest::of(b"test bench"),
            threads: self.threads,
            devices: self.devices.clone(),
        };
        let mut context = StageContext::new(job, Voice::Silent)?;
        stage.run(&mut context)?;
        let Outcome { outputs, how } = context.finish()?;
        let opened = outputs.into_iter().map(|(name, output)| Ok((name, self.opened(&store, output)?)));
        Ok((opened.collect::<Result<_, StageError>>()?, how))
    }

    fn store(&self) -> Result<Store, StageError> {
        Store::open(self.root.join("store")).map_err(stored)
    }

    fn opened(&self, store: &Store, output: OutputRecord) -> Result<Artifact, StageError> {
        let description = Description::new(output.kind, output.identity, output.facts);
        // Equal files may be different artefacts.
        let name = format!("{} {description:?}", output.tree);
        let folder = self.root.join("outputs").join(Digest::of(name.as_bytes()).to_string());
        if !folder.exists() {
            make_folder(&self.root.join("outputs"))?;
            store.link_folder(&output.tree, &folder, Verify::Contents).map_err(stored)?;
            description.write_beside(&folder)?;
        }
        Ok(Artifact { folder, description })
    }

    fn grant(mut self, name: &str, folder: &Path, description: Description) -> Result<Self, StageError> {
        let store = self.store()?;
        let staging = store.staging().map_err(stored)?;
        let copy = staging.path().join("copy");
        copy_folder(folder, &copy)?;
        let tree = store.add_folder(&copy).map_err(stored)?;
        let Description { kind, identity, facts, .. } = description;
        self.inputs.insert(name.to_owned(), InputGrant { kind, tree, identity, facts: Some(facts) });
        Ok(self)
    }
}

fn make_folder(folder: &Path) -> Result<(), StageError> {
    fs::create_dir_all(folder).or_fail(Cause::Machine, || format!("cannot create folder `{}`", folder.display()))
}

/// Copies a folder, following links: the outputs of an earlier run are links into the store.
fn copy_folder(from: &Path, to: &Path) -> Result<(), StageError> {
    make_folder(to)?;
    let failed = || format!("cannot copy folder `{}`", from.display());
    for entry in fs::read_dir(from).or_fail(Cause::Machine, failed)? {
        let entry = entry.or_fail(Cause::Machine, failed)?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if source.is_dir() {
            copy_folder(&source, &target)?;
        } else {
            fs::copy(&source, &target).or_fail(Cause::Machine, failed)?;
        }
    }
    Ok(())
}
