//! What every executor does: start a stage's process, pass on what it says, stop it when told.

use std::io;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;

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
    /// Descriptors (locks) that stay open in the process, so that they are free when it is gone and not before.
    pub inherit: Vec<RawFd>,
}

/// What an executor tells the run, from threads of its own.
#[derive(Debug)]
pub enum Message {
    /// The process said something.
    Said {
        /// The stage's number.
        stage: usize,
        /// What it said.
        event: WorkerEvent,
    },
    /// The process and everything it started in its group is gone; nothing follows.
    Exited {
        /// The stage's number.
        stage: usize,
        /// How it ended.
        exit: Exit,
    },
}

/// How a process ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Exit {
    /// Its status.
    pub ending: Ending,
    /// How long it ran.
    pub ran: Duration,
    /// The most memory that it held at once, by the operating system's count.
    pub peak_memory_bytes: u64,
    /// The time of processors that it took, on all of them together.
    pub cpu: Duration,
}

/// A process's last status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// It exited with a code.
    Code(i32),
    /// A signal ended it, such as `SIGKILL`.
    Signal(String),
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
