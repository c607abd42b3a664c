//! Adapters on disk, in the files that PEFT reads and writes: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Knows names, shapes and settings. How an adapter computes is left to [`crate::adapter`], how it enters a base
//! model for good to [`crate::merge`].

mod card;
mod config;
mod fresh;
mod modules;
pub mod targets;
mod weights;

pub use card::model_card;
pub use config::{AdapterConfig, AdapterConfigError, TargetModules};
pub use fresh::{BaseTensors, FreshError};
pub use modules::Modules;
pub use weights::{
    Adapter, AdapterError, AdapterModule, AdapterPart, PREFIX, SavedTensor, adapter_tensor_name,
    is_adapter_tensor_name, parse_adapter_tensor_name, parse_saved_tensor_name, parse_token_rows_name,
    saved_tensor_name, token_rows_name,
};

/// The settings of an adapter, in its folder.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// The model card of an adapter, in its folder.
pub const CARD_FILE: &str = "README.md";
/// The weights of an adapter, in its folder.
pub const WEIGHTS_FILE: &str = "adapter_model.safetensors";
/// What older versions of PEFT wrote instead.
pub const PICKLED_FILE: &str = "adapter_model.bin";
/// Why an adapter with such a file alone is not read, and what to do.
pub const PICKLED: &str =
    "its weights are pickled (.bin), which can run code when they are read: save it again with PEFT, as safetensors";
