//! The kinds of device.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A kind of device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The processor.
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
    /// Every kind.
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

    /// The environment variable by which a process sees some of a machine's devices and no others: their indices, ascending. None
    /// where there is no such variable.
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
