//! The data that stages hand to each other, and how text becomes tokens.

pub mod artifact;
pub(crate) mod generation_config;
pub(crate) mod jinja;
pub(crate) mod number;
pub mod overlap;
pub mod prompt;
pub mod protobuf;
pub mod results;
pub mod tokenizer;
