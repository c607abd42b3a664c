//! Executors: how a stage's process is started, heard and stopped.
//!
//! They know a job file and a process, and nothing of plans, keys or caches; deciding what runs and what its end means
//! is the [`crate::run`] loop's.

pub(crate) mod crash;
pub mod death_pipe;
pub mod executor;
mod inherited;
pub mod keeper;
pub mod local;
pub mod member;
pub(crate) mod private_paths;
pub mod ranks;
pub mod slurm;
mod spawn;
pub mod stage_process;
pub mod stragglers;
pub mod submission;
pub mod watcher;

pub use executor::{Ending, Executor, JobEvent, Launch, Message, Process, ProcessExit, StartError, Stop};
pub use local::Local;
pub use member::{Member, MemberEnd, Membership};
pub use ranks::{Follower, RankAnswer, RankEvent, Ranks, RunningRanks};
pub use slurm::Slurm;
