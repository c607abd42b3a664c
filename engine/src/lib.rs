//! Pipeline file → plan → graph → schedule → run.
//!
//! It leaves to others: every concrete stage kind, and tensors.

// `#[derive(Parameters)]` names this crate `::engine`, in its own tests too.
extern crate self as engine;

pub mod artifact;
pub mod change;
pub mod checks;
pub mod context;
pub mod device;
pub mod error;
pub mod execute;
pub mod executor;
pub mod explain;
pub mod figure;
pub mod file;
pub mod forecast;
pub mod history;
pub mod home;
pub mod keys;
pub mod limits;
pub mod local_files;
pub mod lock_file;
pub mod memory;
pub mod metadata;
pub mod parameter;
pub mod pin;
pub mod plan;
#[cfg(any(test, fuzzing))]
pub mod properties;
pub mod protocol;
pub mod publish;
pub mod remote;
pub mod run;
pub mod schema;
pub mod stage;
pub mod suggest;
pub mod test_bench;
pub mod track;
pub mod visible;
