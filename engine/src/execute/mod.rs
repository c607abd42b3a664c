//! Executors: how a stage's process is started, heard and stopped.
//!
//! They know a job file and a process, and nothing of plans, keys or caches; deciding what runs and what its end means is the
//! [`crate::run`] loop's.

pub mod death_pipe;
pub mod executor;
pub mod local;
pub(crate) mod private_paths;
pub mod ranks;
mod recording;
pub mod stage_process;

pub use executor::{Ending, Executor, Exit, Launch, Message, Process, StartError, Stop};
pub use local::Local;
pub use ranks::{Heard, Ranks, RunningRanks};
