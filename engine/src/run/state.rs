//! The states of a stage within a run, and which may follow which.

use serde::{Deserialize, Serialize};

/// How a stage stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A stage before it has no result yet.
    Waiting,
    /// Its inputs are there.
    Ready,
    /// Its process is alive.
    Running,
    /// Its result was there already.
    Cached,
    /// Its process has made the result.
    Done,
    /// It failed for good.
    Failed,
    /// It was not run, since another failed or the user stopped the run.
    Skipped,
}

impl State {
    /// Whether its result can be read.
    pub fn has_result(self) -> bool {
        matches!(self, Self::Cached | Self::Done)
    }

    /// Whether nothing more happens to it, unless one of its results turns out to be damaged.
    pub fn is_settled(self) -> bool {
        matches!(self, Self::Cached | Self::Done | Self::Failed | Self::Skipped)
    }

    /// Whether `next` may follow. Beside the plain way (waiting, ready, running, done) there are three more: a cached
    /// result, another try of a stage that failed, and a result that was damaged and is made again.
    pub(super) fn may_become(self, next: Self) -> bool {
        match self {
            Self::Waiting => matches!(next, Self::Ready | Self::Skipped),
            Self::Ready => {
                matches!(next, Self::Waiting | Self::Running | Self::Cached | Self::Failed | Self::Skipped)
            }
            Self::Running => matches!(next, Self::Done | Self::Failed | Self::Skipped | Self::Ready | Self::Waiting),
            Self::Cached | Self::Done => matches!(next, Self::Waiting),
            Self::Failed | Self::Skipped => false,
        }
    }
}

/// Whether the user has asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stopping {
    No,
    Asked,
    Killed,
}
