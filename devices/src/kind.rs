//! The kinds of device.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The CPU.
    #[default]
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
    /// Ascend NPUs.
    Npu,
    /// AMD GPUs.
    Rocm,
    /// Apple GPUs.
    Metal,
}

impl DeviceKind {
    pub const ALL: [Self; 5] = [Self::Cpu, Self::Cuda, Self::Npu, Self::Rocm, Self::Metal];

    /// Its name in pipeline files, messages and jobs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Npu => "npu",
            Self::Rocm => "rocm",
            Self::Metal => "metal",
        }
    }

    /// The environment variable by which a process sees some of a machine's devices and no others: their indices,
    /// ascending. None where there is no such variable.
    ///
    /// The one for NPUs is that of the process; `ASCEND_VISIBLE_DEVICES` is read by container runtimes alone.
    pub fn visible_variable(self) -> Option<&'static str> {
        match self {
            Self::Cuda => Some("CUDA_VISIBLE_DEVICES"),
            Self::Npu => Some("ASCEND_RT_VISIBLE_DEVICES"),
            Self::Rocm => Some("HIP_VISIBLE_DEVICES"),
            Self::Cpu | Self::Metal => None,
        }
    }

    /// All that is set for a process that is to compute on these devices of a machine and on no others, whatever order
    /// they come in.
    ///
    /// CUDA counts the fastest device first unless it is told to count as its driver's tools do, and the indices of an
    /// [`Inventory`](crate::Inventory) are theirs. Ascend's runtime takes ids only in ascending order.
    pub fn environment(self, indices: &[u32]) -> Vec<(&'static str, String)> {
        let Some(variable) = self.visible_variable() else { return Vec::new() };
        let mut indices = indices.to_vec();
        indices.sort_unstable();
        indices.dedup();
        let list = indices.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let order = (self == Self::Cuda).then(|| ("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()));
        order.into_iter().chain([(variable, list)]).collect()
    }

    /// Whether this program ever ran on such a device, and not on what stands in for one.
    pub fn was_run_on_hardware(self) -> bool {
        match self {
            Self::Cpu => true,
            Self::Cuda | Self::Npu | Self::Rocm | Self::Metal => false,
        }
    }

    /// What stood in for a device of this kind so far.
    pub fn how_it_was_tried(self) -> &'static str {
        match self {
            Self::Cpu => "",
            Self::Cuda => "What is done with it is tested on the CPU and on stand-ins for NVML and nvidia-smi.",
            Self::Npu => {
                "What is done with it is built to Ascend's documents, and tested on an emulated device and a stand-in for npu-smi."
            }
            Self::Rocm => {
                "What is done with it is built to AMD's documents, and tested on stand-ins for amd-smi and rocm-smi."
            }
            Self::Metal => "It is listed, and nothing computes on it yet.",
        }
    }

    /// Some of them, in words: `an NPU (Ascend)`.
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Cpu => "the CPU",
            Self::Cuda => "a CUDA device (NVIDIA)",
            Self::Npu => "an NPU (Ascend)",
            Self::Rocm => "a ROCm device (AMD)",
            Self::Metal => "a Metal device (Apple)",
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_in_ascending_order() {
        assert_eq!(DeviceKind::Npu.environment(&[3, 1, 3]), [("ASCEND_RT_VISIBLE_DEVICES", "1,3".to_owned())]);
        assert_eq!(
            DeviceKind::Cuda.environment(&[0]),
            [("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()), ("CUDA_VISIBLE_DEVICES", "0".to_owned())]
        );
        assert!(DeviceKind::Cpu.environment(&[0]).is_empty());
    }
}
