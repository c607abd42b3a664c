//! A folder that looks like a machine, with tools that are small shell scripts.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use crate::doctor::{Finding, Installed, Limits, Python, Subject, Variable, VariableSource};
use crate::{Device, DeviceKind, Inventory, Machine};

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

/// What the doctor looks at: devices on such a machine, and whatever else a test puts there.
pub(crate) struct TestSubject {
    pub(crate) machine: Machine,
    pub(crate) inventory: Inventory,
    pub(crate) variables: Vec<Variable>,
    pub(crate) limits: Limits,
    pub(crate) python: Python,
}

impl TestSubject {
    /// Devices of a kind, by their names.
    pub(crate) fn new(machine: &TestMachine, kind: DeviceKind, names: &[&str]) -> Self {
        let devices = (0..).zip(names).map(|(index, name)| Device::new(kind, index, *name)).collect();
        Self {
            machine: machine.machine(),
            inventory: Inventory { devices, ..Inventory::default() },
            variables: Vec::new(),
            limits: Limits::default(),
            python: Python::missing(),
        }
    }

    pub(crate) fn subject(&self) -> Subject<'_> {
        let Self { machine, inventory, variables, limits, python } = self;
        Subject { machine, inventory, variables, limits: *limits, python }
    }
}

/// A variable of the environment.
pub(crate) fn variable(name: &str, value: &str) -> Variable {
    Variable { name: name.to_owned(), value: value.to_owned(), place: VariableSource::Environment }
}

/// A Python that has all that the torch worker needs, and these packages.
pub(crate) fn python(packages: &[(&str, &str)]) -> Python {
    let needed = ["pipeline_torch_worker", "transformers", "peft", "safetensors", "numpy", "bitsandbytes"];
    let all = packages.iter().copied().chain(needed.map(|name| (name, "1.0")));
    let installed = Installed {
        python: "3.11.2".to_owned(),
        executable: "python3".to_owned(),
        packages: all.map(|(name, version)| (name.to_owned(), Some(version.to_owned()))).collect(),
        ..Installed::default()
    };
    Python { installed: Some(installed), ..Python::missing() }
}

/// A Python of which something else is installed.
pub(crate) fn with(mut python: Python, change: impl FnOnce(&mut Installed)) -> Python {
    change(python.installed.as_mut().unwrap());
    python
}

/// Which checks have found something.
pub(crate) fn names(findings: &[Finding]) -> Vec<&'static str> {
    findings.iter().map(|finding| finding.check).collect()
}
