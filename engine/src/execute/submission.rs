//! What passes between an engine and the keeper of a job that it submitted to a cluster, by files in a folder that both
//! see.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cache::atomic::write_atomically;
use cache::{Digest, KeyDocument, StoreError};
use devices::DeviceKind;
use serde::{Deserialize, Serialize};

use super::executor::Ending;
use super::slurm::record::JobRecord;
use crate::error::Failure;
use crate::executor::SlurmSettings;

/// The job of the stage's process, before the keeper gives it folders on its node.
pub const JOB_FILE: &str = "job.json";

/// The rest of what the keeper has to know.
pub const SUBMISSION_FILE: &str = "submission.json";

/// What the stage's process said, a line each.
pub const EVENTS_FILE: &str = "events.jsonl";

/// How it ended.
pub const EXIT_FILE: &str = "exit.json";

/// Writes a value as a JSON file that other machines, which may read it at any moment, find whole or not at all.
///
/// # Errors
/// Fails with the error of the operating system; the caller names the path.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    write_atomically(path, &serde_json::to_vec_pretty(value)?).map_err(StoreError::into_io)
}

/// What an engine asks of a cluster for one process.
#[derive(Debug, Clone)]
pub struct ClusterJob {
    /// The job's name, which no other submission has.
    pub name: String,
    /// Which submission of the stage in its run this is, from 1.
    pub submission: u32,
    pub run: String,
    /// The key of the result.
    pub key: Digest,
    /// The key of the working state.
    pub working: Digest,
    /// What its result is recorded under; without it nobody records it but the engine.
    pub result: Option<ResultOf>,
    /// Whether it is made although there may be a result.
    pub again: bool,
    /// Where its process runs: the engine's own folder.
    pub working_folder: PathBuf,
    /// CPUs; `None` leaves it to the cluster.
    pub threads: Option<usize>,
    /// Bytes of memory on each node.
    pub memory: Option<u64>,
    /// Devices on each node.
    pub devices: Option<(DeviceKind, u32)>,
    pub nodes: u32,
    /// How long the process may take, once it has begun.
    pub timeout: Option<Duration>,
    /// How long it has to save what it has when it is told to stop.
    pub grace: Duration,
    /// What the file says of the cluster.
    pub settings: SlurmSettings,
    /// The job that makes the result already.
    pub adopt: Option<JobRecord>,
}

impl ClusterJob {
    /// One that asks for nothing but a place on one node.
    pub fn new(name: impl Into<String>, key: Digest, working: Digest) -> Self {
        Self {
            name: name.into(),
            submission: 1,
            run: String::new(),
            key,
            working,
            result: None,
            again: false,
            working_folder: std::env::current_dir().unwrap_or_else(|_| "/".into()),
            threads: None,
            memory: None,
            devices: None,
            nodes: 1,
            timeout: None,
            grace: Duration::from_secs(10),
            settings: SlurmSettings::default(),
            adopt: None,
        }
    }
}

/// What a result is recorded under.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ResultOf {
    /// All that it depends on.
    pub document: KeyDocument,
    /// The stage kind.
    pub kind: String,
}

/// What the keeper of a job is told.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Submission {
    pub run: String,
    /// The key of the result.
    pub key: Digest,
    /// The key of the working state.
    pub working: Digest,
    /// What its result is recorded under.
    pub result: Option<ResultOf>,
    /// Whether it is made although there may be a result.
    pub again: bool,
    /// Whether the cluster says how many threads there are.
    pub threads_of_cluster: bool,
    /// Standard error of the stage's process.
    pub log: PathBuf,
    /// How long the process may take, in seconds.
    pub timeout_seconds: Option<f64>,
    /// How long it has to save what it has, in seconds.
    pub grace_seconds: f64,
}

/// What the keeper leaves: how the stage's process ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Left {
    pub job: String,
    /// The machine that it ran on.
    pub host: String,
    /// How often the cluster had put the job back into its queue before.
    pub restart: u32,
    /// How the process ended.
    pub ending: Ending,
    /// How long it ran.
    pub seconds: f64,
    /// The most memory that it held at once.
    pub peak_memory_bytes: u64,
    /// The CPU time that it took.
    pub cpu_seconds: f64,
    /// Why it was told to stop, if it was.
    pub stopped: Option<Stopped>,
    /// What it died of, where it said no word.
    pub verdict: Option<Failure>,
}

/// Why a keeper told a stage to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stopped {
    /// It got a signal: of an engine, of somebody else, or of the cluster before the time is over.
    Signal,
    /// The stage's own time was over.
    Timeout,
}

/// The lock that a keeper holds for as long as its job has processes.
pub fn job_lock(key: &Digest) -> String {
    format!("job-{key}")
}
