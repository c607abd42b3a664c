//! Running a plan: one loop that owns all state and is started by messages.

pub mod clock;
pub mod event;
