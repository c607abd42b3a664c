//! Placeholder.

pub mod checkpoint;
pub mod random;
pub mod sampling;
pub mod schedule;
