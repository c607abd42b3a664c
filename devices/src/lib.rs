//! What a machine has to compute on: the kinds of device, which there are, and who uses them.
//!
//! It knows machines and processes, and nothing of stages, plans or tensors.

mod kind;

pub use kind::DeviceKind;
