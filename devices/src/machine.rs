//! Where a machine is asked: its file tree, and the folders in which its tools are looked for.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// A machine: this one, or a folder of a test that looks like one.
#[derive(Debug, Clone)]
pub struct Machine {
    root: PathBuf,
    search: OsString,
}

impl Machine {
    /// This one, with the tools on `PATH`.
    pub fn here() -> Self {
        Self { root: PathBuf::from("/"), search: std::env::var_os("PATH").unwrap_or_default() }
    }

    /// One whose `/proc`, `/sys` and `/dev` lie in a folder, and whose tools in those of `search` (in the form of `PATH`).
    pub fn at(root: impl Into<PathBuf>, search: impl Into<OsString>) -> Self {
        Self { root: root.into(), search: search.into() }
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
}

fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}
