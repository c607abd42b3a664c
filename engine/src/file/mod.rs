//! Reading a pipeline file: text to a tree with spans, and the problems found in it.

pub mod codes;
pub mod condition;
pub mod foreign;
pub mod interpolate;
pub mod overrides;
pub mod parse;
pub mod problem;
pub mod scalar;
pub mod source;
mod syntax_error;
#[cfg(test)]
mod tests;
pub mod tree;
