//! Why a stage failed: a cause that decides what happens next, and words for a person.

use std::error::Error;
use std::time::Duration;

use cache::Digest;
use cache::remote::RemoteError;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod cause;
mod recognise;

pub use cause::Cause;
pub(crate) use recognise::{by_system_error, of_words};

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

    /// The cause, looked for beneath it where the one that was given says less: a write that met a full disk failed for
    /// want of disk, whatever the crate between made of it.
    pub fn known_cause(&self) -> Cause {
        if matches!(self.cause, Cause::Cancelled | Cause::CorruptInput) {
            return self.cause;
        }
        let source = self.source.as_deref().map(|source| source as &(dyn Error + 'static));
        let by_words =
            |error| matches!(self.cause, Cause::Machine | Cause::Internal).then(|| recognise::by_words(error));
        source.and_then(recognise::by_system_error).or_else(|| by_words(self).flatten()).unwrap_or(self.cause)
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

/// Why a stage failed, in the form that passes between processes and into records: a [`StageError`] without its types.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Failure {
    /// Decides retries and the exit code.
    pub cause: Cause,
    /// The message and its sources, outermost first.
    pub messages: Vec<String>,
    /// What to do about it.
    pub help: Option<String>,
    /// For [`Cause::CorruptInput`]: the damaged object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<Digest>,
}

impl Failure {
    /// A failure with the advice of its cause, if that has any.
    pub(crate) fn new(cause: Cause, messages: Vec<String>) -> Self {
        Self { cause, messages, help: cause.advice().map(str::to_owned), object: None }
    }

    /// A process that ran longer than its stage may.
    pub(crate) fn timeout(limit: Duration) -> Self {
        Self::new(Cause::Timeout, vec![format!("it took longer than its timeout of {limit:?}")])
            .with_help("raise `timeout:`; what the stage had saved is kept")
    }

    /// Replaces the advice of the cause by a better one.
    #[must_use]
    pub(crate) fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

impl From<&RemoteError> for Failure {
    fn from(error: &RemoteError) -> Self {
        let cause = match error {
            RemoteError::Unreachable { .. } | RemoteError::Denied { .. } | RemoteError::NoBucket { .. } => {
                Cause::Network
            }
            RemoteError::Refused { .. } | RemoteError::Missing { .. } => Cause::BadData,
            RemoteError::Settings { .. }
            | RemoteError::Version { .. }
            | RemoteError::NotWritable { .. }
            | RemoteError::NotReadable { .. }
            | RemoteError::Unreadable { .. } => Cause::Machine,
            RemoteError::Machine { .. } | RemoteError::Store(_) => by_system_error(error).unwrap_or(Cause::Machine),
            RemoteError::Stopped => Cause::Cancelled,
        };
        let failure = Self::new(cause, chain(error));
        match error.help() {
            Some(help) => failure.with_help(help),
            None => failure,
        }
    }
}

impl From<&StageError> for Failure {
    fn from(error: &StageError) -> Self {
        let failure = Self::new(error.known_cause(), chain(error));
        match &error.help {
            Some(help) => failure.with_help(help),
            None => failure,
        }
    }
}

impl From<StageError> for Failure {
    fn from(error: StageError) -> Self {
        (&error).into()
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

/// An error's message and those of its sources, outermost first.
pub(crate) fn chain(error: &dyn Error) -> Vec<String> {
    let mut messages = vec![error.to_string()];
    let mut next = error.source();
    while let Some(source) = next {
        messages.push(source.to_string());
        next = source.source();
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_of_a_shared_cache_has_a_cause_its_messages_and_its_remedy() {
        let (remote, source) = ("s3://bucket".to_owned(), std::io::Error::from(std::io::ErrorKind::StorageFull));
        let failure = Failure::from(&RemoteError::Machine { remote: remote.clone(), source });
        assert_eq!(failure.cause, Cause::DiskFull);
        let failure = Failure::from(&RemoteError::Denied { remote, reason: "no".to_owned() });
        assert_eq!(failure.cause, Cause::Network);
        assert!(failure.help.is_some_and(|help| help.contains("credentials")));
    }
}
