//! The stage kinds and the data code behind them.
//!
//! It leaves to others: scheduling, where artefacts are stored, and the arithmetic of models.

use engine::stage::Registry;

pub mod artifact;
pub mod prompt;
pub mod tokenizer;

/// All stage kinds of this program.
pub fn registry() -> Registry {
    Registry::new()
}
