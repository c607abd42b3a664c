//! Reading a pipeline file: text to a tree with spans, and the problems found in it.

pub mod problem;
pub mod source;
pub mod tree;
