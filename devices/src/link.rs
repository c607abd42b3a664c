//! How two devices of a machine are joined.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::DeviceKind;

/// What joins two devices, slowest first: of two, the greater is the faster.
///
/// The order is by what the path crosses, as the vendors' tools define it, and not by a measured rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkKind {
    /// The tool does not say.
    Unknown,
    /// PCIe and the link between CPU sockets (QPI, UPI).
    Sys,
    /// PCIe and the link between host bridges of one NUMA node.
    Node,
    /// PCIe and one host bridge of a CPU (`PHB`; `PXH` and `PCIE` where a tool says no more).
    Phb,
    /// Several PCIe switches.
    Pxb,
    /// One PCIe switch.
    Pix,
    /// AMD's Infinity Fabric between GPUs.
    Xgmi,
    /// Ascend's links between NPUs, directly or through their switch.
    Hccs,
    /// NVIDIA's links between GPUs, and how many are bonded.
    NvLink { count: u32 },
    /// Two chips on one package or board (Ascend's `SIO`).
    SameCard,
    /// A device and itself.
    Same,
}

impl LinkKind {
    /// Reads the cell of a vendor's topology matrix; `None` for a text that no tool is known to print.
    pub fn from_cell(cell: &str) -> Option<Self> {
        let cell = cell.trim().to_ascii_uppercase();
        Some(match cell.as_str() {
            "X" | "SELF" => Self::Same,
            "SYS" => Self::Sys,
            "NODE" => Self::Node,
            "PHB" | "PXH" | "PCIE" => Self::Phb,
            "PXB" => Self::Pxb,
            "PIX" | "PSB" => Self::Pix,
            "XGMI" => Self::Xgmi,
            "HCCS" | "HCCS_SW" => Self::Hccs,
            "SIO" => Self::SameCard,
            "NA" | "N/A" | "DIS" | "NS" | "ERR" | "UNKNOWN" => Self::Unknown,
            other => Self::NvLink { count: other.strip_prefix("NV")?.parse().ok()? },
        })
    }
}

impl LinkKind {
    /// What it is, for a legend.
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Unknown => "not reported by the tool",
            Self::Sys => "across CPU sockets (QPI, UPI)",
            Self::Node => "across host bridges of one NUMA node",
            Self::Phb => "across a host bridge of a CPU, or PCIe at large",
            Self::Pxb => "across several PCIe switches",
            Self::Pix => "across one PCIe switch",
            Self::Xgmi => "Infinity Fabric",
            Self::Hccs => "HCCS, directly or through its switch",
            Self::NvLink { .. } => "NVLinks, and how many",
            Self::SameCard => "on one card",
            Self::Same => "itself",
        }
    }
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Unknown => "?",
            Self::Sys => "SYS",
            Self::Node => "NODE",
            Self::Phb => "PHB",
            Self::Pxb => "PXB",
            Self::Pix => "PIX",
            Self::Xgmi => "XGMI",
            Self::Hccs => "HCCS",
            Self::NvLink { count } => return write!(f, "NV{count}"),
            Self::SameCard => "SIO",
            Self::Same => "X",
        };
        f.write_str(name)
    }
}

impl Serialize for LinkKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What joins two devices of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Link {
    /// Their kind.
    pub device: DeviceKind,
    /// Their indices, the smaller first.
    pub between: [u32; 2],
    /// What joins them.
    pub link: LinkKind,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_of_all_vendors_are_read() {
        let cells = [
            ("X", LinkKind::Same),
            ("HCCS", LinkKind::Hccs),
            ("HCCS_SW", LinkKind::Hccs),
            ("SIO", LinkKind::SameCard),
            ("NV12", LinkKind::NvLink { count: 12 }),
            ("PIX", LinkKind::Pix),
            ("PXB", LinkKind::Pxb),
            ("PHB", LinkKind::Phb),
            ("NODE", LinkKind::Node),
            ("SYS", LinkKind::Sys),
            ("XGMI", LinkKind::Xgmi),
            ("NA", LinkKind::Unknown),
        ];
        for (cell, kind) in cells {
            assert_eq!(LinkKind::from_cell(cell), Some(kind), "{cell}");
        }
        assert_eq!(LinkKind::from_cell("0-23"), None);
        assert_eq!(LinkKind::from_cell("NVx"), None);
    }

    #[test]
    fn of_two_links_the_faster_is_greater() {
        let slowest_first = ["NA", "SYS", "NODE", "PHB", "PXB", "PIX", "XGMI", "HCCS", "NV4", "NV18", "SIO", "X"];
        let kinds: Vec<_> = slowest_first.iter().filter_map(|cell| LinkKind::from_cell(cell)).collect();
        assert_eq!(kinds.len(), slowest_first.len());
        assert!(kinds.is_sorted());
    }
}
