//! Running a plan: one loop that owns all state and is started by messages.
//!
//! [`run`] is the way in. It leaves to others: how a key is made ([`crate::keys`]), how a process is started
//! ([`crate::execute`]), and what is printed (the command line, which observes the events).

mod admission;
mod begin;
pub mod clock;
mod cluster;
mod conclude;
mod devices;
mod enter;
mod error;
pub mod event;
mod executors;
mod fetch;
mod gates;
mod job;
mod memory;
mod outcome;
mod publishing;
mod rebuild;
mod recorder;
mod remote_cache;
mod require;
mod running;
mod scheduler;
mod signals;
mod stages;
mod stopping;
mod timeline;
mod transfers;

pub use enter::run;
pub use error::{MemoryMissing, RunError};
pub use event::{Compared, Conclusion, Counts, RunEvent, WaitsFor};
pub use outcome::{OnFailure, Profiling, RunOptions, RunOutcome, Sharing, StageOutcome};
pub use require::missing_memory;
pub use signals::ExitOnInterrupt;
pub use stages::State;
