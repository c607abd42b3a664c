//! The torch worker: PyTorch, transformers and PEFT in processes of their own, for devices that this program does not
//! compute on.
//!
//! It is a Python package, `pipeline_torch_worker` (in `workers/torch`), which opens the model that a job file names,
//! does what requests say, and answers them between the events of the worker protocol. This side writes the job,
//! starts the ranks, and speaks with them. What is requested, and what becomes of the answers, is the business of the
//! stage kinds.

pub(crate) mod batches;
mod connection;
mod environment;
pub(crate) mod job;
mod python;
mod work;

pub(crate) use connection::{Connection, NAMED_AS_IN_FILES};
#[cfg(test)]
pub(crate) use python::can_start;
pub use python::worker_python;
pub(crate) use python::{
    has_bitsandbytes, has_folder_of_bitsandbytes, how_to_install, how_to_install_bitsandbytes, is_installed,
    is_named_in_vain, is_usable, what_it_lacks,
};
pub(crate) use work::{PEAK_MEMORY_OF_RANKS, Work};
