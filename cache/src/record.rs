//! Records of results: what a key led to, and how that came about.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Digest, KeyDocument};

/// Version of the record's form on disk.
pub const RECORD_VERSION: u32 = 1;

/// What a key led to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResultRecord {
    /// Always [`RECORD_VERSION`].
    pub version: u32,
    /// Everything the result depends on; its digest is the record's name.
    pub key: KeyDocument,
    /// The kind of stage that made it.
    pub kind: String,
    /// The outputs by name.
    pub outputs: BTreeMap<String, OutputRecord>,
    /// How it came about (backend, kernel set, threads); part of no key.
    pub how: serde_json::Map<String, serde_json::Value>,
}

impl ResultRecord {
    /// A record in the present form.
    pub fn new(
        key: KeyDocument,
        kind: impl Into<String>,
        outputs: BTreeMap<String, OutputRecord>,
        how: serde_json::Map<String, serde_json::Value>,
    ) -> Self {
        Self { version: RECORD_VERSION, key, kind: kind.into(), outputs, how }
    }
}

/// One output of a result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputRecord {
    /// The artefact's kind.
    pub kind: String,
    /// The stored folder.
    pub tree: Digest,
    /// What enters downstream keys.
    pub identity: Digest,
    /// Facts for later checks.
    pub facts: serde_json::Map<String, serde_json::Value>,
}
