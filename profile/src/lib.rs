//! Where the time of a process goes: spans with what they compute and move, totals of them, and a trace to look at.
//!
//! Knows nothing of stages or tensors. Who does the work says so with a [`Profile`], which is passed along and costs a
//! comparison where nothing is recorded: [`Profile::phase`] for a part of the work, [`Profile::kernel`] for an
//! operation of known size. [`Profile::finish`] gives a [`Recording`], whose [`Summary`] has a row per phase and per
//! kernel, and whose trace is in the Trace Event Format that Perfetto and Chrome open.

#![forbid(unsafe_code)]

mod log;
mod recorder;
mod summary;
mod trace;
mod work;

pub use recorder::{Profile, Recording, Span};
pub use summary::{KernelRow, PhaseRow, SUMMARY_VERSION, Summary};
pub use trace::{Process, TraceEvent, TraceWriter, trace_lines};
pub use work::{Limits, Rate, Work};
