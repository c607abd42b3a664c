//! What can go wrong between the store and the file system.

use std::io;
use std::path::{Path, PathBuf};

use crate::Digest;
use crate::disk::Disk;
use crate::outside::Difference;

/// A failure of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file operation failed.
    #[error("cannot {action} `{}`", .path.display())]
    Io {
        /// What was tried: `open`, `flush`, `create folder`.
        action: &'static str,
        /// What it was tried on.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The file system, or the user's quota on it, is full.
    #[error("no space left to {action} `{}`{disk}", .path.display())]
    DiskFull {
        /// What was tried.
        action: &'static str,
        /// What it was tried on.
        path: PathBuf,
        disk: Disk,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
    /// A rename failed.
    #[error("cannot rename `{}` to `{}`", .from.display(), .to.display())]
    Rename {
        /// The name it has.
        from: PathBuf,
        /// The name it was to get.
        to: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// Something else where a regular file is needed, or a folder of those.
    #[error("`{}` is a {found}, where a regular file is needed", .path.display())]
    NotAFile {
        /// Where it is.
        path: PathBuf,
        /// What it is: `symbolic link`, `socket`, `file with several names`.
        found: &'static str,
    },
    /// A name that the store does not take.
    #[error("`{name}` cannot be a name in the store: {reason}")]
    BadName {
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// A file changed between being hashed and being stored.
    #[error("`{}` changed while it was being stored", .path.display())]
    ChangedWhileStoring {
        /// Where it is.
        path: PathBuf,
    },
    /// A stored file is not what its digest says.
    #[error("stored file `{}` is damaged: it does not have digest {}", .path.display(), .digest.short())]
    CorruptObject {
        /// The digest it should have.
        digest: Digest,
        /// Where it is in the store.
        path: PathBuf,
    },
    /// A stored file is gone.
    #[error("stored file `{}` is missing", .path.display())]
    MissingObject {
        digest: Digest,
        /// Where it should be in the store.
        path: PathBuf,
    },
    /// A file of the user that an object was left in is not what it was.
    #[error("`{}`, which was left outside the store, {how}", .path.display())]
    Outside {
        /// The digest that it should have.
        digest: Digest,
        path: PathBuf,
        how: Difference,
    },
    /// A stored folder's list of files is not what its digest says.
    #[error("stored folder `{}` is damaged: {reason}", .path.display())]
    CorruptTree {
        /// The digest it should have.
        digest: Digest,
        /// Where its list lies.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A stored folder's list of files is gone.
    #[error("stored folder `{}` is missing", .path.display())]
    MissingTree {
        digest: Digest,
        /// Where its list should lie.
        path: PathBuf,
    },
}

impl StoreError {
    /// An error of the file system, sorted by what the reader can do about it.
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>, source: io::Error) -> Self {
        let path = path.as_ref().to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                let disk = Disk::of(&path);
                Self::DiskFull { action, path, disk, source }
            }
            _ => Self::Io { action, path, source },
        }
    }

    /// As [`StoreError::io`], in the form that `map_err` takes.
    pub(crate) fn on(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::io(action, path, source)
    }

    /// The error of the operating system beneath, for callers that name the path themselves.
    pub fn into_io(self) -> io::Error {
        match self {
            Self::Io { source, .. } | Self::DiskFull { source, .. } | Self::Rename { source, .. } => source,
            other => io::Error::other(other),
        }
    }

    /// The damaged or missing object to evict and make again, where that is what happened.
    pub fn object(&self) -> Option<Digest> {
        match self {
            Self::CorruptObject { digest, .. } | Self::MissingObject { digest, .. } => Some(*digest),
            Self::Io { .. }
            | Self::DiskFull { .. }
            | Self::Rename { .. }
            | Self::NotAFile { .. }
            | Self::BadName { .. }
            | Self::ChangedWhileStoring { .. }
            | Self::Outside { .. }
            | Self::CorruptTree { .. }
            | Self::MissingTree { .. } => None,
        }
    }
}
