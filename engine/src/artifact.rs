//! Artefacts: folders that stages hand to each other, each with a description.
//!
//! The description is no file of the artefact: it is part of the result's record, and a stage finds it beside the
//! folder that it reads. Versions that stored it among the artefact's files, as `artifact.json`, left folders that are
//! still in stores: here alone is known how to tell such a file from one of the user.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use cache::digest::open_regular;
use cache::{Digest, Store, StoreError, Tree};
use serde::{Deserialize, Serialize};

use crate::error::{Cause, OrFail, StageError};

/// What was found out about an artefact, for the checks of later stages (rows, tokens, vocabulary size …).
pub type Facts = serde_json::Map<String, serde_json::Value>;

/// What is known about a stage's inputs when it is checked, by `stage.output`; absent while the input has never run.
pub type InputFacts = BTreeMap<String, Facts>;

/// The file that described an artefact inside its folder, of versions that stored one.
pub const ARTIFACT_FILE: &str = "artifact.json";

/// Version of the description's form.
pub const ARTIFACT_FORMAT: u32 = 1;

/// The longest file that is taken for a description.
const LONGEST: u64 = 64 << 20;

/// What an artefact is. It holds no time, no rate, no host and no path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// Version of the artefact's form on disk.
    pub format: u32,
    /// The kind, such as `rows`.
    pub kind: String,
    /// What enters the keys of the stages that read it.
    pub identity: Digest,
    /// Facts for later checks.
    pub facts: Facts,
}

impl Description {
    /// A description in the present form.
    pub fn new(kind: impl Into<String>, identity: Digest, facts: Facts) -> Self {
        Self { format: ARTIFACT_FORMAT, kind: kind.into(), identity, facts }
    }

    /// Writes it beside an artefact's folder.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn write_beside(&self, folder: &Path) -> Result<(), StageError> {
        let path = description_file(folder);
        let mut text = serde_json::to_string_pretty(self).expect("a description is plain data");
        text.push('\n');
        fs::write(&path, text).or_fail(Cause::Machine, || format!("cannot write `{}`", path.display()))
    }

    /// Reads the one beside an artefact's folder.
    ///
    /// # Errors
    /// Fails where there is none.
    pub fn read_beside(folder: &Path) -> Result<Self, StageError> {
        let path = description_file(folder);
        let text = fs::read(&path).or_fail(Cause::Internal, || format!("cannot read `{}`", path.display()))?;
        serde_json::from_slice(&text).or_fail(Cause::Internal, || format!("`{}` is no description", path.display()))
    }
}

/// Where the description of an artefact that a stage reads is: beside its folder, under the folder's name with
/// `.artifact.json` behind it.
pub fn description_file(folder: &Path) -> PathBuf {
    let mut name = folder.file_name().unwrap_or_default().to_owned();
    name.push(".artifact.json");
    folder.with_file_name(name)
}

/// The files of a stored artefact: of one that was stored together with its description, without that.
///
/// # Errors
/// Fails where the list of the files is gone or damaged.
pub fn stored_files(store: &Store, tree: &Digest, identity: &Digest) -> Result<Tree, StoreError> {
    let tree = store.tree(tree)?;
    let described = described_among(store, &tree, |described| described == identity).is_some();
    Ok(if described { tree.without(ARTIFACT_FILE) } else { tree })
}

/// The description that was stored among the files of an artefact; `None` where there is none, as in all that this
/// version stores.
///
/// A description holds the identity of the artefact that it is part of. No file of a user does: an identity covers all
/// of the user's files.
pub fn described_among(store: &Store, tree: &Tree, is_identity: impl Fn(&Digest) -> bool) -> Option<Description> {
    let file = tree.get(ARTIFACT_FILE).filter(|file| file.size <= LONGEST)?;
    let mut text = Vec::new();
    open_regular(store.place(&file.digest).path()).ok()?.take(LONGEST).read_to_end(&mut text).ok()?;
    // One that is damaged is left for who reads the folder: it makes that known.
    let sound = Digest::of(&text) == file.digest;
    let description = sound.then(|| serde_json::from_slice::<Description>(&text).ok())??;
    is_identity(&description.identity).then_some(description)
}

/// Whether a file is a description that a version stored among an artefact's files, and so no file of a user.
pub fn is_description(path: &Path) -> bool {
    let mut text = Vec::new();
    let read = open_regular(path).ok().and_then(|file| file.take(LONGEST).read_to_end(&mut text).ok());
    read.is_some() && serde_json::from_slice::<Description>(&text).is_ok()
}

/// An output that a stage declares.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    /// Its name within the stage.
    pub name: String,
    pub kind: String,
}

impl Output {
    /// An output with a name and a kind.
    pub fn new(name: &str, kind: &str) -> Self {
        Self { name: name.to_owned(), kind: kind.to_owned() }
    }
}
