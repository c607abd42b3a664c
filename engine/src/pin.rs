//! What a moving thing on a server was fixed to.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What something was pinned to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pinned {
    /// The commit.
    pub commit: String,
    /// The files at that commit, each with its checksum and length in the words of the stage kind that pinned it. Empty where
    /// the commit alone is written down.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

impl Pinned {
    /// A commit, without its files.
    pub fn commit(commit: impl Into<String>) -> Self {
        Self { commit: commit.into(), files: BTreeMap::new() }
    }
}
