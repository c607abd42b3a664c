//! Artefacts: folders that stages hand to each other, each with an `artifact.json`.

use std::collections::BTreeMap;

use cache::Digest;
use serde::{Deserialize, Serialize};

/// What was found out about an artefact, for the checks of later stages (rows, tokens, vocabulary size …).
pub type Facts = serde_json::Map<String, serde_json::Value>;

/// What is known about a stage's inputs when it is checked, by `stage.output`; absent while the input has never run.
pub type InputFacts = BTreeMap<String, Facts>;

/// The file that describes an artefact, inside its folder.
pub const ARTIFACT_FILE: &str = "artifact.json";

/// The content of `artifact.json`. It holds no time, no rate, no host and no path.
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

/// An output that a stage declares.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    /// Its name within the stage.
    pub name: String,
    /// Its kind.
    pub kind: String,
}

impl Output {
    /// An output with a name and a kind.
    pub fn new(name: &str, kind: &str) -> Self {
        Self { name: name.to_owned(), kind: kind.to_owned() }
    }
}
