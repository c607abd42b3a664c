//! What every executor does: start a stage's process, pass on what it says, stop it when told.

use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use devices::CpuList;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::UnboundedSender;

use super::submission::ClusterJob;
use crate::error::Failure;
use crate::protocol::WorkerEvent;

/// The argument that makes this program a stage process; the job file follows it.
pub const STAGE_ARGUMENT: &str = "__stage";

/// A process to start.
#[derive(Debug)]
pub struct Launch {
    /// The run's number for the stage; comes back in every message.
    pub stage: usize,
    /// The job file.
    pub job: PathBuf,
    /// Where its standard error goes.
    pub log: PathBuf,
    /// The store that it works with.
    pub store: PathBuf,
    /// Descriptors (locks) that stay open in the process, so that they are free when it is gone and not before.
    pub inherit: Vec<RawFd>,
    /// What a cluster has to know; without meaning where the process runs here.
    pub cluster: Option<Box<ClusterJob>>,
    /// Variables beside those of this process, such as those that name the devices it is to see.
    pub env: Vec<(&'static str, String)>,
    /// CPUs that it is to stay on; empty where it may use those of this process.
    pub cores: CpuList,
}

/// What an executor tells the run, from threads of its own.
#[derive(Debug)]
pub enum Message {
    /// The process said something.
    Said {
        /// The stage's number.
        stage: usize,
        event: WorkerEvent,
    },
    /// How the job of a cluster stands that the process is to run in.
    Queued {
        /// The stage's number.
        stage: usize,
        /// The job's number, once it has one.
        job: Option<String>,
        news: JobEvent,
    },
    /// The job of an earlier run that was to be heard to its end is no more, and gave no result; nothing follows.
    Gone {
        /// The stage's number.
        stage: usize,
        /// What became of it.
        because: String,
    },
    /// The process and everything it started in its group is gone; nothing follows.
    Exited {
        /// The stage's number.
        stage: usize,
        /// How it ended.
        exit: ProcessExit,
    },
}

/// A process's last status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// It exited with a code.
    Code(i32),
    /// A signal ended it, such as `SIGKILL`.
    Signal(String),
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq)]
pub struct ProcessExit {
    /// Its status.
    pub ending: Ending,
    /// How long it ran.
    pub ran: Duration,
    /// The most memory that it held at once, by the operating system's count.
    pub peak_memory_bytes: u64,
    /// The CPU time that it took, on all of them together.
    pub cpu: Duration,
    /// What it died of, where whoever started it knows that better than the process and the engine.
    pub verdict: Option<Failure>,
    /// The machine that it ran on, where that is another.
    pub host: Option<String>,
}

/// What is new of a job of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum JobEvent {
    /// The cluster has it.
    Submitted,
    /// An earlier run submitted it, and this one waits for its end.
    Adopted,
    Waiting {
        /// For what, in the cluster's words: `Resources`.
        reason: String,
        /// What that means, where its name does not say it.
        meaning: String,
    },
    /// It has begun.
    Running {
        /// On which nodes, in the cluster's words: `n[1-2]`.
        nodes: String,
    },
    /// The cluster put it back into its queue, and starts it again.
    Requeued {
        /// Why, in the cluster's words.
        reason: String,
    },
}

/// How to stop a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Ask: it may save its working state first.
    Ask,
    /// End it now, with everything in its group.
    Kill,
}

/// A process that cannot be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} `{path}`")]
pub struct StartError {
    /// What was tried.
    pub action: &'static str,
    /// What it was tried on.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

/// A way to run stage processes.
pub trait Executor {
    /// Starts a process; `messages` gets what it says and, last, its end.
    ///
    /// # Errors
    /// Fails where the process cannot be started; no message follows then.
    fn start(&self, launch: &Launch, messages: UnboundedSender<Message>) -> Result<Box<dyn Process>, StartError>;
}

/// A process that was started.
pub trait Process {
    /// Stops it; one that has ended already is left alone.
    fn stop(&self, how: Stop);

    /// Its id on this machine, where it runs here.
    fn id(&self) -> Option<u32>;
}
