//! What can be wrong with a checkpoint that is read.

use std::path::PathBuf;

use safetensors::{Dtype, SafeTensorError};

use super::{INDEX_FILE, SINGLE_FILE};
use crate::gguf::GgufError;

/// What is wrong with a checkpoint, or with what was asked of it.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The folder holds no safetensors weights.
    #[error("no `{SINGLE_FILE}` or `{INDEX_FILE}` in `{folder}`{hint}", folder = folder.display())]
    NoWeights {
        /// The folder that was opened.
        folder: PathBuf,
        /// What lies there instead, as the end of the message.
        hint: &'static str,
    },
    /// The weights are in a GGUF file that cannot be used.
    #[error("cannot use `{}`", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<GgufError>,
    },
    /// A file could not be opened, mapped or read.
    #[error("cannot read `{}`", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The index is not the JSON it should be.
    #[error("`{}` is not a safetensors index", path.display())]
    BadIndex {
        /// The index file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: serde_json::Error,
    },
    /// The index names a file outside of its own folder.
    #[error("`{}` names the shard `{shard}`, which is not a plain file name", path.display())]
    BadShardName {
        /// The index file.
        path: PathBuf,
        /// The name it gives.
        shard: String,
    },
    /// A shard named by the index is not there.
    #[error("shard `{shard}` of `{}` is missing ({tensors} tensors lie in it)", folder.display())]
    MissingShard {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// The file that is missing.
        shard: String,
        /// How many tensors the index places in it.
        tensors: usize,
    },
    /// The index places a tensor in a shard that does not hold it.
    #[error("the index places `{tensor}` in `{}`, which does not hold it", path.display())]
    NotInShard {
        /// The tensor.
        tensor: String,
        /// The shard.
        path: PathBuf,
    },
    /// What describes a quantised tensor does not hold together.
    #[error("`{tensor}` in `{}` is not what bitsandbytes stores in 4 bits: {what}", path.display())]
    BadQuantized {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong.
        what: String,
    },
    /// A tensor cannot be quantised as asked for.
    #[error(
        "tensor `{name}` of `{}` has {values} values, and torchao's NF4 takes multiples of 16384: leave it out with `skip_modules`, or \
         take `nf4`",
        path.display()
    )]
    NoWholeBlocks {
        /// The folder or file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// How many values it has.
        values: usize,
    },
    /// The file has fewer or more bytes than its header declares.
    #[error("`{}` has {found} bytes where its header declares {expected}: the file is {}", path.display(), if found < expected { "cut off" } else { "too long" })]
    WrongLength {
        /// The file.
        path: PathBuf,
        /// Bytes according to the header.
        expected: u64,
        /// Bytes on disk.
        found: u64,
    },
    /// The header is larger than any checkpoint's.
    #[error("`{}` has {what} in its header, and {most} are the most that is read", path.display())]
    HeaderTooLarge {
        /// The file.
        path: PathBuf,
        /// What there is too much of: `300000 tensors`.
        what: String,
        /// The most that is read.
        most: u64,
    },
    /// The file is what git-LFS keeps in the place of another.
    #[error("`{}` is a git-LFS pointer, and the file itself was not fetched", path.display())]
    Pointer {
        /// The file.
        path: PathBuf,
    },
    /// The header cannot be understood.
    #[error("`{}` is not a safetensors file", path.display())]
    BadHeader {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: SafeTensorError,
    },
    /// The checkpoint has no tensor of that name.
    #[error("`{}` has no tensor `{name}`{}", path.display(), nearest_text(nearest))]
    MissingTensor {
        /// The folder or file.
        path: PathBuf,
        /// The name asked for.
        name: String,
        /// The nearest names it does have, best first.
        nearest: Vec<String>,
    },
    /// The tensor's shape is not the one the model's configuration implies.
    #[error("tensor `{name}` of `{}` has shape {found:?} where {expected:?} is expected", path.display())]
    WrongShape {
        /// The folder or file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The shape asked for.
        expected: Vec<usize>,
        /// The shape stored.
        found: Vec<usize>,
    },
    /// The checkpoint holds weights of a decoder that the configuration does not describe.
    #[error(
        "the model's configuration has no place for tensor `{tensor}` of `{}`{}: weights and `config.json` are of two models, or \
         the configuration leaves out what they need",
        path.display(),
        if *more == 0 { String::new() } else { format!(" and {more} more") }
    )]
    NoPlace {
        /// The folder or file.
        path: PathBuf,
        /// The first of them.
        tensor: String,
        /// How many there are besides.
        more: usize,
    },
    /// The configuration ties the head to the embedding, and the checkpoint has another head.
    #[error(
        "`{}` has an `lm_head.weight` that is not its `model.embed_tokens.weight`, though `tie_word_embeddings` says so: set it to \
         false in `config.json` if that head is meant",
        path.display()
    )]
    TiedHeadDiffers {
        /// The folder or file.
        path: PathBuf,
    },
    /// The tensor's dtype cannot be read as asked.
    #[error("tensor `{name}` of `{}` has dtype {found}, which cannot be read as {wanted}", path.display())]
    WrongDtype {
        /// The folder or file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The dtype stored.
        found: Dtype,
        /// What was asked for.
        wanted: &'static str,
    },
}

fn nearest_text(nearest: &[String]) -> String {
    match nearest {
        [] => String::new(),
        names => format!("; the nearest are `{}`", names.join("`, `")),
    }
}
