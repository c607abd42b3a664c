//! The Python that the torch worker runs on: what is installed in it, and whether it can be imported.
//!
//! It is asked in a process of its own, with a time limit: importing torch takes seconds, and with a broken driver
//! beneath it may hang or crash.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::tool::{self, ToolError};

/// What asks.
const PROBE: &str = include_str!("probe.py");

/// Set to 0, it keeps `import torch` from loading the extensions of devices, of which torch_npu is one.
pub(super) const AUTOLOAD: &str = "TORCH_DEVICE_BACKEND_AUTOLOAD";

/// A Python, as far as it could be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Python {
    /// The program that was asked for.
    pub program: PathBuf,
    /// What is installed; None where it does not run.
    pub installed: Option<Installed>,
    /// Why it could not be asked, or the import not be tried.
    pub problem: Option<String>,
    /// Whether torch can be imported with the extensions of devices left out, where it cannot with them.
    pub imports_without_extensions: bool,
}

/// What is installed in a Python, and what came of importing it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Installed {
    /// Its version.
    pub python: String,
    /// The program itself.
    pub executable: String,
    /// Versions of the packages that the worker needs, by name.
    pub packages: BTreeMap<String, Option<String>>,
    /// What `import torch` ended with.
    #[serde(default)]
    pub torch_error: Option<String>,
    /// The CUDA that torch was built for.
    #[serde(default)]
    pub cuda: Option<String>,
    /// The HIP that torch was built for.
    #[serde(default)]
    pub hip: Option<String>,
    /// The GPUs that torch sees.
    #[serde(default)]
    pub gpus: Option<usize>,
    /// What `import torch_npu` ended with.
    #[serde(default)]
    pub npu_error: Option<String>,
    /// The NPUs that torch_npu sees.
    #[serde(default)]
    pub npus: Option<usize>,
}

impl Installed {
    pub fn version(&self, package: &str) -> Option<&str> {
        self.packages.get(package)?.as_deref()
    }
}

impl Python {
    /// No Python.
    pub fn missing() -> Self {
        Self { program: PathBuf::new(), installed: None, problem: None, imports_without_extensions: false }
    }

    /// Asks a Python, whose answers may take so long each.
    pub fn probe(program: &Path, limit: Duration) -> Self {
        let mut python = Self { program: program.to_owned(), ..Self::missing() };
        match ask(program, "installed", &[], limit) {
            Err(problem) => python.problem = Some(problem),
            Ok(installed) if installed.version("torch").is_none() => python.installed = Some(installed),
            Ok(installed) => match ask(program, "import", &[], limit) {
                Ok(imported) => {
                    python.imports_without_extensions = imported.torch_error.is_some()
                        && ask(program, "import", &[(AUTOLOAD, "0")], limit)
                            .is_ok_and(|again| again.torch_error.is_none());
                    python.installed = Some(imported);
                }
                Err(problem) => {
                    python.problem = Some(format!("importing torch: {problem}"));
                    python.installed = Some(installed);
                }
            },
        }
        python
    }
}

fn ask(program: &Path, what: &str, set: &[(&str, &str)], limit: Duration) -> Result<Installed, String> {
    let mut command = Command::new(program);
    command.args(["-c", PROBE, what]).envs(set.iter().copied());
    let text = match tool::run_command(command, limit) {
        Ok(text) => text,
        Err(ToolError::Start(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(format!("there is no `{}`", program.display()));
        }
        Err(error) => return Err(error.to_string()),
    };
    // Packages that print while they are imported do so before.
    let last = text.lines().rev().find(|line| line.starts_with('{')).unwrap_or_default();
    serde_json::from_str(last).map_err(|_| format!("its answer is not understood: {}", tool::said("", &text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_machine::TestMachine;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_real_python_is_understood() {
        let python = Python::probe(Path::new("python3"), LIMIT);
        let Some(installed) = python.installed else {
            println!("skipped: {}", python.problem.unwrap());
            return;
        };
        assert!(installed.python.starts_with("3."), "{}", installed.python);
        assert!(installed.packages.contains_key("torch_npu"));
    }

    #[test]
    fn a_torch_that_fails_over_an_extension_is_tried_without() {
        let machine = TestMachine::new();
        let packages = r#""packages": {"torch": "2.7.1", "torch_npu": "2.7.1"}"#;
        let head = r#""python": "3.11.2", "executable": "/usr/bin/python3""#;
        machine.tool(
            "python3",
            &format!(
                "error='\"RuntimeError: Failed to load the backend extension: torch_npu\"'\n\
                 [ \"$TORCH_DEVICE_BACKEND_AUTOLOAD\" = 0 ] && error=null\necho noise of an import\n\
                 echo '{{{head}, {packages}, \"torch_error\": '$error'}}'"
            ),
        );
        let python = Python::probe(&machine.machine().tool("python3").unwrap(), LIMIT);
        assert!(python.imports_without_extensions);
        assert!(python.installed.unwrap().torch_error.unwrap().contains("backend extension"));
    }

    #[test]
    fn one_that_crashes_or_is_missing_is_told() {
        assert_eq!(
            Python::probe(Path::new("/nowhere/python3"), LIMIT).problem.unwrap(),
            "there is no `/nowhere/python3`"
        );
        let machine = TestMachine::new();
        machine.tool("python3", "[ \"$3\" = import ] && kill -SEGV $$\necho '{\"python\": \"3.11.2\", \"executable\": \"x\", \"packages\": {\"torch\": \"2.7.1\"}}'");
        let python = Python::probe(&machine.machine().tool("python3").unwrap(), LIMIT);
        assert_eq!(python.problem.unwrap(), "importing torch: it ended with signal 11");
        assert_eq!(python.installed.unwrap().version("torch"), Some("2.7.1"));
    }
}
