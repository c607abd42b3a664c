//! What is in a store, and how much room it takes.

use crate::{Digest, Store, StoreError};

/// What is in a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// The results, sorted by kind and key.
    pub results: Vec<ListedResult>,
    /// Objects, each counted once.
    pub objects: u64,
    /// Their length together.
    pub object_bytes: u64,
    /// Folders of resumable working state.
    pub partials: u64,
    /// Their length together.
    pub partial_bytes: u64,
}

/// One result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedResult {
    /// Its key.
    pub key: Digest,
    /// The kind of stage that made it.
    pub kind: String,
    /// Its outputs, sorted by name.
    pub outputs: Vec<ListedOutput>,
    /// The length of all outputs together; files shared with other results count in each.
    pub bytes: u64,
}

/// One output of a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedOutput {
    /// Its name.
    pub name: String,
    /// The artefact's kind.
    pub kind: String,
    /// The stored folder.
    pub tree: Digest,
    /// Its number of files.
    pub files: usize,
    /// Their length together.
    pub bytes: u64,
    /// Whether every file is there with its right size.
    pub complete: bool,
}

impl Store {
    /// What is in the store, and how much room it takes.
    ///
    /// # Errors
    /// Fails where a folder of the store cannot be listed.
    pub fn list(&self) -> Result<Listing, StoreError> {
        todo!()
    }
}
