//! The torch worker: PyTorch, transformers and PEFT in processes of their own, for devices that this program does not
//! compute on.
//!
//! It is a Python package, `pipeline_torch_worker` (in `workers/torch`), which reads a job file and answers in the
//! words of the worker protocol. This side writes the job, starts the ranks, and hears them. What a job is for, and
//! what becomes of the files that it leaves, is the business of the stage kinds.

pub(crate) mod batches;
mod connection;
mod environment;
pub(crate) mod job;
mod python;
mod work;

pub(crate) use connection::Connection;
#[cfg(test)]
pub(crate) use python::can_start;
pub(crate) use python::{how_to_install, is_installed, is_usable};
pub(crate) use work::Work;
