//! Topology matrices as `npu-smi info -t topo` and `nvidia-smi topo -m` print them.

use std::collections::BTreeMap;

use crate::CpuList;
use crate::link::LinkKind;

/// What a topology matrix says, by the numbers that its labels end with (`NPU3`, `GPU3`, `Phy-ID3`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Matrix {
    /// What joins two devices, the smaller number first.
    pub links: BTreeMap<(u32, u32), LinkKind>,
    /// The CPUs near a device.
    pub affinity: BTreeMap<u32, CpuList>,
    /// The NUMA node of a device.
    pub numa_node: BTreeMap<u32, u32>,
    /// Cells that no tool is known to print.
    pub strange: Vec<String>,
}

impl Matrix {
    /// Reads the devices whose labels begin with one of `prefixes`; network cards and all else are passed over. None
    /// where there is no such matrix.
    pub(crate) fn read(text: &str, prefixes: &[&str]) -> Option<Self> {
        let plain = without_escapes(text);
        let mut lines = plain.lines();
        let label = |token: &str| prefixes.iter().find_map(|prefix| token.strip_prefix(prefix)?.parse::<u32>().ok());
        // The header alone begins with blanks or has a second label after the first.
        let columns: Vec<u32> = lines.by_ref().find_map(|line| {
            let labels: Vec<u32> = line.split_whitespace().map_while(label).collect();
            (labels.len() > 1 || (labels.len() == 1 && line.starts_with(char::is_whitespace))).then_some(labels)
        })?;
        let has_numa = plain.lines().any(|line| line.contains("NUMA Affinity"));
        let mut matrix = Self::default();
        for line in lines {
            let mut tokens = line.split_whitespace();
            let Some(row) = tokens.next().and_then(label) else { continue };
            let tokens: Vec<&str> = tokens.collect();
            for (column, cell) in columns.iter().zip(&tokens) {
                matrix.put(row, *column, cell);
            }
            matrix.put_affinity(row, tokens.get(columns.len()..).unwrap_or_default(), has_numa);
        }
        Some(matrix)
    }

    fn put(&mut self, row: u32, column: u32, cell: &str) {
        let link = LinkKind::from_cell(cell).unwrap_or_else(|| {
            self.strange.push(cell.to_owned());
            LinkKind::Unknown
        });
        if row != column {
            // Said twice, once from each end. Where the two differ the slower is what a collective will see.
            let both = self.links.entry((row.min(column), row.max(column))).or_insert(link);
            *both = (*both).min(link);
        }
    }

    /// After the devices come network cards, in cells that are links too, and then the CPUs and the NUMA node.
    fn put_affinity(&mut self, row: u32, rest: &[&str], has_numa: bool) {
        let mut rest =
            rest.iter().skip_while(|token| LinkKind::from_cell(token).is_some_and(|link| link != LinkKind::Unknown));
        let Some(cpus) = rest.next() else { return };
        if let Ok(cpus) = cpus.parse::<CpuList>() {
            self.affinity.insert(row, cpus);
        }
        if has_numa && let Some(Ok(node)) = rest.next().map(|token| token.parse()) {
            self.numa_node.insert(row, node);
        }
    }
}

/// `nvidia-smi` underlines its header even where nobody watches.
fn without_escapes(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        if letter != '\u{1b}' {
            plain.push(letter);
        } else if letters.next() == Some('[') {
            letters.by_ref().find(|letter| letter.is_ascii_alphabetic());
        }
    }
    plain
}
