//! Checkpoints in the form of the Hugging Face Hub: safetensors files, one or several with an index; or a GGUF file,
//! whose tensors have the names and the order of rows that they have on the Hub.
//!
//! [`Checkpoint`] reads a folder (or one file), [`CheckpointWriter`] streams tensors out, one at a time; both in
//! pieces, on all threads. What the tensors mean is left to the decoder, the adapters and the merge.

mod error;
mod gguf;
mod nf4;
mod reader;
mod rows;
mod tied;
mod writer;

pub use error::CheckpointError;
pub use reader::{Checkpoint, TensorInfo, is_lfs_pointer};
pub use rows::{BlockRows, Halves, RowBytes, Rows, StoredRows, ValueRows};
pub use safetensors::Dtype;
pub(crate) use writer::write_atomically;
pub use writer::{
    CheckpointWriteError, CheckpointWriter, DEFAULT_MAX_SHARD_BYTES, Flush, PIECE_BYTES, TensorSpec, encode_float,
};

/// The single weight file of a checkpoint that is not split.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The index of a checkpoint split over several files.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// The name that `torch_dtype` in a `config.json` gives to a floating-point type, if it is one that we compute from.
pub fn torch_name(dtype: Dtype) -> Option<&'static str> {
    match dtype {
        Dtype::F32 => Some("float32"),
        Dtype::BF16 => Some("bfloat16"),
        Dtype::F16 => Some("float16"),
        _ => None,
    }
}
