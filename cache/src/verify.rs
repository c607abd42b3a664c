//! Checks everything in a store against its digest.

use std::path::PathBuf;

use crate::{Digest, Store, StoreError};

/// What a full check found.
#[derive(Debug, Clone, Default)]
pub struct VerifyReport {
    /// Objects read.
    pub objects: u64,
    /// Their length together.
    pub bytes: u64,
    /// Trees read.
    pub trees: u64,
    /// Results read.
    pub results: u64,
    /// Everything that is wrong, sorted by path.
    pub faults: Vec<Fault>,
}

/// One thing that is wrong in a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An object's content does not have the digest in its name.
    #[error("object {digest} is damaged")]
    CorruptObject {
        /// The digest it should have: [`Store::evict`] takes it.
        digest: Digest,
        /// Where it lies.
        path: PathBuf,
    },
    /// A tree's list is unreadable or does not have the digest in its name.
    #[error("tree {digest} is damaged: {reason}")]
    CorruptTree {
        /// The digest it should have.
        digest: Digest,
        /// Where it lies.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tree names an object that is not there, or not of the right size.
    #[error("`{file}` of tree {tree} is missing: object {digest}")]
    MissingObject {
        /// The tree.
        tree: Digest,
        /// The file's path in the tree.
        file: String,
        /// The object.
        digest: Digest,
    },
    /// A record cannot be read, or does not have the key in its name.
    #[error("record `{}` is damaged", .path.display())]
    CorruptResult {
        /// Where it lies.
        path: PathBuf,
    },
    /// A record names a tree that is not there.
    #[error("output `{output}` of result {key} is missing: tree {tree}")]
    MissingTree {
        /// The result.
        key: Digest,
        /// The output's name.
        output: String,
        /// The tree.
        tree: Digest,
    },
    /// Something that the store did not put there.
    #[error("`{}` does not belong into the store", .path.display())]
    Stranger {
        /// Where it lies.
        path: PathBuf,
    },
}

/// How far a full check is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Bytes read.
    pub bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

impl Store {
    /// Reads every object, tree and record and compares it with its name; changes nothing.
    ///
    /// `progress` is called from several threads, after each object.
    ///
    /// # Errors
    /// Fails where a folder of the store cannot be listed; a file that cannot be read is a fault in the report.
    pub fn verify(&self, _progress: &(dyn Fn(VerifyProgress) + Sync)) -> Result<VerifyReport, StoreError> {
        todo!()
    }
}
