//! The shared store: results by their keys in a bucket or a folder that several machines use.
//!
//! ```text
//! pipeline-cache.json   what this is, and in which version
//! objects/ab/cdef…      file contents by digest
//! trees/ab/cdef…        folders
//! results/<key>.json    key → outputs
//! ```
//!
//! The layout and every file in it are those of the local [`crate::Store`]. A result is sent after everything that it
//! names, so that who finds it finds the rest. What comes back is compared with its digest before it gets a name in the
//! local store; what does not hold up is refused by name. Nothing is believed of a bucket but that a key belongs to a
//! result, which its writers are trusted with.
//!
//! It leaves to others: when to ask, and what to do when there is no answer.

mod beside;
mod connect;
mod download;
mod error;
mod place;
mod pull;
mod push;
mod shared;
mod tls;

pub use error::RemoteError;
pub use place::{BadPlace, RemotePlace};
pub use pull::Pulled;
pub use push::{Check, Pushed, PushedAs, Pushing};
pub use shared::{Remote, TransferProgress};
pub use tls::provide_tls;
