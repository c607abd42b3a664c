//! The stage kinds and the data code behind them.
//!
//! It leaves to others: scheduling, where artefacts are stored, and the arithmetic of models.

use engine::stage::Registry;

pub mod adapter;
pub mod artifact;
pub mod backend;
pub mod bleu;
pub mod checkpoint;
pub mod command;
pub mod dataset;
pub mod difference;
pub mod download;
pub mod evaluate;
pub mod generate;
pub mod hub;
pub mod inference;
mod jinja;
pub mod kernels;
pub mod merge;
pub mod new_model;
pub mod pack;
pub mod peak_memory;
pub mod preflight;
pub mod prompt;
#[cfg(any(test, fuzzing))]
pub mod properties;
pub mod results;
pub mod rouge;
pub mod show;
pub mod smoke;
pub mod tokenize;
pub mod tokenizer;
mod torch;
pub mod train;

/// All stage kinds of this program.
pub fn registry() -> Registry {
    Registry::new()
        .with::<dataset::Dataset>()
        .with::<download::Download>()
        .with::<new_model::NewModel>()
        .with::<tokenize::Tokenize>()
        .with::<pack::Pack>()
        .with::<train::Train>()
        .with::<merge::Merge>()
        .with::<evaluate::Evaluate>()
        .with::<generate::Generate>()
        .with::<command::Command>()
}
