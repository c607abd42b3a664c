//! The stage kinds, one folder each.

use engine::stage::Registry;

pub mod add_tokens;
pub mod command;
pub mod dataset;
pub mod download;
mod elsewhere;
pub mod evaluate;
pub mod generate;
pub mod gguf;
pub mod log_probs;
pub mod merge;
pub mod new_model;
pub mod pack;
pub mod quantize;
pub mod rank;
pub mod tokenize;
pub mod train;

/// All stage kinds of this program.
pub fn registry() -> Registry {
    Registry::new()
        .with::<dataset::Dataset>()
        .with::<download::Download>()
        .with::<new_model::NewModel>()
        .with::<add_tokens::AddTokens>()
        .with::<tokenize::Tokenize>()
        .with::<pack::Pack>()
        .with::<log_probs::LogProbabilities>()
        .with::<train::Train>()
        .with::<merge::Merge>()
        .with::<gguf::Gguf>()
        .with::<quantize::Quantize>()
        .with::<evaluate::Evaluate>()
        .with::<generate::Generate>()
        .with::<rank::Rank>()
        .with::<command::Command>()
}
