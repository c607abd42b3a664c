//! Running a plan: one loop that owns all state and is started by messages.
//!
//! [`run`] is the way in. It leaves to others: how a key is made ([`crate::keys`]), how a process is started
//! ([`crate::execute`]), and what is printed (the command line, which observes the events).

mod begin;
mod checking;
pub mod clock;
mod cluster;
mod conclude;
mod courier;
mod devices;
mod elsewhere;
mod enter;
mod error;
pub mod event;
mod executors;
mod fetch;
mod heal;
mod job;
mod outcome;
mod pinning;
mod priority;
mod promise;
mod publishing;
mod require;
mod room;
mod scheduler;
mod seen_devices;
mod signals;
mod stage_run;
mod state;
mod stopping;
mod timeline;

pub use enter::run;
pub use error::{MemoryMissing, RunError};
pub use event::{Compared, Conclusion, Counts, RunEvent, WaitsFor};
pub use outcome::{OnFailure, Profiling, RunOptions, RunOutcome, Sharing, StageOutcome};
pub use require::missing_memory;
pub use signals::ExitOnInterrupt;
pub use state::State;
