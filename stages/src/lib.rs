//! The stage kinds and the data code behind them.
//!
//! `kinds` holds a folder per stage kind; what several kinds share is beside it: the data they hand to each other
//! (`data`), what they compute with (`compute`), metrics, the Hub client, and what the command line shows of artefacts
//! (`view`). It leaves to others: scheduling, where artefacts are stored, and the arithmetic of models.

pub mod compute;
pub mod data;
mod forecast;
pub mod hub;
pub mod kinds;
pub mod metrics;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod smoke;
pub mod tasks;
pub mod view;

pub use kinds::registry;
