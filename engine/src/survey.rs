//! What a stage finds out of its sources before anything runs.
//!
//! A stage kind says what is certain of its outputs ([`crate::stage::Stage::survey`]); what it merely expects is told by its
//! preflight. [`crate::surveyor`] goes through a plan with it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::artifact::Facts;
use crate::file::problem::Problem;

/// The most that is read of one file, in bytes.
pub const MOST_READ: u64 = 4 << 20;

/// What a stage finds out ahead.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Survey {
    /// Facts that its outputs will have, whatever happens, by output. There may be others.
    pub outputs: BTreeMap<String, Facts>,
    /// What its sources show to be wrong.
    pub problems: Vec<Problem>,
}

impl Survey {
    /// Says what one fact of an output will be.
    pub fn fact(&mut self, output: &str, fact: &str, value: impl Into<serde_json::Value>) {
        self.outputs.entry(output.to_owned()).or_default().insert(fact.to_owned(), value.into());
    }

    /// Takes over facts of an input that the output will have too.
    pub fn pass(&mut self, output: &str, facts: Option<&Facts>, names: &[&str]) {
        for name in names {
            if let Some(value) = facts.and_then(|facts| facts.get(*name)) {
                self.fact(output, name, value.clone());
            }
        }
    }
}

/// A file on this machine that a stage reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalFile {
    /// Where it lies.
    pub path: PathBuf,
    /// Its path below the folder or pattern that was asked for; of a single file, its name.
    pub relative: String,
    /// What messages call it: its path as seen from the pipeline file, where it lies below that.
    pub name: String,
}

/// The files on this machine that a stage reads, by role.
#[derive(Debug, Clone, Default)]
pub struct LocalFiles(pub(crate) BTreeMap<String, Vec<LocalFile>>);

impl LocalFiles {
    /// The files of a role, in order.
    pub fn files(&self, role: &str) -> &[LocalFile] {
        self.0.get(role).map_or(&[], Vec::as_slice)
    }
}
