//! Why adapters cannot be merged, and what is wrong with which of them.

use std::path::PathBuf;

use crate::checkpoint::{CheckpointError, CheckpointWriteError, Dtype};
use crate::config::ConfigError;
use crate::peft::targets::vocabulary_hint;

/// Why adapters cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// The base cannot be read.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// The result cannot be written.
    #[error(transparent)]
    Write(#[from] CheckpointWriteError),
    /// The base's configuration cannot be read.
    #[error("cannot read `{}`", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The base is of a kind that we do not run, so that a merge could not be proved.
    #[error("cannot use the base's configuration")]
    Unknown(#[from] ConfigError),
    /// No adapter was given.
    #[error("there is no adapter to merge")]
    NoAdapter,
    /// The adapter says that it was trained on another model.
    #[error("the adapter was trained on `{expected}`, not on `{found}`")]
    OtherBase {
        /// `base_model_name_or_path` of the adapter.
        expected: String,
        /// The base to merge into.
        found: String,
    },
    /// The base has no weight for a module that the adapter adapts.
    #[error("the base has no module `{module}`, which the adapter adapts{}", if nearest.is_empty() { String::new() } else { format!("; the nearest is `{nearest}`") })]
    UnknownModule {
        /// The module.
        module: String,
        /// The nearest module of the base, empty if it has none.
        nearest: String,
    },
    /// The adapter is for a module of another shape.
    #[error(
        "`{module}` of the base is {base:?}, that of the adapter {adapter:?} (outputs by inputs){}",
        vocabulary_hint(module, adapter, base)
    )]
    WrongShape {
        /// The module.
        module: String,
        /// The base's shape.
        base: Vec<usize>,
        /// The adapter's.
        adapter: Vec<usize>,
    },
    /// The adapter has a row for a token that the base has not.
    #[error("`{module}` of the base has {rows} rows, and the adapter has one for token {id}")]
    NoRow {
        /// The module.
        module: String,
        /// The token.
        id: u32,
        /// The rows of the base.
        rows: usize,
    },
    /// The adapted weight is not stored as a float that we round to.
    #[error("`{module}` of the base is stored as {dtype}: a quantised weight cannot be merged into")]
    NotAFloat {
        /// The module.
        module: String,
        /// Its type.
        dtype: Dtype,
    },
    /// DoRA changes a weight's row norms, which has no meaning for a share of it or beside another delta.
    #[error("`{module}` has a DoRA adapter, which can only be merged alone and with weight 1")]
    DoraCombined {
        /// The module.
        module: String,
    },
    /// A module that was trained as a whole takes the place of the base's; there is no share of that.
    #[error(
        "`{module}` was trained as a whole (`modules_to_save`): it can only be merged with weight 1, and by no other adapter"
    )]
    SavedCombined {
        /// The module.
        module: String,
    },
    /// Rows of tokens take the place of the base's; there is no share of that.
    #[error(
        "rows of `{module}` were trained for some tokens (`trainable_token_indices`): they can only be merged with weight 1, and no other adapter may change this module"
    )]
    RowsCombined {
        /// The module.
        module: String,
    },
    /// Rows of a tied head are those of the embedding.
    #[error(
        "the adapter has rows of `lm_head` (`trainable_token_indices`), which is tied to the embedding in the base: only rows of the embedding can be merged, and they are the head's, too"
    )]
    TiedRows,
    /// The adapter itself holds NaN or infinity.
    #[error("the adapter has a value that is not finite in `{module}`")]
    AdapterNotFinite {
        /// The module.
        module: String,
    },
    /// The merged weight holds NaN or infinity.
    #[error("merging `{module}` gives a value that is not finite")]
    NotFinite {
        /// The module.
        module: String,
    },
    /// A value is too great for the type that was asked for.
    #[error("`{tensor}` holds a value that is too great for {dtype}")]
    Overflow {
        /// The tensor.
        tensor: String,
        /// The type.
        dtype: Dtype,
    },
    /// The caller asked to stop.
    #[error("the merge was stopped")]
    Stopped,
}
