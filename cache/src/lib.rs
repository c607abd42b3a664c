//! Content-addressed store: bytes, digests, folders, keys and results.
//!
//! It leaves to others: what a stage is, what an artefact means, YAML.

pub mod atomic;
pub mod census;
pub mod digest;
pub mod disk;
mod entry;
mod error;
mod finished;
mod folder;
pub mod gc;
pub mod holder;
pub mod in_use;
pub mod key;
mod linked;
pub mod listing;
pub mod lock;
pub mod outside;
#[cfg(any(test, fuzzing))]
pub mod properties;
pub mod record;
pub mod regular;
pub mod remote;
pub mod reuse;
pub mod stat_cache;
pub mod store;
#[cfg(test)]
mod testing;
pub mod tree;
pub mod verify;

pub use digest::{Digest, Hasher};
pub use error::StoreError;
pub use finished::{FinishedFiles, Flushing};
pub use key::{Class, KeyDifference, KeyDocument, KeyEntry, differences};
pub use lock::{Lock, Staging};
pub use outside::Place;
pub use record::{Examined, OutputRecord, ResultRecord, SeenResult};
pub use reuse::Reusable;
pub use stat_cache::StatCache;
pub use store::{Store, Verify};
pub use tree::{Tree, TreeFile};
