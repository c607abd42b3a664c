//! Locks that the kernel holds, and private folders that vanish with their process.
//!
//! A lock is an open file description: it is free when the last process that has it is gone, however it went. A
//! child process that inherits the descriptor keeps it held.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::path::{Path, PathBuf};

/// An exclusive lock, held until the last copy of its descriptor is closed.
///
/// The descriptor is close-on-exec; who wants a child to hold the lock clears that flag in the child.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for Lock {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// A private folder on the store's file system, removed when dropped, or at a later [`crate::Store::open`] if its
/// process died.
#[derive(Debug)]
pub struct Staging {
    folder: PathBuf,
    lock: Lock,
}

impl Staging {
    /// The folder, empty at first.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// What keeps the folder from being swept: a process that works in it after this one may be gone inherits this.
    pub fn lock(&self) -> &Lock {
        &self.lock
    }
}
