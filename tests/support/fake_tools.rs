//! Stand-ins for the vendors' tools: shell scripts that print what the real ones do, in a folder that is the whole
//! `PATH`.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses its own part of this; tests may unwrap")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

/// The folder, gone when the test ends.
pub(crate) struct FakeTools {
    folder: tempfile::TempDir,
}

/// A block that a tool printed, from the readers' own tests.
pub(crate) fn block(path: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("devices/tests").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

impl FakeTools {
    /// A machine without any tool.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for program in ["cat", "sleep"] {
            let real = ["/bin", "/usr/bin"]
                .map(|place| PathBuf::from(place).join(program))
                .into_iter()
                .find(|path| path.exists());
            symlink(real.unwrap(), folder.path().join(program)).unwrap();
        }
        // NVML of the machine that the tests run on must not answer: this file is found before it and is no library.
        fs::create_dir(folder.path().join("lib")).unwrap();
        fs::write(folder.path().join("lib/libnvidia-ml.so.1"), "").unwrap();
        Self { folder }
    }

    /// Installs a tool: the text of a shell script.
    pub(crate) fn script(&self, name: &str, script: &str) {
        super::install_script(&format!("#!/bin/sh\n{script}\n"), self.folder.path().join(name));
    }

    /// Installs a tool that prints one of these by its first argument that matches.
    pub(crate) fn answers(&self, name: &str, answers: &[(&str, &str)]) {
        let case = |(pattern, answer): &(&str, &str)| format!("{pattern}) cat <<'END'\n{answer}\nEND\n;;\n");
        self.script(name, &format!("case \"$*\" in\n{}esac", answers.iter().map(case).collect::<String>()));
    }

    /// Installs an `npu-smi` that prints these blocks of `devices/tests/npu-smi`.
    pub(crate) fn npu_smi(&self, info: &str, topo: &str) {
        let (info, topo) = (block(&format!("npu-smi/{info}")), block(&format!("npu-smi/{topo}")));
        self.answers("npu-smi", &[("info", &info), ("'info -t topo'", &topo)]);
    }

    /// Lets a command see these tools and no others, and none of the caller's variables for devices.
    pub(crate) fn give_to(&self, command: &mut Command) {
        command.env("PATH", self.folder.path()).env("LD_LIBRARY_PATH", self.folder.path().join("lib"));
        command.env_remove("PIPELINE_PYTHON");
        let ours = ["HCCL_", "ASCEND_", "NCCL_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "MASTER_"];
        for (name, _) in std::env::vars_os() {
            if ours.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
                command.env_remove(name);
            }
        }
    }
}
