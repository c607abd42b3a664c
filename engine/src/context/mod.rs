//! What a running stage may touch: its inputs, its outputs, its working state, and a way to say how far it is.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cache::{Digest, FinishedFiles, Flushing, OutputRecord, Store, StoreError, Tree, TreeFile, Verify};
use profile::Profile;
use serde_json::{Map, Value};

use crate::artifact::{Description, Facts, described_among, stored_files};
use crate::device::DeviceGrant;
use crate::error::{Cause, OrFail, StageError};
use crate::execute::Membership;
use crate::execute::private_paths::PrivatePaths;
use crate::history::stage_folder;
use crate::parameter::{ArtifactKind, Input, Reference};
use crate::pin::Pinned;
use crate::protocol::{FileGrant, InputGrant, Job, Network, ProfileRequest, ReportLevel, WorkerEvent};
use crate::visible::visible;

mod reuse;

/// Progress is for people: more than this many messages a second are dropped.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// What to do about a file of the user that is not what a result was made of.
pub(crate) const OUTSIDE: &str = "run again: what depends on the file is made of what it is now; a file that is gone, or \
                                  that another machine does not see, has to be put back, or copied into the store \
                                  (`copy: true`)";

/// Set by the signal handler of the stage process.
pub(crate) static CANCELLED: AtomicBool = AtomicBool::new(false);

/// An input, opened: every file in it has been checked against its digest.
#[derive(Debug, Clone)]
pub struct Artifact {
    /// A read-only folder of links with the original names. Its description is next to it
    /// ([`crate::artifact::description_file`]).
    pub folder: PathBuf,
    pub description: Description,
}

/// An output in the making.
#[derive(Debug)]
pub struct Draft {
    /// The output's name.
    pub output: String,
    /// An empty folder to write into.
    pub folder: PathBuf,
    finished: FinishedFiles,
    flushing: Option<Flushing>,
}

impl Draft {
    /// The digest of a file in its folder that nothing is written to any more.
    ///
    /// # Errors
    /// Fails where it cannot be read.
    pub fn digest(&mut self, path: &Path) -> Result<Digest, StageError> {
        Ok(self.finished.digest(path).map_err(stored)?.0)
    }

    /// The files that are there. One that [`Draft::digest`] has read is not read again.
    ///
    /// # Errors
    /// Fails where one cannot be read.
    pub fn tree(&self) -> Result<Tree, StageError> {
        Tree::of_finished(&self.folder, &self.finished).map_err(stored)
    }

    /// Begins to flush the files that are there, while the stage does other work; [`StageContext::seal`] waits for it.
    ///
    /// # Errors
    /// Fails where the folder cannot be read.
    pub fn begin_flush(&mut self) -> Result<(), StageError> {
        if self.flushing.is_none() {
            self.flushing = Some(Flushing::begin(&self.folder).map_err(stored)?);
        }
        Ok(())
    }
}

/// What a stage that ended well has made.
#[derive(Debug)]
pub struct Outcome {
    /// By output name.
    pub outputs: BTreeMap<String, OutputRecord>,
    /// How it came about: backend, kernel set, threads.
    pub how: Map<String, Value>,
}

/// Where the messages of a stage go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Voice {
    /// JSON lines on standard output, which the engine reads.
    Protocol,
    /// Nowhere: the stage runs inside a test.
    Silent,
}

/// The context of a running stage.
pub struct StageContext {
    job: Job,
    store: Store,
    voice: Voice,
    private: PrivatePaths,
    scratch: PathBuf,
    opened: BTreeMap<String, Artifact>,
    outputs: BTreeMap<String, OutputRecord>,
    how: Map<String, Value>,
    last_progress: Option<Instant>,
    profile: Profile,
    membership: Option<Membership>,
    /// Files of inputs that are outside the store.
    outside: Vec<TreeFile>,
}

impl StageContext {
    /// A context for a job, with its private folders made.
    ///
    /// # Errors
    /// Fails where the store or one of the folders cannot be opened.
    pub fn new(job: Job, voice: Voice) -> Result<Self, StageError> {
        let store = Store::join(&job.store, &job.staging).map_err(stored)?;
        let scratch = job.staging.join("scratch");
        for folder in [&scratch, &job.inputs_folder, &job.working] {
            fs::create_dir_all(folder)
                .or_fail(Cause::Machine, || format!("cannot create folder `{}`", folder.display()))?;
        }
        let private = PrivatePaths::of(&job);
        let profile = job.profile.map_or(Profile::OFF, |_| Profile::recording());
        Ok(Self {
            job,
            store,
            voice,
            private,
            scratch,
            opened: BTreeMap::new(),
            outputs: BTreeMap::new(),
            how: Map::new(),
            last_progress: None,
            profile,
            membership: None,
            outside: Vec::new(),
        })
    }

    /// A context for one of the processes that [`StageContext::start_member`] starts: it says nothing, makes nothing,
    /// and opens what the stage's process has opened.
    pub(crate) fn of_member(job: Job, membership: Membership) -> Result<Self, StageError> {
        let job = Job { profile: None, ..job };
        Ok(Self { membership: Some(membership), ..Self::new(job, Voice::Silent)? })
    }

    /// Its place among the processes that compute this stage; none in the stage's own process.
    pub fn membership(&self) -> Option<&Membership> {
        self.membership.as_ref()
    }

    pub(crate) fn job(&self) -> &Job {
        &self.job
    }

    /// Opens an input and verifies every file in it.
    ///
    /// # Errors
    /// Fails with [`crate::error::Cause::CorruptInput`] where a stored file is not what it was.
    pub fn open<K: ArtifactKind>(&mut self, input: &Input<K>) -> Result<Artifact, StageError> {
        let reference = &input.reference;
        let name = self.resolve(reference, K::KINDS).ok_or_else(|| {
            StageError::internal(format!(
                "the job grants no input of kind {} from stage `{}`",
                K::KINDS.join(" or "),
                reference.stage
            ))
        })?;
        if let Some(artifact) = self.opened.get(&name) {
            return Ok(artifact.clone());
        }
        let grant = &self.job.inputs[&name];
        let folder = self.job.inputs_folder.join(stage_folder(&name));
        let _phase = self.profile.phase("open input");
        let description = granted_description(&self.store, grant)?;
        // The stage's process has made and verified the folder before it started this one.
        if self.membership.is_none() {
            let files = stored_files(&self.store, &grant.tree, &grant.identity).map_err(stored)?;
            self.store.link_files(&files, &folder, Verify::Contents).map_err(stored)?;
            description.write_beside(&folder)?;
            self.outside.extend(files.files().iter().filter(|file| self.store.is_outside(file)).cloned());
        }
        let artifact = Artifact { folder, description };
        self.opened.insert(name, artifact.clone());
        Ok(artifact)
    }

    /// The full `stage.output` name that a reference of a kind stands for in this job.
    pub fn resolve(&self, reference: &Reference, kinds: &[&str]) -> Option<String> {
        let candidates = self.job.inputs.iter().filter_map(|(name, grant)| {
            let output = name.strip_prefix(&reference.stage)?.strip_prefix('.')?;
            Some((name, output, grant.kind.as_str()))
        });
        pick(reference, kinds, candidates).cloned()
    }

    /// Begins an output.
    ///
    /// # Errors
    /// Fails where the stage declares no such output, or the disk refuses.
    pub fn create(&mut self, output: &str) -> Result<Draft, StageError> {
        self.declared_kind(output)?;
        let folder = self.job.staging.join("outputs").join(output);
        fs::create_dir_all(&folder)
            .or_fail(Cause::Machine, || format!("cannot create folder `{}`", folder.display()))?;
        Ok(Draft { output: output.to_owned(), folder, finished: FinishedFiles::default(), flushing: None })
    }

    /// Ends an output: flushes it and moves it into the store. `identity` is the logical identity where the kind has
    /// one; else it is the digest of (path, content) pairs.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn seal(&mut self, draft: Draft, facts: Facts, identity: Option<Digest>) -> Result<(), StageError> {
        let mut draft = draft;
        let _phase = self.profile.phase("seal output");
        let kind = self.declared_kind(&draft.output)?;
        // The disk writes while the files are hashed.
        draft.begin_flush()?;
        let Draft { output, folder, finished, flushing } = draft;
        let hashing = self.profile.phase("hash output");
        let tree = Tree::of_finished(&folder, &finished).map_err(stored)?;
        drop(hashing);
        let identity = identity.unwrap_or_else(|| tree.identity());
        let storing = self.profile.phase("flush output and move it into the store");
        flushing.map_or(Ok(()), Flushing::end).map_err(stored)?;
        let tree = self.store.add_finished(&folder, &tree, &finished).map_err(stored)?;
        drop(storing);
        self.outputs.insert(output, OutputRecord { kind, tree, identity, facts });
        Ok(())
    }

    /// The source files of a role, each checked against the digest it was planned with when it is opened by
    /// [`StageContext::verify`].
    pub fn files(&self, role: &str) -> &[FileGrant] {
        self.job.files.get(role).map_or(&[], Vec::as_slice)
    }

    /// Checks that a source file is still what was planned with.
    ///
    /// # Errors
    /// Fails with [`crate::error::Cause::ChangedWhileRunning`].
    pub fn verify(&self, file: &FileGrant) -> Result<(), StageError> {
        let (digest, size) = Digest::of_file(&file.path).map_err(|error| changed(&file.path).with_source(error))?;
        if digest == file.digest && size == file.size { Ok(()) } else { Err(changed(&file.path)) }
    }

    /// Puts a source file into an output under a name, where it stays: the store gets no copy of it, and a note of
    /// where it is. In the draft it is a link.
    ///
    /// # Errors
    /// Fails with [`crate::error::Cause::ChangedWhileRunning`] where it is not what was planned with, and where the
    /// disk refuses.
    pub fn leave(&self, file: &FileGrant, draft: &mut Draft, name: &str) -> Result<(), StageError> {
        let object = (file.digest, file.size);
        let left = self.store.leave_outside(&file.path, object).map_err(|error| match error {
            StoreError::Outside { .. } => changed(&file.path).with_source(error),
            error => stored(error),
        })?;
        let link = draft.folder.join(name);
        symlink(left, &link).or_fail(Cause::Machine, || format!("cannot write `{}`", link.display()))?;
        draft.finished.leave(&link, object).map_err(stored)
    }

    /// What a mutable reference was pinned to, by `kind:name@revision`.
    pub fn pin(&self, name: &str) -> Option<&Pinned> {
        self.job.pins.get(name)
    }

    /// Whether the stage may go out for what it reads.
    pub fn network(&self) -> Network {
        self.job.network
    }

    /// A folder for resumable working state: what an interrupted process left there is still there.
    pub fn working(&self) -> &Path {
        &self.job.working
    }

    /// The stage's folder in this run, for logs and curves with times; nothing in it is part of a result. It need not
    /// exist yet.
    pub fn run_folder(&self) -> &Path {
        &self.job.run_folder
    }

    /// A private folder for temporary files, gone when the stage ends.
    pub fn scratch(&self) -> &Path {
        &self.scratch
    }

    /// What to compute on.
    pub fn devices(&self) -> &DeviceGrant {
        &self.job.devices
    }

    /// How many threads to use, by all workers together.
    pub fn threads(&self) -> usize {
        self.job.threads
    }

    /// Records where the time goes, where that was asked for.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    pub(crate) fn profile_request(&self) -> Option<ProfileRequest> {
        self.job.profile
    }

    /// The stage's id, for messages.
    pub fn stage(&self) -> &str {
        &self.job.stage
    }

    /// Says something to the engine.
    pub fn emit(&mut self, event: WorkerEvent) {
        if self.voice == Voice::Protocol && !self.is_too_frequent(&event) {
            say(&self.private.hide_in(event));
        }
    }

    /// Says how far the work is.
    pub fn progress(&mut self, unit: &str, done: u64, total: Option<u64>, note: Option<String>) {
        self.emit(WorkerEvent::Progress { unit: unit.to_owned(), done, total, note });
    }

    /// Writes a line into the stage's log, for who reads `pipeline logs`.
    pub fn log(&self, line: &str) {
        if self.voice == Voice::Protocol {
            // Standard error is the log. One that cannot be written is no reason to fail.
            let _ = writeln!(std::io::stderr(), "{}", visible(line));
        }
    }

    /// Warns the user.
    pub fn warn(&mut self, message: impl Into<String>) {
        self.emit(WorkerEvent::Warning { message: message.into() });
    }

    /// Tells the user of something that asks for nothing.
    pub fn note(&mut self, message: impl Into<String>) {
        self.emit(WorkerEvent::Note { message: message.into() });
    }

    /// Shows what the run is for: a table, completions.
    pub fn report(&mut self, text: impl Into<String>) {
        self.emit(WorkerEvent::Report { text: text.into(), level: ReportLevel::Result });
    }

    /// Shows how a result came about to those who ask for more (`--verbose`).
    pub fn report_detail(&mut self, text: impl Into<String>) {
        self.emit(WorkerEvent::Report { text: text.into(), level: ReportLevel::Detail });
    }

    /// Records how the result came about (backend, kernel set); not part of any key.
    pub fn record(&mut self, name: &str, value: impl Into<Value>) {
        self.how.insert(name.to_owned(), value.into());
    }

    /// Whether the user asked to stop: save working state soon and return [`crate::error::Cause::Cancelled`].
    pub fn cancelled(&self) -> bool {
        CANCELLED.load(Ordering::Relaxed)
    }

    /// Ends the stage where the user asked to stop.
    ///
    /// # Errors
    /// Fails with [`Cause::Cancelled`] where [`StageContext::cancelled`].
    pub fn stop_if_cancelled(&self) -> Result<(), StageError> {
        if self.cancelled() { Err(StageError::new(Cause::Cancelled, "ended by the user")) } else { Ok(()) }
    }

    /// Ends the stage: what it made and how.
    ///
    /// # Errors
    /// Fails where a declared output was not sealed, which is a defect of the stage, and where an input outside the
    /// store has changed while the stage read it.
    pub fn finish(self) -> Result<Outcome, StageError> {
        let unchanged = self.outside.iter().try_for_each(|file| self.store.check(file, Verify::Contents));
        if let Err(error) = unchanged {
            // What was saved may be computed from other bytes than the key says. The error is the one to tell.
            let _ = fs::remove_dir_all(&self.job.working);
            return Err(stored(error));
        }
        match self.job.outputs.iter().find(|output| !self.outputs.contains_key(&output.name)) {
            Some(output) => Err(StageError::internal(format!(
                "stage kind `{}` ended without making its output `{}`",
                self.job.kind, output.name
            ))),
            None => Ok(Outcome { outputs: self.outputs, how: self.how }),
        }
    }

    fn declared_kind(&self, output: &str) -> Result<String, StageError> {
        let declared = self.job.outputs.iter().find(|declared| declared.name == output);
        declared.map(|declared| declared.kind.clone()).ok_or_else(|| {
            StageError::internal(format!("stage kind `{}` declares no output `{output}`", self.job.kind))
        })
    }

    fn is_too_frequent(&mut self, event: &WorkerEvent) -> bool {
        let WorkerEvent::Progress { done, total, .. } = event else { return false };
        let now = Instant::now();
        let soon = self.last_progress.is_some_and(|last| now.duration_since(last) < PROGRESS_INTERVAL);
        // The last one is never dropped, or a bar would stop short of its end.
        if soon && Some(*done) != *total {
            return true;
        }
        self.last_progress = Some(now);
        false
    }
}

/// Writes one line of the protocol. A reader that is gone is no reason to fail: the death pipe ends this process.
pub(crate) fn say(event: &WorkerEvent) {
    let mut line = serde_json::to_vec(event).expect("an event is plain data");
    line.push(b'\n');
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(&line).and_then(|()| out.flush());
}

/// The candidate that a reference stands for: the named output, else the one of the kind that comes first in `kinds`,
/// of which an empty list accepts every kind. The plan has refused references that fit two outputs alike.
pub(crate) fn pick<'a, T>(
    reference: &Reference,
    kinds: &[&str],
    candidates: impl Iterator<Item = (T, &'a str, &'a str)>,
) -> Option<T> {
    let rank = |kind: &str| match kinds {
        [] => Some(0),
        kinds => kinds.iter().position(|accepted| *accepted == kind),
    };
    candidates
        .filter(|(_, output, _)| reference.output.as_deref().is_none_or(|named| named == *output))
        .filter_map(|(item, _, kind)| Some((rank(kind)?, item)))
        .min_by_key(|(rank, _)| *rank)
        .map(|(_, item)| item)
}

/// The description of an input. A job of a version that did not grant it comes with an artefact that has it among its
/// files.
fn granted_description(store: &Store, grant: &InputGrant) -> Result<Description, StageError> {
    if let Some(facts) = &grant.facts {
        return Ok(Description::new(&grant.kind, grant.identity, facts.clone()));
    }
    let tree = store.tree(&grant.tree).map_err(stored)?;
    let described = described_among(store, &tree, |identity| *identity == grant.identity);
    described.ok_or_else(|| StageError::internal("the job does not say what an input is, and neither does the input"))
}

fn changed(path: &Path) -> StageError {
    let message = format!("`{}` changed while the pipeline was running", path.display());
    StageError::new(Cause::ChangedWhileRunning, message).with_help("run again when it is complete")
}

/// A failure of the store as a stage's failure; the damaged object stays reachable as its source (see
/// [`damaged_object`]).
pub(crate) fn stored(error: StoreError) -> StageError {
    let cause = match &error {
        StoreError::CorruptObject { .. }
        | StoreError::MissingObject { .. }
        | StoreError::CorruptTree { .. }
        | StoreError::MissingTree { .. } => Cause::CorruptInput,
        StoreError::Io { .. } | StoreError::Rename { .. } => Cause::Machine,
        StoreError::DiskFull { .. } => Cause::DiskFull,
        StoreError::NotAFile { .. } | StoreError::BadName { .. } => Cause::BadData,
        StoreError::ChangedWhileStoring { .. } => Cause::Internal,
        StoreError::Outside { .. } => Cause::ChangedWhileRunning,
    };
    let message = match cause {
        Cause::CorruptInput => "an input is damaged in the store",
        Cause::ChangedWhileRunning => "a file of an input changed while the pipeline was running",
        _ => "the store failed",
    };
    let failure = StageError::new(cause, message).with_source(error);
    if cause == Cause::ChangedWhileRunning { failure.with_help(OUTSIDE) } else { failure }
}

/// The damaged object behind a failure, where there is one.
pub(crate) fn damaged_object(error: &StageError) -> Option<Digest> {
    let source = error.source.as_deref()?;
    source.downcast_ref::<StoreError>().and_then(StoreError::object)
}

#[cfg(test)]
pub(crate) mod tests;
