//! Garbage collection: makes room by removing results that are wanted least, and what no result holds.
//!
//! `policy` says which results may go and in which order; `collect` removes them beside whoever works with the store
//! ([`crate::in_use`] has the rules). Who knows the history of runs names the results to keep.

mod collect;
mod policy;

pub use collect::{Collected, Removal, RemovedPartial, RemovedResult};
pub use policy::{Because, Policy, Unpinned};
