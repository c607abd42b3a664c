//! How a process ended, and why.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Cause;

/// A process's last status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// It exited with a code.
    Code(i32),
    /// A signal ended it, such as `SIGKILL`.
    Signal(String),
}

/// Why a process failed, in the words of whoever started it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// What kind of failure.
    pub cause: Cause,
    /// The message and its sources, outermost first.
    pub messages: Vec<String>,
    /// What to do about it.
    pub help: Option<String>,
}

impl Verdict {
    /// Of a process that took longer than its stage may.
    pub(crate) fn timeout(limit: Duration) -> Self {
        Self {
            cause: Cause::Timeout,
            messages: vec![format!("it took longer than its timeout of {limit:?}")],
            help: Some("raise `timeout:`; what the stage had saved is kept".to_owned()),
        }
    }
}
