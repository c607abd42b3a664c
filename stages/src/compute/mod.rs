//! What stages compute with: models and adapters as artefacts, kernel sets, the torch worker, inference.

pub mod adapter;
pub mod aware;
pub mod backend;
pub mod checkpoint;
pub mod inference;
pub mod journal;
pub mod kernels;
pub mod precision;
pub mod quantize;
pub mod resources;
pub(crate) mod torch;
pub mod variable;

pub use torch::worker_python;
