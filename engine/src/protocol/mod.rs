//! The worker protocol: a job file in, JSON lines on standard output out, results in the folder the job names.
//!
//! Its JSON Schema, for workers in other languages, is `engine/protocol.schema.json`; the tests here hold the two
//! together.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cache::{Digest, OutputRecord};
use serde::{Deserialize, Serialize};

use crate::artifact::{Facts, Output};
use crate::device::DeviceGrant;
use crate::error::Failure;
use crate::pin::Pinned;

/// Version of this protocol.
pub const PROTOCOL: u32 = 1;

/// What a stage process is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Always [`PROTOCOL`].
    pub protocol: u32,
    /// The stage's id.
    pub stage: String,
    /// The stage kind.
    pub kind: String,
    /// The parameters, after variables and overrides.
    pub parameters: serde_json::Value,
    /// Inputs by `stage.output`.
    pub inputs: BTreeMap<String, InputGrant>,
    /// Source files by role.
    pub files: BTreeMap<String, Vec<FileGrant>>,
    /// What mutable references are pinned to, by `kind:name@revision`.
    pub pins: BTreeMap<String, Pinned>,
    /// Whether the stage may go out for what it reads.
    #[serde(default)]
    pub network: Network,
    /// The outputs to make.
    pub outputs: Vec<Output>,
    /// The store's folder.
    pub store: PathBuf,
    /// A private folder for links to the inputs; it goes when the stage ends.
    pub inputs_folder: PathBuf,
    /// A private folder on the store's file system for outputs in the making; it goes when the stage ends.
    pub staging: PathBuf,
    /// The stage's resumable working state; it stays until the cache is collected.
    pub working: PathBuf,
    /// The stage's folder in this run, for what a person may want to look at and no result may hold: logs, curves with
    /// times.
    pub run_folder: PathBuf,
    /// The key of the result.
    pub key: Digest,
    /// How many threads to use.
    pub threads: usize,
    /// What it has to compute on.
    #[serde(default)]
    pub devices: DeviceGrant,
    /// Where the time goes is to be recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProfileRequest>,
}

/// What a stage's trace needs to be part of the run's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProfileRequest {
    /// The moment that times count from, in microseconds since 1970.
    pub origin_unix_micros: u64,
    /// The number of the stage's process in the trace.
    pub process: u32,
}

/// Whether stages may go out for what they read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// They may.
    #[default]
    Online,
    /// `--offline`: what is not on this machine is an error.
    Offline,
}

/// An input of a job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct InputGrant {
    /// The artefact's kind.
    pub kind: String,
    /// The stored folder.
    pub tree: Digest,
    pub identity: Digest,
    /// Its facts. A version that stored them among the artefact's files did not write them here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<Facts>,
}

/// A source file of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileGrant {
    /// Where it is.
    pub path: PathBuf,
    /// Its path below the folder or glob's fixed part that was asked for; the file name for a single file.
    pub relative: String,
    /// Its content when the run was planned.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
    /// How it was asked for. A version that knew it from the path did not write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named: Option<Named>,
}

/// How source files were asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Named {
    /// One by one: readers may look at its extension only.
    Single,
    /// As a folder or a glob: readers may look at the path below it.
    Below,
}

/// What a stage process says, one JSON object per line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum WorkerEvent {
    /// The process is up.
    Started {
        /// Always [`PROTOCOL`].
        protocol: u32,
    },
    /// How far it is.
    Progress {
        /// What is counted: `rows`, `steps`, `bytes`.
        unit: String,
        /// Done so far.
        done: u64,
        /// In all, where known.
        total: Option<u64>,
        /// A few words or figures for a person: `loss 2.31 · 512 trained tokens/s`.
        note: Option<String>,
    },
    /// Named figures at a point of the work (a training step).
    Metrics {
        /// The figures; `step` among them for training.
        values: serde_json::Map<String, serde_json::Value>,
    },
    /// Working state was saved.
    Checkpoint {
        /// The step it holds.
        step: u64,
    },
    /// Something the user should know.
    Warning {
        /// A lower-case fragment.
        message: String,
    },
    /// Something worth knowing that asks for nothing, such as the step that a training resumes from.
    Note {
        /// A lower-case fragment.
        message: String,
    },
    /// A piece of an answer as it grows, for a person who waits for it. The stage's next report holds the whole answer.
    Text {
        /// What comes next of it.
        text: String,
    },
    /// Words for the screen that belong to the result (a sample, a table), several lines perhaps.
    Report {
        text: String,
        /// Whether a person sees it without asking for more.
        #[serde(default)]
        level: ReportLevel,
    },
    /// All outputs are stored.
    Finished {
        /// By output name.
        outputs: BTreeMap<String, OutputRecord>,
        /// How the result came about: backend, kernel set, threads. Not part of any key.
        how: serde_json::Map<String, serde_json::Value>,
    },
    /// The stage failed.
    Failed(Failure),
}

/// How much a report matters to a person who runs a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReportLevel {
    /// What the run is for: a table of metrics, completions.
    #[default]
    Result,
    /// How a result came about: counts, conventions, speed. Printed with `--verbose`.
    Detail,
}

#[cfg(test)]
mod tests;
