//! A folder that looks like a machine, with tools that are small shell scripts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use crate::Machine;

/// The folder, gone when the test ends.
pub(crate) struct TestMachine {
    root: tempfile::TempDir,
}

impl TestMachine {
    /// A machine with nothing on it but a shell.
    pub(crate) fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap() }
    }

    /// Installs a tool: the text of a shell script.
    pub(crate) fn tool(&self, name: &str, script: &str) {
        let path = self.file(&format!("tools/{name}"), &format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Writes a file under its root.
    pub(crate) fn file(&self, path: &str, text: &str) -> std::path::PathBuf {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// To be asked.
    pub(crate) fn machine(&self) -> Machine {
        Machine::at(self.root.path(), self.root.path().join("tools")).with_limit(Duration::from_secs(60))
    }
}
