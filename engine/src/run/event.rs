//! What happens in a run, as it is told to the user and kept in `events.jsonl`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cache::{Digest, OutputRecord};
use devices::DeviceKind;
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::device::DeviceGrant;
use crate::error::{Cause, Failure};
use crate::execute::JobEvent;
use crate::executor::ExecutorKind;
use crate::file::problem::Problem;
use crate::protocol::WorkerEvent;

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum RunEvent {
    /// The run began.
    RunStarted {
        run: String,
        /// The pipeline's name.
        pipeline: String,
        /// The stages, in the order of the plan.
        stages: Vec<String>,
    },
    /// Finding out what mutable references are currently takes a while. Told before the run begins, so that no record
    /// has it.
    Pinning {
        /// The names of the pins.
        pins: Vec<String>,
    },
    /// What a user should hear of the file, found by the checks of its data flow. Told before the run begins, so that
    /// no record has it.
    #[serde(skip)]
    Checked { warnings: Vec<Problem> },
    /// The result was there already.
    StageCached {
        stage: String,
        /// The key of its result.
        key: Digest,
        /// Set where its files are in a shared cache alone, and nothing in this run reads them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        remote: Option<String>,
    },
    /// The files of a result are being fetched from the shared cache.
    ResultFetching {
        stage: String,
        /// The shared cache.
        remote: String,
    },
    /// The files of a result were fetched from the shared cache, each compared with its digest.
    ResultFetched {
        stage: String,
        /// The key of its result.
        key: Digest,
        /// The shared cache.
        remote: String,
        /// Files that were not here.
        files: u64,
        /// Their length together.
        bytes: u64,
        /// How long it took.
        seconds: f64,
    },
    /// What the shared cache has for a stage is not what it should be, so the stage is run.
    ResultRefused {
        stage: String,
        /// The shared cache.
        remote: String,
        /// Why, among the event's own fields.
        #[serde(flatten, deserialize_with = "of_shared_cache")]
        failure: Failure,
    },
    /// A result was sent to the shared cache, or was there already.
    ResultSent {
        /// The stage, where it is one of this run.
        stage: Option<String>,
        /// The key of its result.
        key: Digest,
        /// The shared cache.
        remote: String,
        /// Files that were not there.
        files: u64,
        /// Their length together.
        bytes: u64,
        /// How long it took.
        seconds: f64,
    },
    /// A result could not be sent to the shared cache: it is not whole here.
    ResultNotSent {
        /// The stage, where it is one of this run.
        stage: Option<String>,
        /// The key of its result.
        key: Digest,
        /// Why, among the event's own fields.
        #[serde(flatten, deserialize_with = "of_shared_cache")]
        failure: Failure,
    },
    /// The shared cache cannot be used; the run continues without it.
    RemoteFailed {
        /// The shared cache.
        remote: String,
        /// Why, among the event's own fields.
        #[serde(flatten, deserialize_with = "of_shared_cache")]
        failure: Failure,
    },
    /// The stage's process was started.
    StageStarted {
        stage: String,
        /// The key of the result that it makes.
        key: Digest,
        /// Why it runs, in the words of [`crate::explain`].
        why: Vec<String>,
        /// 1 for the first try.
        attempt: u32,
        /// The threads that it may use.
        threads: usize,
        /// What it computes on; absent in records of earlier versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        devices: Option<DeviceGrant>,
        /// Where in the log what this attempt prints begins, in bytes.
        #[serde(default)]
        log_from: u64,
        /// Where its process runs.
        #[serde(default)]
        executor: ExecutorKind,
    },
    /// How the job stands that a stage runs in on a cluster.
    StageJob {
        stage: String,
        /// The job's number, once it has one.
        job: Option<String>,
        news: JobEvent,
    },
    /// The stage could run, and has to wait. Told again when it waits for something else.
    StageWaiting {
        stage: String,
        #[serde(default)]
        waits_for: WaitsFor,
    },
    /// The stage's process said something.
    Worker { stage: String, said: WorkerEvent },
    /// The stage's result is in the store.
    StageDone {
        stage: String,
        /// The key of its result.
        key: Digest,
        /// How long the process ran.
        seconds: f64,
        /// The most memory that the process held at once, by the operating system's count.
        peak_memory_bytes: u64,
        /// What it made.
        outputs: BTreeMap<String, OutputRecord>,
        /// How that compares with the result before, where it was made again although there was one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        compared: Option<Compared>,
    },
    StageFailed {
        stage: String,
        /// Why, among the event's own fields.
        #[serde(flatten)]
        failure: Failure,
        /// What the process wrote on standard error.
        log: PathBuf,
        /// How long the process ran.
        seconds: f64,
        /// Set when the stage will be tried again, to the seconds until then.
        retry_in_seconds: Option<f64>,
        /// What is changed for that try, where it ran out of memory: `micro_batch_size 8 → 4, …`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_with: Option<String>,
    },
    /// A stored object was damaged; it was removed and the stages that made it run again.
    #[serde(rename = "stage_healing")]
    StageRebuilding {
        /// The stage that met the damage.
        stage: String,
        /// The damaged object.
        object: Option<Digest>,
        /// The stages that run again.
        producers: Vec<String>,
    },
    /// The stage was not run.
    StageSkipped {
        stage: String,
        /// Why, as a lower-case fragment.
        because: String,
        /// Set where the run was stopped, and not where another stage failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<Cause>,
    },
    /// A figure was compared with what the file asks of it before anything is published.
    GateJudged {
        /// What the file asks, in words.
        gate: String,
        holds: bool,
        /// The figure, where there is one.
        value: Option<f64>,
        /// What it was compared with, margin included.
        bound: Option<f64>,
        /// What was found, in words.
        because: String,
    },
    /// An output was copied out of the store, or was already in place.
    Published {
        stage: String,
        output: String,
        /// Where it is.
        path: PathBuf,
        /// Whether anything had to be written.
        written: bool,
    },
    /// An output could not be copied out of the store.
    PublishFailed {
        stage: String,
        output: String,
        /// Where it should lie.
        path: PathBuf,
        /// Why, among the event's own fields.
        #[serde(flatten)]
        failure: Failure,
    },
    /// The run ended.
    RunFinished {
        conclusion: Conclusion,
        /// How many stages ended in which way.
        counts: Counts,
        /// How long it took.
        seconds: f64,
    },
}

/// How a result that was made again compares with the one before.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub enum Compared {
    /// Each output has the identity that it had.
    Equal,
    /// Some have not.
    Differs {
        /// Their names.
        outputs: Vec<String>,
    },
}

/// What a stage waits for that could run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum WaitsFor {
    /// Another run is making the same result.
    AnotherRun {
        /// Its processes, in words, where they are of this machine.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        held_by: Vec<String>,
    },
    /// Another stage of this run makes the same result, or has the same working state.
    AnotherStage {
        /// Its id.
        other: String,
    },
    /// As many stages run as may run at once.
    Jobs {
        /// How many may.
        most: usize,
    },
    /// Others use the threads.
    Threads {
        wanted: usize,
        /// How many are not in use.
        free: usize,
    },
    /// Others hold the memory, of this run or not.
    Memory {
        wanted_bytes: u64,
        /// What is neither held nor promised to a stage that runs.
        free_bytes: u64,
        /// Whether its kind estimates what it wants, and the file does not say it.
        #[serde(default)]
        estimated: bool,
    },
    /// Others have the devices, of this run or not.
    Devices {
        /// Their kind.
        device: DeviceKind,
        wanted: usize,
        /// How many of them are free, and have the memory.
        free: usize,
        /// Who has the others, in words, as far as that is known.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        held_by: Vec<String>,
        /// Set where nobody has leased them and it is their memory that is in use: what each is to have free, 0 where
        /// half of it would do.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        wanted_bytes: Option<u64>,
    },
    /// A job of a cluster waits in its queue.
    Queue {
        /// Its number, once it has one.
        job: Option<String>,
        /// For what, in the cluster's words: `Resources`.
        reason: String,
        /// What that means, where its name does not say it.
        meaning: String,
    },
    /// Others have taken the slots.
    Slots {
        /// Their name.
        name: String,
        wanted: u32,
        /// How many are not taken.
        free: u32,
    },
}

impl Default for WaitsFor {
    /// What records that do not say it meant.
    fn default() -> Self {
        Self::AnotherRun { held_by: Vec::new() }
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Conclusion {
    /// Every stage has its result and everything is published.
    Succeeded,
    /// A stage failed, a gate does not hold, or a result could not be published.
    Failed,
    /// The user stopped it.
    Interrupted,
}

/// How many stages ended in which way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Counts {
    /// Run to their end.
    pub done: usize,
    /// Taken from the store.
    pub cached: usize,
    pub failed: usize,
    /// Not run, since another failed or the user stopped the run.
    pub skipped: usize,
}

/// Reads a failure of the shared cache, of which earlier versions recorded no cause.
fn of_shared_cache<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Failure, D::Error> {
    #[derive(Deserialize)]
    struct Recorded {
        cause: Option<Cause>,
        messages: Vec<String>,
        help: Option<String>,
    }
    let Recorded { cause, messages, help } = Recorded::deserialize(deserializer)?;
    Ok(Failure { cause: cause.unwrap_or(Cause::Network), messages, help, object: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_earlier_versions_recorded_of_a_shared_cache_is_read() {
        let line = r#"{ "event": "result_not_sent", "stage": "rows", "key": "KEY", "messages": ["not whole"] }"#;
        let line = line.replace("KEY", &Digest::of(b"").to_string());
        let RunEvent::ResultNotSent { failure, .. } = serde_json::from_str(&line).expect("an event") else {
            panic!("another event")
        };
        assert_eq!((failure.cause, failure.messages), (Cause::Network, vec!["not whole".to_owned()]));

        let failure = Failure::new(Cause::DiskFull, vec!["no room".to_owned()]);
        let told = RunEvent::RemoteFailed { remote: "s3://bucket".to_owned(), failure };
        let read: RunEvent = serde_json::from_value(serde_json::to_value(&told).expect("JSON")).expect("an event");
        assert_eq!(read, told);
    }
}
