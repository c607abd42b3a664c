//! The store: objects, trees, results and working state below one folder.
//!
//! ```text
//! objects/ab/cdef…     file contents by digest, read-only
//! trees/ab/cdef…       folders: sorted (path, digest, size, executable)
//! results/<key>.json   key → outputs, and how they came about
//! partial/<key>/       a stage's resumable working state
//! staging/             outputs in the making
//! locks/               one file per lock
//! ```
//!
//! Whatever has a final name was complete and flushed before it got it, so a process that is killed, or a machine that
//! loses power, leaves nothing half-written. Any number of processes may use one store at a time.

use std::path::{Path, PathBuf};

use crate::{Digest, Lock, ResultRecord, Staging, StoreError, Tree};

/// How far a stored folder is checked before it is handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verify {
    /// Every file is read and compared with its digest.
    Contents,
    /// Files are taken as they are.
    None,
}

/// A store. Cheap to clone: it holds only its place.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

impl Store {
    /// Opens a store, made if it is not there yet, and sweeps up after processes that died.
    ///
    /// # Errors
    /// Fails where a folder cannot be made.
    pub fn open(_root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        todo!()
    }

    /// The store's folder, absolute.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A new private folder on the store's file system.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn staging(&self) -> Result<Staging, StoreError> {
        todo!()
    }

    /// Moves every file of a folder into the store and gives the digest of the tree; the files are gone from `folder`.
    ///
    /// `folder` must lie on the store's file system, as [`Store::staging`] does.
    ///
    /// # Errors
    /// As [`Tree::of_folder`] and [`Store::add_tree`].
    pub fn add_folder(&self, folder: &Path) -> Result<Digest, StoreError> {
        self.add_tree(folder, &Tree::of_folder(folder)?)
    }

    /// As [`Store::add_folder`], for a folder that has been hashed already and not been touched since.
    ///
    /// # Errors
    /// Fails where a file is no longer what was hashed or the disk refuses. Files stored by then stay, unused.
    pub fn add_tree(&self, _folder: &Path, _tree: &Tree) -> Result<Digest, StoreError> {
        todo!()
    }

    /// A stored tree, checked against its digest.
    ///
    /// # Errors
    /// Fails with [`StoreError::MissingTree`] or [`StoreError::CorruptTree`].
    pub fn tree(&self, _digest: &Digest) -> Result<Tree, StoreError> {
        todo!()
    }

    /// Where an object lies, or would lie.
    pub fn object_path(&self, _digest: &Digest) -> PathBuf {
        todo!()
    }

    /// Whether a tree and each of its objects are there, with the right sizes. Reads no content.
    pub fn complete(&self, _tree: &Digest) -> bool {
        todo!()
    }

    /// Makes `target`, a new folder of links to a tree's objects under their original names.
    ///
    /// # Errors
    /// Fails with [`StoreError::CorruptObject`] or [`StoreError::MissingObject`] where a file is not what it was, and
    /// where `target` exists or cannot be made.
    pub fn link_folder(&self, _tree: &Digest, _target: &Path, _verify: Verify) -> Result<Tree, StoreError> {
        todo!()
    }

    /// Makes `target`, a new folder of a tree's files, verified, writable, flushed and independent of the store: blocks are
    /// shared where the file system can, and copied where it cannot.
    ///
    /// # Errors
    /// As [`Store::link_folder`].
    pub fn copy_tree_out(&self, _tree: &Digest, _target: &Path) -> Result<Tree, StoreError> {
        todo!()
    }

    /// Removes an object that turned out to be damaged, so that its producer runs again.
    ///
    /// # Errors
    /// Fails where the file cannot be removed; one that is gone already is no error.
    pub fn evict(&self, _object: &Digest) -> Result<(), StoreError> {
        todo!()
    }

    /// The result of a key. A damaged record is removed and counts as none.
    ///
    /// # Errors
    /// Fails where the record exists and cannot be read.
    pub fn result(&self, _key: &Digest) -> Result<Option<ResultRecord>, StoreError> {
        todo!()
    }

    /// Records the result of a key, which is that of the record's own key document.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn record(&self, _key: &Digest, _record: &ResultRecord) -> Result<(), StoreError> {
        todo!()
    }

    /// All results, sorted by key; damaged ones are left out.
    ///
    /// # Errors
    /// Fails where the folder cannot be listed.
    pub fn results(&self) -> Result<Vec<(Digest, ResultRecord)>, StoreError> {
        todo!()
    }

    /// Removes the record of a key; whether there was one.
    ///
    /// # Errors
    /// Fails where the file cannot be removed.
    pub fn forget(&self, _key: &Digest) -> Result<bool, StoreError> {
        todo!()
    }

    /// The folder for the resumable working state of a key, made if it is not there.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn partial(&self, _working_key: &Digest) -> Result<PathBuf, StoreError> {
        todo!()
    }

    /// Takes a lock, waiting for as long as another holds it. A wait that must end early polls [`Store::try_lock`].
    ///
    /// # Errors
    /// Fails where the name is not made of letters, digits, `.`, `_` and `-`, or the file system has no locks.
    pub fn lock(&self, _name: &str) -> Result<Lock, StoreError> {
        todo!()
    }

    /// Takes a lock if nobody holds it.
    ///
    /// # Errors
    /// As [`Store::lock`].
    pub fn try_lock(&self, _name: &str) -> Result<Option<Lock>, StoreError> {
        todo!()
    }
}
