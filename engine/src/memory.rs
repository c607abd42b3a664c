//! The machine's memory as the kernel reports it: how much there is, how much is free, and whether a process was killed
//! by the out-of-memory killer.
//!
//! A control group may allow less than the machine has (containers, Slurm); the tighter of the two is what counts. Both
//! versions of control groups are read.

use std::fs;
use std::path::{Path, PathBuf};

/// Where the kernel tells of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    proc: PathBuf,
    cgroups: PathBuf,
}

impl Default for Memory {
    fn default() -> Self {
        Self::at(Path::new("/proc"), Path::new("/sys/fs/cgroup"))
    }
}

/// How many processes were killed because memory ran out up to a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Kills {
    /// On the whole machine; not asked where the control group tells.
    machine: Option<u64>,
    /// In the control group of this process.
    group: Option<u64>,
}

impl Memory {
    /// As told by files elsewhere, for tests.
    pub fn at(proc: &Path, cgroups: &Path) -> Self {
        Self { proc: proc.to_owned(), cgroups: cgroups.to_owned() }
    }

    /// Bytes that processes here can have at most; `None` where the kernel does not tell.
    pub fn total(&self) -> Option<u64> {
        let limits = self.groups().into_iter().filter_map(|group| group.limit());
        self.meminfo("MemTotal").into_iter().chain(limits).min()
    }

    /// Bytes that could be had now, without pushing anything out.
    pub fn available(&self) -> Option<u64> {
        let left = self.groups().into_iter().filter_map(|group| group.left());
        self.meminfo("MemAvailable").into_iter().chain(left).min()
    }

    /// Bytes that a process holds; `None` where it is gone.
    pub fn held_by(&self, process: u32) -> Option<u64> {
        field(&self.proc.join(process.to_string()).join("status"), "VmRSS:").map(|kib| kib * 1024)
    }

    /// How many processes have been killed because memory ran out up to now. Each start of a stage asks, and the counts
    /// of a whole machine are dear to read: only where the control group has none.
    pub fn kills(&self) -> Kills {
        let group = self.groups().first().and_then(ControlGroup::kills);
        let machine = || field(&self.proc.join("vmstat"), "oom_kill");
        Kills { machine: if group.is_none() { machine() } else { None }, group }
    }

    fn meminfo(&self, name: &str) -> Option<u64> {
        field(&self.proc.join("meminfo"), &format!("{name}:")).map(|kib| kib * 1024)
    }

    /// The control groups of this process that account for memory, its own first.
    fn groups(&self) -> Vec<ControlGroup> {
        let text = fs::read_to_string(self.proc.join("self/cgroup")).unwrap_or_default();
        for line in text.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
            let groups = if controllers.split(',').any(|controller| controller == "memory") {
                groups_above(&self.cgroups.join("memory"), path, Version::One)
            } else if controllers.is_empty() {
                groups_above(&self.cgroups, path, Version::Two)
            } else {
                continue;
            };
            if !groups.is_empty() {
                return groups;
            }
        }
        Vec::new()
    }
}

impl Kills {
    /// Whether a process that ran since `self` may have been among those killed. The count of its own control group
    /// decides; without one that of the machine.
    pub fn rose_until(self, now: Self) -> bool {
        let rose = |before: Option<u64>, now: Option<u64>| Some(now? > before?);
        rose(self.group, now.group).or_else(|| rose(self.machine, now.machine)).unwrap_or(false)
    }
}

#[derive(Debug, Clone, Copy)]
enum Version {
    One,
    Two,
}

/// A control group's folder.
struct ControlGroup {
    folder: PathBuf,
    version: Version,
}

impl ControlGroup {
    fn limit(&self) -> Option<u64> {
        match self.version {
            // Without a limit the first version says a number near 2⁶³.
            Version::One => number(&self.folder.join("memory.limit_in_bytes")).filter(|limit| *limit < 1 << 60),
            // Without a limit the second version says `max`.
            Version::Two => number(&self.folder.join("memory.max")),
        }
    }

    /// What may still be taken: files that were read and are kept in memory go first.
    fn left(&self) -> Option<u64> {
        // Statistics are dear to read: the kernel adds them up for it.
        let limit = self.limit()?;
        let (used, stale) = match self.version {
            Version::One => ("memory.usage_in_bytes", "total_inactive_file"),
            Version::Two => ("memory.current", "inactive_file"),
        };
        let used = number(&self.folder.join(used))?;
        let stale = field(&self.folder.join("memory.stat"), stale).unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(stale)))
    }

    fn kills(&self) -> Option<u64> {
        let file = match self.version {
            Version::One => "memory.oom_control",
            Version::Two => "memory.events",
        };
        field(&self.folder.join(file), "oom_kill")
    }
}

/// The group of a path and those around it, as far as they are visible here: in a container the path may be the host's.
fn groups_above(root: &Path, path: &str, version: Version) -> Vec<ControlGroup> {
    let relative = Path::new(path.trim_start_matches('/'));
    let folders = relative.ancestors().map(|ancestor| root.join(ancestor));
    let file = match version {
        Version::One => "memory.usage_in_bytes",
        Version::Two => "memory.current",
    };
    folders.filter(|folder| folder.join(file).exists()).map(|folder| ControlGroup { folder, version }).collect()
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// Bytes for a person, in words: `7.5 GiB`, `512 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes < f64::from(1 << 30) {
        true => format!("{:.0} MiB", bytes / f64::from(1 << 20)),
        false => format!("{:.1} GiB", bytes / f64::from(1 << 30)),
    }
}

/// The number behind a name at the begin of a line.
fn field(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut words| if words.next()? == name { words.next()?.parse().ok() } else { None })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, file: &str, text: &str) {
        let path = folder.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn machine(folder: &Path, own: &str) -> Memory {
        write(folder, "proc/meminfo", "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    800 kB\n");
        write(folder, "proc/vmstat", "pgfault 1\noom_kill 4\n");
        write(folder, "proc/self/cgroup", own);
        Memory::at(&folder.join("proc"), &folder.join("cgroup"))
    }

    #[test]
    fn without_a_control_group_the_machine_counts() {
        let folder = tempfile::tempdir().unwrap();
        let memory = machine(folder.path(), "0::/\n");
        assert_eq!((memory.total(), memory.available()), (Some(1000 << 10), Some(800 << 10)));
        let before = memory.kills();
        assert!(!before.rose_until(memory.kills()));
        write(folder.path(), "proc/vmstat", "oom_kill 5\n");
        assert!(before.rose_until(memory.kills()));
    }

    #[test]
    fn the_tightest_control_group_counts() {
        let folder = tempfile::tempdir().unwrap();
        let memory = machine(folder.path(), "1:cpu:/x\n0::/jobs/ours\n");
        for (file, text) in [
            ("jobs/ours/memory.max", "max"),
            ("jobs/ours/memory.current", "1000"),
            ("jobs/ours/memory.events", "low 0\nmax 3\noom 1\noom_kill 0\n"),
            ("jobs/memory.max", "500000"),
            ("jobs/memory.current", "300000"),
            ("jobs/memory.stat", "anon 1\ninactive_file 100000\n"),
        ] {
            write(&folder.path().join("cgroup"), file, text);
        }
        assert_eq!((memory.total(), memory.available()), (Some(500_000), Some(300_000)));
        let before = memory.kills();
        // A process was killed somewhere else on the machine: it was not one of ours.
        write(folder.path(), "proc/vmstat", "oom_kill 5\n");
        assert!(!before.rose_until(memory.kills()));
        write(&folder.path().join("cgroup"), "jobs/ours/memory.events", "oom_kill 1\n");
        assert!(before.rose_until(memory.kills()));
    }

    #[test]
    fn the_first_version_is_read_too() {
        let folder = tempfile::tempdir().unwrap();
        let memory = machine(folder.path(), "4:memory:/ours\n0::/\n");
        for (file, text) in [
            ("ours/memory.limit_in_bytes", "400000"),
            ("ours/memory.usage_in_bytes", "150000"),
            ("ours/memory.stat", "total_inactive_file 50000\n"),
            ("ours/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"),
            ("memory.limit_in_bytes", "9223372036854771712"),
            ("memory.usage_in_bytes", "150000"),
        ] {
            write(&folder.path().join("cgroup/memory"), file, text);
        }
        assert_eq!((memory.total(), memory.available()), (Some(400_000), Some(300_000)));
        assert_eq!(memory.kills(), Kills { machine: None, group: Some(2) });
    }

    #[test]
    fn this_machine_tells() {
        let memory = Memory::default();
        assert!(memory.total().unwrap() >= memory.held_by(std::process::id()).unwrap());
        assert!(memory.available().unwrap() <= memory.total().unwrap());
    }
}
