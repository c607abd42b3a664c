//! Pipeline file → plan → graph → schedule → run.
//!
//! It leaves to others: every concrete stage kind, and tensors.

pub mod artifact;
pub mod context;
pub mod error;
pub mod file;
pub mod parameter;
pub mod plan;
pub mod protocol;
pub mod stage;
