//! Content-addressed store: bytes, digests, folders, keys and results.
//!
//! It leaves to others: what a stage is, what an artefact means, YAML.

pub mod digest;
pub mod key;

pub use digest::{Digest, Hasher};
pub use key::{Class, KeyDocument, KeyEntry};
