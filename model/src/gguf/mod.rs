//! GGUF, the files that llama.cpp, Ollama and others run: written from a checkpoint, and read.
//!
//! [`Export::plan`] says all that a file will hold (metadata, the vocabulary, every tensor with its type and place)
//! or why GGUF cannot hold the model; [`Export::write`] streams it, a piece of a tensor at a time. [`GgufFile`] reads
//! any; [`config()`] and [`tokenizer`] derive what lies beside the weights in a checkpoint of the Hub, so that
//! [`crate::checkpoint::Checkpoint`] opens a folder with such a file as any other. What the files mean is llama.cpp's,
//! version 3 of the format; `tests/golden/gguf` holds what its own converter and quantiser make.

mod architecture;
mod export;
mod import;
mod import_vocabulary;
mod mixture;
mod pre_tokenizer;
mod reader;
mod sentencepiece;
mod value;
mod vocabulary;

use std::path::PathBuf;

pub(crate) use architecture::Change;
pub use export::{Export, ExportOptions, PlannedTensor, Progress, check_config, tensor_bytes};
pub(crate) use import::{SourceTensor, sources};
pub use import::{check_tensors, config};
pub use import_vocabulary::{TokenizerJson, tokenizer};
pub use mixture::FileType;
pub use pre_tokenizer::PRE_TOKENIZERS;
pub use reader::{GgufFile, TensorEntry};
pub use value::{Value, ValueType};

use crate::checkpoint::CheckpointError;
use crate::config::ConfigError;
pub use crate::weights::TensorType;

/// Every tensor begins at a multiple of so many bytes.
pub const ALIGNMENT: u64 = 32;

const MAGIC: [u8; 4] = *b"GGUF";
const VERSION: u32 = 3;

/// The name of the file in a folder that stands for a checkpoint.
pub const FILE: &str = "model.gguf";

/// Why a file is not written or not read.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The checkpoint cannot be read, or lacks something.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its configuration cannot.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file cannot be read or written.
    #[error("cannot {what} `{}`", path.display())]
    File {
        /// "read" or "write".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The model computes something that GGUF has no word for, or llama.cpp no code.
    #[error("no GGUF file can hold this model: {0}")]
    Inexpressible(String),
    /// A value is infinite in f16.
    #[error("`{name}` has the value {value}, which is too great for f16; give the type bf16 or f32")]
    TooGreat {
        /// The tensor's name in the file.
        name: String,
        /// The value.
        value: f32,
    },
    /// A value is no number, or infinite.
    #[error("`{name}` has the value {value}: the model was damaged, or its training diverged")]
    NotFinite {
        /// The tensor's name in the file.
        name: String,
        /// The value.
        value: f32,
    },
    /// The tokenizer is of another kind, or its files do not go together.
    #[error("the tokenizer cannot be written: {0}")]
    Tokenizer(String),
    /// The tokenizer splits text in a way that llama.cpp may or may not have a name for.
    #[error("the tokenizer splits text as none of those that have a name in llama.cpp: {0}")]
    UnknownPreTokenizer(String),
    /// The file holds a model or a tokenizer that is not computed here.
    #[error("the file's model cannot be used here: {0}")]
    Unusable(String),
    /// The file's tokenizer splits text in a way that has no known name.
    #[error("the file's tokenizer splits text as `{0}` (`tokenizer.ggml.pre`), which is not known here")]
    UnknownSplit(String),
    /// What is read is no GGUF file, or a damaged one.
    #[error("the file is damaged: {0}")]
    Damaged(String),
    /// Whoever watches the progress has stopped it.
    #[error("stopped")]
    Stopped,
}

impl GgufError {
    fn read(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::File { what: "read", path, source }
    }

    fn write(path: &std::path::Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::File { what: "write", path, source }
    }
}
