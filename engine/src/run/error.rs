//! Why a run does not begin.

use std::io;
use std::path::PathBuf;

use cache::StoreError;

use crate::device::DeviceMissing;
use crate::explain::{ExplainError, ResultMissing};
use crate::file::problem::Problem;
use crate::lock_file::LockError;
use crate::memory::size;

/// Why a run did not begin.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Source files that are missing or cannot be read: mistakes of the pipeline file, with their places.
    #[error("{} source files are missing or cannot be read", .0.len())]
    Sources(Vec<Problem>),
    /// What the data flow of the plan shows to be wrong, and what a user should hear besides; each with its place.
    #[error("{} mistakes in the data flow", .0.len())]
    Rejected(Vec<Problem>),
    /// Targets of `publish:` that may not be replaced, or cannot be written: mistakes of the pipeline file, with their
    /// places.
    #[error("{} targets of `publish` cannot be published to", .0.len())]
    Targets(Vec<Problem>),
    /// Stages that ask for devices that are not there, and that have no result yet.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Devices(Vec<DeviceMissing>),
    /// Stages that ask for more memory than there is, and that have no result yet.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Memory(Vec<MemoryMissing>),
    /// Stages that the run is not to make, and that have no result.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Results(Vec<ResultMissing>),
    /// Something is not pinned, or the lock file failed.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Earlier results could not be looked up.
    #[error("cannot look up earlier results")]
    Explain(#[source] Box<ExplainError>),
    /// Machines that share this file system could not keep each other from making the same result.
    #[error("`flock` is not honoured on the file system of `{}`{}", .path.display(), .words.as_ref().map(|words| format!(": {words}")).unwrap_or_default())]
    NoLocks {
        /// The store.
        path: PathBuf,
        /// What it says itself.
        words: Option<String>,
    },
    /// The machine refused a file, a pipe or a signal handler.
    #[error("cannot {action} `{}`", .path.display())]
    Machine {
        /// What was tried.
        action: &'static str,
        /// What it was tried on.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// A stage that asks for more memory than there is, so that it could never start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("stage `{stage}` requests {} of memory, and this machine has {}", size(*.wanted_bytes), size(*.total_bytes))]
pub struct MemoryMissing {
    pub stage: String,
    /// What it asks for.
    pub wanted_bytes: u64,
    /// What processes here can have at most.
    pub total_bytes: u64,
}

impl MemoryMissing {
    /// What the user can do about it.
    pub fn help(&self) -> String {
        format!("to run it all the same say that it needs less, such as `{}.resources.memory=1GiB`", self.stage)
    }
}
