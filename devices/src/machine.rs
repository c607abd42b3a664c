//! Where a machine is asked: its file tree, the folders in which its tools are looked for, and how long they may take.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::tool::{self, ToolError};

/// How long a tool may take: `npu-smi` on a machine of sixteen busy chips takes several seconds.
const LIMIT: Duration = Duration::from_secs(15);

/// A machine: this one, or a folder of a test that looks like one.
#[derive(Debug, Clone)]
pub struct Machine {
    root: PathBuf,
    search: OsString,
    limit: Duration,
}

impl Machine {
    /// This one, with the tools on `PATH`.
    pub fn here() -> Self {
        Self::at("/", std::env::var_os("PATH").unwrap_or_default())
    }

    /// One whose `/proc`, `/sys` and `/dev` are in a folder, and whose tools in those of `search` (in the form of
    /// `PATH`).
    pub fn at(root: impl Into<PathBuf>, search: impl Into<OsString>) -> Self {
        Self { root: root.into(), search: search.into(), limit: LIMIT }
    }

    /// The same, whose tools may take so long.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Whether this program runs on it.
    pub(crate) fn is_here(&self) -> bool {
        self.root == Path::new("/")
    }

    /// How long a tool may take.
    pub fn limit(&self) -> Duration {
        self.limit
    }

    /// A file of it, by its absolute path.
    pub fn path(&self, absolute: &str) -> PathBuf {
        self.root.join(absolute.trim_start_matches('/'))
    }

    /// The text of a file of it.
    pub fn read(&self, absolute: &str) -> Option<String> {
        std::fs::read_to_string(self.path(absolute)).ok()
    }

    /// A tool of it, where it is installed.
    pub fn tool(&self, name: &str) -> Option<PathBuf> {
        std::env::split_paths(&self.search).map(|folder| folder.join(name)).find(|path| is_executable(path))
    }

    /// A tool of it at a fixed place, where it is installed.
    pub(crate) fn installed(&self, absolute: &str) -> Option<PathBuf> {
        Some(self.path(absolute)).filter(|path| is_executable(path))
    }

    /// What one of its tools prints.
    pub(crate) fn run(&self, tool: &Path, arguments: &[&str]) -> Result<String, ToolError> {
        tool::run(tool, arguments, self.limit)
    }

    /// The numbers of the files in a folder that are called `prefix` and a number, ascending.
    pub(crate) fn numbered(&self, folder: &str, prefix: &str) -> Vec<u32> {
        let Ok(entries) = std::fs::read_dir(self.path(folder)) else { return Vec::new() };
        let number = |entry: std::io::Result<std::fs::DirEntry>| {
            entry.ok()?.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()
        };
        let mut numbers: Vec<u32> = entries.filter_map(number).collect();
        numbers.sort_unstable();
        numbers
    }
}

fn is_executable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}
