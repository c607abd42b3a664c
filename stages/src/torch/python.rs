//! The Python that has the torch worker.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use engine::error::{Cause, StageError};

/// Names the Python to use.
const VARIABLE: &str = "PIPELINE_PYTHON";

/// The package.
pub(super) const PACKAGE: &str = "pipeline_torch_worker";

/// Looks for the package and what it needs, without importing any of it: that takes seconds, and some of it needs a device.
const LOOK: &str = "
import importlib.metadata, importlib.util, json, sys
found = {'python': sys.version.split()[0]}
for name in ('pipeline_torch_worker', 'torch', 'transformers', 'peft', 'safetensors', 'pyarrow', 'torch_npu'):
    if importlib.util.find_spec(name) is not None:
        try:
            found[name] = importlib.metadata.version(name.replace('_', '-'))
        except importlib.metadata.PackageNotFoundError:
            found[name] = ''
print(json.dumps(found))
";

/// What every device needs.
const NEEDED: [&str; 6] = [PACKAGE, "torch", "transformers", "peft", "safetensors", "pyarrow"];

/// A Python.
#[derive(Debug, Clone)]
pub(super) struct Python {
    program: OsString,
    /// Whether the user named it.
    named: bool,
}

/// The packages that a Python has, with their versions as far as they say.
pub(super) type Packages = BTreeMap<String, String>;

impl Python {
    /// The one that `PIPELINE_PYTHON` names, else `python3` of `PATH`.
    pub fn find() -> Self {
        match std::env::var_os(VARIABLE).filter(|program| !program.is_empty()) {
            Some(program) => Self { program, named: true },
            None => Self { program: "python3".into(), named: false },
        }
    }

    /// The program.
    pub fn program(&self) -> &OsString {
        &self.program
    }

    /// The packages it has.
    ///
    /// # Errors
    /// Fails where it cannot be started, or lacks one that every device needs; says how to install it.
    pub fn packages(&self) -> Result<Packages, StageError> {
        let packages = self.look().map_err(|error| self.not_there(&error))?;
        let missing: Vec<&str> = NEEDED.into_iter().filter(|name| !packages.contains_key(*name)).collect();
        if missing.is_empty() {
            return Ok(packages);
        }
        let program = self.program.display();
        let message = format!("the torch worker is not installed: `{program}` has no {}", missing.join(", no "));
        Err(StageError::new(Cause::Machine, message).with_help(format!(
            "install it with `{program} -m pip install ./workers/torch` in a checkout of this project (docs/devices.md has the \
             line for each device), or name the Python that has it in {VARIABLE}; {}",
            without_it()
        )))
    }

    fn look(&self) -> io::Result<Packages> {
        let mut command = Command::new(&self.program);
        let output = command.args(["-c", LOOK]).stdin(Stdio::null()).stderr(Stdio::piped()).output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        match serde_json::from_slice(&output.stdout) {
            Ok(found) if output.status.success() => Ok(found),
            _ => Err(io::Error::other(format!("it answered with {}: {}", output.status, text.trim()))),
        }
    }

    fn not_there(&self, error: &io::Error) -> StageError {
        let program = self.program.display();
        let who = if self.named { format!("`{program}`, which {VARIABLE} names,") } else { format!("`{program}`") };
        let message = format!("the torch worker needs Python 3.10 or newer: {who} cannot be used");
        let help = format!(
            "install Python and the worker (docs/devices.md has the lines), or name a Python in {VARIABLE}; {}",
            without_it()
        );
        StageError::new(Cause::Machine, message).with_source(error.to_string()).with_help(help)
    }
}

fn without_it() -> &'static str {
    "without it stages compute on the CPU: `resources: { device: cpu }`"
}

/// Whether there is a Python with the torch worker. Asked once in the life of a process.
pub(crate) fn is_installed() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| Python::find().packages().is_ok())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A program that answers as a Python would.
    fn python(folder: &tempfile::TempDir, script: &str) -> Python {
        let program = folder.path().join("python");
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Python { program: program.into(), named: true }
    }

    #[test]
    fn what_is_missing_is_named_with_the_line_that_installs_it() {
        let folder = tempfile::tempdir().unwrap();
        let bare = python(&folder, r#"echo '{"python": "3.12.1", "torch": "2.9.0", "safetensors": ""}'"#);
        let error = bare.packages().unwrap_err();
        assert_eq!(error.cause, Cause::Machine);
        assert!(
            error.message.ends_with("has no pipeline_torch_worker, no transformers, no peft, no pyarrow"),
            "{error}"
        );
        assert!(error.help.unwrap().contains("-m pip install ./workers/torch"));
    }

    #[test]
    fn a_python_that_is_none_is_told_from_one_without_packages() {
        let folder = tempfile::tempdir().unwrap();
        let error = python(&folder, "echo 'no such thing' >&2; exit 7").packages().unwrap_err();
        assert!(error.message.contains("which PIPELINE_PYTHON names, cannot be used"), "{error}");
        assert!(error.source.unwrap().to_string().ends_with("no such thing"));
        let error = Python { program: "/nowhere/python".into(), named: true }.packages().unwrap_err();
        assert!(error.message.contains("`/nowhere/python`"), "{error}");
    }
}
