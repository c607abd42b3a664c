//! The files that a stage reads, as far as they are on this machine before it runs.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::protocol::FileGrant;

/// The most that is read of one file, in bytes.
pub const MOST_READ: u64 = 4 << 20;

/// The role of the files of what a stage has pinned on a server, as far as their metadata was fetched.
pub const PINNED: &str = "@pinned";

/// How much of a file is on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Extent {
    Whole,
    /// The pieces that describe it (a header, a footer, the first rows), in a file of its true length whose other bytes
    /// are zeros.
    Pieces,
    /// Its name alone.
    Name,
}

/// A file that a stage reads: on this machine, or on a server with its metadata here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalFile {
    /// Where it is.
    pub path: PathBuf,
    /// How much of it is there.
    pub extent: Extent,
    /// Its path below the folder or pattern that was asked for; of a single file, its name.
    pub relative: String,
    /// What messages call it: its path as seen from the pipeline file, where it is below that.
    pub name: String,
}

/// The files that a stage reads, by role; those of servers under [`PINNED`].
#[derive(Debug, Clone, Default)]
pub struct LocalFiles(pub(crate) BTreeMap<String, Vec<LocalFile>>);

impl LocalFiles {
    /// Where none are looked at.
    pub const NONE: &'static Self = &Self(BTreeMap::new());

    /// Files of this machine that a stage reads, by role.
    pub(crate) fn granted(files: &BTreeMap<String, Vec<FileGrant>>) -> Self {
        let local = |grant: &FileGrant| LocalFile {
            path: grant.path.clone(),
            extent: Extent::Whole,
            relative: grant.relative.clone(),
            name: grant.relative.clone(),
        };
        Self(files.iter().map(|(role, grants)| (role.clone(), grants.iter().map(local).collect())).collect())
    }

    /// The files of a role, in order.
    pub fn files(&self, role: &str) -> &[LocalFile] {
        self.0.get(role).map_or(&[], Vec::as_slice)
    }
}
