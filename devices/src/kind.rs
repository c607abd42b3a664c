//! The kinds of device: the list of the vendors.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::vendor::{Facts, Vendor};

/// Declares the kinds, each with its name in pipeline files, messages and jobs, and what implements it.
macro_rules! vendors {
    ($($(#[doc = $doc:literal])+ $kind:ident = $name:literal: $vendor:path,)+) => {
        /// A kind of device: the id of a vendor's.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum DeviceKind {
            $($(#[doc = $doc])+ #[serde(rename = $name)] $kind,)+
        }

        impl DeviceKind {
            /// All of them, in the order in which they are listed.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$kind),+];

            /// Its name in pipeline files, messages and jobs.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                }
            }

            /// What it is, in a sentence.
            pub fn description(self) -> &'static str {
                match self {
                    $(Self::$kind => concat!($($doc),+).trim_ascii(),)+
                }
            }

            /// Whose it is.
            pub fn vendor(self) -> &'static dyn Vendor {
                match self {
                    $(Self::$kind => &$vendor,)+
                }
            }
        }
    };
}

vendors! {
    /// The CPU.
    Cpu = "cpu": crate::cpu::Processor,
    /// NVIDIA GPUs.
    Cuda = "cuda": crate::nvidia::Nvidia,
    /// Ascend NPUs.
    Npu = "npu": crate::ascend::Ascend,
    /// AMD GPUs.
    Rocm = "rocm": crate::rocm::Rocm,
    /// Apple GPUs.
    Metal = "metal": crate::metal::Metal,
}

impl DeviceKind {
    /// The kind of a name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// What has not been run on hardware yet, of so many devices of this kind at work together, as users are told it.
    pub fn not_yet_run(self, count: usize) -> Option<String> {
        let facts = self.facts();
        let of_one = facts.untried.map(|stand_in| format!("not yet run on hardware: {self}. {stand_in}"));
        let together = facts.untried_together.filter(|_| count > 1);
        of_one.or_else(|| {
            together.map(|stand_in| format!("not yet run on hardware: several {self} devices at once. {stand_in}"))
        })
    }

    /// What is said of it, and by which names others know it.
    pub fn facts(self) -> Facts {
        self.vendor().facts()
    }

    /// The kinds beside the CPU that something in this project computes on, in the order in which a machine is searched
    /// for them.
    pub fn accelerators() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|kind| *kind != Self::Cpu && kind.facts().torch.is_some())
    }

    /// The environment variable by which a process sees some of a machine's devices and no others: their indices,
    /// ascending. None where there is no such variable.
    pub fn visible_variable(self) -> Option<&'static str> {
        self.facts().visible.map(|visible| visible.variable)
    }

    /// All variables by which a process may have been told which devices it sees.
    pub fn visible_variables() -> impl Iterator<Item = &'static str> {
        let visible = Self::ALL.into_iter().filter_map(|kind| kind.facts().visible);
        visible.flat_map(|visible| {
            let beside = visible.beside.map(|(name, _)| name);
            [Some(visible.variable), visible.outer, beside].into_iter().flatten()
        })
    }

    /// All that is set for a process that is to compute on these devices of a machine and on no others, whatever order
    /// they come in.
    pub fn environment(self, indices: &[u32]) -> Vec<(&'static str, String)> {
        let Some(visible) = self.facts().visible else { return Vec::new() };
        let mut indices = indices.to_vec();
        indices.sort_unstable();
        indices.dedup();
        let list = indices.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
        let beside = visible.beside.map(|(name, value)| (name, value.to_owned()));
        beside.into_iter().chain([(visible.variable, list)]).collect()
    }

    /// Some of them, in words: `an NPU (Ascend)`.
    pub fn in_words(self) -> String {
        let Facts { one, maker, .. } = self.facts();
        maker.map_or_else(|| one.to_owned(), |maker| format!("{one} ({maker})"))
    }
}

#[expect(clippy::derivable_impls, reason = "a macro makes the variants")]
impl Default for DeviceKind {
    fn default() -> Self {
        Self::Cpu
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
