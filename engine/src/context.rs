//! What a running stage may touch: its inputs, its outputs, its working state, and a way to say how far it is.

use std::path::{Path, PathBuf};

use cache::Digest;

use crate::artifact::{Description, Facts};
use crate::error::StageError;
use crate::parameter::{ArtifactKind, Input, Reference};
use crate::protocol::{FileGrant, Job, WorkerEvent};

/// An input, opened: every file in it has been checked against its digest.
#[derive(Debug, Clone)]
pub struct Artifact {
    /// A read-only folder of links with the original names.
    pub folder: PathBuf,
    /// Its description.
    pub description: Description,
}

/// An output in the making.
#[derive(Debug)]
pub struct Draft {
    /// The output's name.
    pub output: String,
    /// An empty folder to write into.
    pub folder: PathBuf,
}

/// The context of a running stage.
pub struct StageContext {
    job: Job,
}

impl StageContext {
    /// Opens an input and verifies every file in it.
    ///
    /// # Errors
    /// Fails with [`crate::error::Cause::CorruptInput`] where a stored file is not what it was.
    pub fn open<K: ArtifactKind>(&mut self, _input: &Input<K>) -> Result<Artifact, StageError> {
        todo!()
    }

    /// The full `stage.output` name that a reference of a kind stands for in this job.
    pub fn resolve(&self, _reference: &Reference, _kinds: &[&str]) -> Option<String> {
        todo!()
    }

    /// Begins an output.
    ///
    /// # Errors
    /// Fails where the stage declares no such output, or the disk refuses.
    pub fn create(&mut self, _output: &str) -> Result<Draft, StageError> {
        todo!()
    }

    /// Ends an output: writes its description, flushes it and moves it into the store. `identity` is the logical
    /// identity where the kind has one; else it is the digest of (path, content) pairs.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn seal(&mut self, _draft: Draft, _facts: Facts, _identity: Option<Digest>) -> Result<(), StageError> {
        todo!()
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
    pub fn verify(&self, _file: &FileGrant) -> Result<(), StageError> {
        todo!()
    }

    /// The version that a moving thing was pinned to, by `kind:name@revision`.
    pub fn pin(&self, name: &str) -> Option<&str> {
        self.job.pins.get(name).map(String::as_str)
    }

    /// A folder for resumable working state: what an interrupted process left there is still there.
    pub fn working(&self) -> &Path {
        &self.job.working
    }

    /// A private folder for temporary files, gone when the stage ends.
    pub fn scratch(&self) -> &Path {
        &self.job.staging
    }

    /// How many threads to use.
    pub fn threads(&self) -> usize {
        self.job.threads
    }

    /// The stage's id, for messages.
    pub fn stage(&self) -> &str {
        &self.job.stage
    }

    /// Says something to the engine.
    pub fn emit(&mut self, _event: WorkerEvent) {
        todo!()
    }

    /// Says how far the work is.
    pub fn progress(&mut self, unit: &str, done: u64, total: Option<u64>, note: Option<String>) {
        self.emit(WorkerEvent::Progress { unit: unit.to_owned(), done, total, note });
    }

    /// Warns the user.
    pub fn warn(&mut self, message: impl Into<String>) {
        self.emit(WorkerEvent::Warning { message: message.into() });
    }

    /// Records how the result came about (backend, kernel set); not part of any key.
    pub fn record(&mut self, _name: &str, _value: impl Into<serde_json::Value>) {
        todo!()
    }

    /// Whether the user asked to stop: save working state soon and return [`crate::error::Cause::Cancelled`].
    pub fn cancelled(&self) -> bool {
        todo!()
    }
}
