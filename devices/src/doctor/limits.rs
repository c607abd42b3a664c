//! What the system allows a process: open files, locked memory, shared memory.

use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::statvfs;

use super::{Finding, Severity, Subject, finding};
use crate::{DeviceKind, Machine};

/// Open files that ranks with their links, readers and collectives come to.
const OPEN_FILES: u64 = 4096;
/// Shared memory below which NCCL's and the data loaders' segments run out; a container has 64 MiB unless it is told
/// otherwise.
const SHARED_MEMORY: u64 = 512 << 20;

/// What a process may use. None where it cannot be asked or there is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Files that it may have open.
    pub open_files: Option<u64>,
    /// Bytes that it may lock in memory.
    pub locked_memory: Option<u64>,
    /// Bytes of shared memory that there are.
    pub shared_memory: Option<u64>,
}

impl Limits {
    /// Those of this process, which what it starts inherits.
    pub fn of_this_process(machine: &Machine) -> Self {
        let limit =
            |resource| getrlimit(resource).ok().map(|(soft, _)| soft).filter(|soft| *soft != nix::libc::RLIM_INFINITY);
        let shared = statvfs(&machine.path("/dev/shm")).ok();
        Self {
            open_files: limit(Resource::RLIMIT_NOFILE),
            locked_memory: limit(Resource::RLIMIT_MEMLOCK),
            shared_memory: shared.map(|shared| shared.blocks() * shared.fragment_size()),
        }
    }
}

/// Looks at limits that are too low for what there is.
pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let accelerators = subject.inventory.devices.iter().filter(|device| device.kind != DeviceKind::Cpu).count();
    let mut findings = Vec::new();
    let mut found = |check, message: &str, seen: String, help: &str| {
        findings.push(finding(Severity::Warning, check, message, seen, help));
    };
    if let Some(files) = subject.limits.open_files.filter(|files| accelerators > 1 && *files < OPEN_FILES) {
        found(
            "limit-open-files",
            "a process may have few files open",
            format!("{files}"),
            "`ulimit -n 65535`, or `--ulimit nofile=65535` for a container",
        );
    }
    if let Some(bytes) = subject.limits.locked_memory.filter(|_| accelerators > 1 && has_rdma(subject.machine)) {
        let help = "`ulimit -l unlimited`, or `--ulimit memlock=-1` for a container: RDMA locks what it sends from";
        found("limit-locked-memory", "a process may lock little memory", format!("{} KiB", bytes >> 10), help);
    }
    if let Some(bytes) = subject.limits.shared_memory.filter(|bytes| *bytes < SHARED_MEMORY) {
        let help = "`--shm-size=16g` or `--ipc=host` for a container: data loaders, NCCL and workers on the CPU exchange data there";
        found(
            "limit-shared-memory",
            "there is little shared memory",
            format!("/dev/shm has {} MiB", bytes >> 20),
            help,
        );
    }
    findings
}

fn has_rdma(machine: &Machine) -> bool {
    std::fs::read_dir(machine.path("/sys/class/infiniband")).is_ok_and(|mut entries| entries.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machine::{TestMachine, TestSubject};

    fn checks(limits: Limits, devices: usize, rdma: bool) -> Vec<&'static str> {
        let machine = TestMachine::new();
        if rdma {
            machine.file("sys/class/infiniband/mlx5_0/node_type", "");
        }
        let tested = TestSubject { limits, ..TestSubject::new(&machine, DeviceKind::Cuda, &vec!["H100"; devices]) };
        check(&tested.subject()).into_iter().map(|finding| finding.check).collect()
    }

    #[test]
    fn low_limits_matter_where_there_are_devices() {
        let low = Limits { open_files: Some(1024), locked_memory: Some(64 << 10), shared_memory: Some(64 << 20) };
        assert_eq!(checks(low, 0, false), ["limit-shared-memory"]);
        assert_eq!(checks(low, 8, false), ["limit-open-files", "limit-shared-memory"]);
        assert_eq!(checks(low, 8, true), ["limit-open-files", "limit-locked-memory", "limit-shared-memory"]);
        assert_eq!(checks(Limits::default(), 8, true), [] as [&str; 0]);
    }

    #[test]
    fn this_process_has_limits() {
        let limits = Limits::of_this_process(&Machine::at("/", ""));
        assert!(limits.open_files.is_none_or(|files| files > 0));
    }
}
