//! What a machine has to compute on: the kinds of device, which there are, and who uses them.
//!
//! It knows machines and processes, and nothing of stages, plans or tensors. All that it tells of a device comes from
//! the driver's own library or tool, run with a time limit: a hung driver hangs nobody else.

mod ascend;
mod cpu;
mod cpu_list;
pub mod doctor;
mod inventory;
mod kind;
pub mod lease;
mod link;
mod machine;
mod matrix;
mod metal;
mod nvidia;
pub mod placement;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod rocm;
mod survey;
#[cfg(test)]
mod test_machine;
mod tool;
mod vendor;

pub use cpu::numa_nodes;
pub use cpu_list::{CpuList, NoCpuList};
pub use inventory::{Device, Health, Inventory, Process, Queried};
pub use kind::DeviceKind;
pub use link::{Link, LinkKind};
pub use machine::Machine;
pub use tool::ToolError;
pub use vendor::{DeviceNodes, Facts, ListForm, TorchSupport, Vendor, VisibleDevices};
