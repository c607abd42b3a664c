//! A client for hubs of models and data sets (the Hugging Face Hub and its mirrors, ModelScope): names to commits,
//! listings, and files that are checked before they count.
//!
//! The published clients were tried and found to store error bodies as files, or to accept a flipped byte; the
//! transfer is therefore our own. `hf-hub` is used for what it does well: repository names, the layout of the Hub cache
//! that other tools fill, and the place of the user's token.
//!
//! It leaves to others: which files of a repository are wanted, and what becomes of them.

mod cache;
mod checksum;
mod client;
mod connection;
mod error;
mod hugging_face;
mod listing;
mod locked;
mod modelscope;
mod parallel;
mod pieces;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod repository;
mod service;
mod transfer;

pub use checksum::Checksum;
pub(crate) use client::forget_working_files;
pub use client::{Hub, Progress};
pub use connection::{Retry, Token};
pub use error::HubError;
pub use listing::RemoteFile;
pub use pieces::Piece;
pub use repository::{BadRepositoryName, Repository, RepositoryKind, Snapshot};
pub use service::Service;
