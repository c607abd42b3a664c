//! What the system says of this process's memory.

use test_harness::{Requirement, Unmet};

/// Bytes of a mebibyte.
pub(crate) const MIB: u64 = 1 << 20;

/// A field of `/proc/self/status`, in bytes.
pub(crate) fn status_bytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("the field");
    let kib = line.trim_start_matches(':').trim_end_matches("kB").trim();
    kib.parse::<u64>().expect("a number") * 1024
}

/// Sets the peak of this process's memory back to the present. Fails where the system does not.
pub(crate) fn forget_peak() -> Result<(), Unmet> {
    std::fs::write("/proc/self/clear_refs", "5").map_err(|error| Requirement::PeakMemory.unmet(error))
}
