//! What the command line shows of artefacts: rows, and how two versions of a file differ.

pub mod difference;
pub mod lengths;
pub mod show;
