//! Why a stage failed: a cause that decides what happens next, and words for a person.

use std::error::Error;

use serde::{Deserialize, Serialize};

/// What kind of failure it was; decides retries and the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The user's data is not what the stage needs.
    BadData,
    /// Parameters that only the run could find wrong.
    BadParameters,
    /// A source file changed between planning and reading.
    ChangedWhileRunning,
    /// A stored object is damaged; it is evicted and its producer runs again.
    CorruptInput,
    /// The machine lacks something: a device, disk, memory.
    Machine,
    /// A server could not be reached or refused.
    Network,
    /// A loss or gradient that is not finite, or a result outside its proved bound.
    Numeric,
    /// Ended from outside.
    Cancelled,
    /// The stage took longer than its `timeout`.
    Timeout,
    /// The process died without a word.
    Crashed,
    /// A defect of this program.
    Internal,
}

/// A stage's failure.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct StageError {
    /// What kind of failure.
    pub cause: Cause,
    /// A lower-case fragment.
    pub message: String,
    /// What to do about it.
    pub help: Option<String>,
    /// What lay beneath.
    #[source]
    pub source: Option<Box<dyn Error + Send + Sync>>,
}

impl StageError {
    /// A failure with its cause.
    pub fn new(cause: Cause, message: impl Into<String>) -> Self {
        Self { cause, message: message.into(), help: None, source: None }
    }

    /// The user's data is wrong.
    pub fn bad_data(message: impl Into<String>) -> Self {
        Self::new(Cause::BadData, message)
    }

    /// A defect of this program.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(Cause::Internal, message)
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds what lay beneath.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }
}

/// Turns any error into a stage's failure at the call that met it.
pub trait OrFail<T> {
    /// Says what was being done and of which cause a failure is.
    ///
    /// # Errors
    /// The error given, as the source of a [`StageError`].
    fn or_fail(self, cause: Cause, message: impl FnOnce() -> String) -> Result<T, StageError>;
}

impl<T, E: Into<Box<dyn Error + Send + Sync>>> OrFail<T> for Result<T, E> {
    fn or_fail(self, cause: Cause, message: impl FnOnce() -> String) -> Result<T, StageError> {
        self.map_err(|source| StageError::new(cause, message()).with_source(source))
    }
}
