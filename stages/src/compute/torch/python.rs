//! The Python that has the torch worker.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use engine::error::{Cause, StageError};
use nix::unistd::{AccessFlags, access};

/// Names the Python to use.
const VARIABLE: &str = "PIPELINE_PYTHON";

pub(super) const PACKAGE: &str = "pipeline_torch_worker";

/// What the worker computes weights in 4 bits with.
const BITSANDBYTES: &str = "bitsandbytes";

/// Looks for the package and what it needs, without importing any of it: that takes seconds, and some of it needs a
/// device.
const LOOK: &str = "
import importlib.metadata, importlib.util, json, sys
found = {'python': sys.version.split()[0]}
for name in ('pipeline_torch_worker', 'torch', 'transformers', 'peft', 'safetensors', 'numpy', 'torch_npu', 'bitsandbytes'):
    if importlib.util.find_spec(name) is not None:
        try:
            found[name] = importlib.metadata.version(name.replace('_', '-'))
        except importlib.metadata.PackageNotFoundError:
            found[name] = ''
print(json.dumps(found))
";

/// What every device needs.
const NEEDED: [&str; 6] = [PACKAGE, "torch", "transformers", "peft", "safetensors", "numpy"];

#[derive(Debug, Clone)]
pub(super) struct Python {
    program: OsString,
    /// Whether the user named it.
    named: bool,
}

/// The packages that a Python has, with their versions as far as they say.
pub(super) type Packages = BTreeMap<String, String>;

impl Python {
    /// The one that `PIPELINE_PYTHON` names, else that of the environment which this program is installed in with the
    /// worker, else `python3` of `PATH`.
    pub(super) fn find() -> Self {
        let of_environment = || own_environment().map(|prefix| prefix.join("bin/python3").into());
        match named() {
            Some(program) => Self { program, named: true },
            None => Self { program: of_environment().unwrap_or_else(|| "python3".into()), named: false },
        }
    }

    pub(super) fn program(&self) -> &OsString {
        &self.program
    }

    /// The packages it has.
    ///
    /// # Errors
    /// Fails where it cannot be started, or lacks one that every device needs; says how to install it.
    pub(super) fn packages(&self) -> Result<Packages, StageError> {
        let packages = self.look().map_err(|error| self.not_there(&error))?;
        let missing = missing_from(&packages);
        if missing.is_empty() {
            return Ok(packages);
        }
        let program = self.program.display();
        let message = format!("the torch worker is not installed: `{program}` has no {}", missing.join(", no "));
        Err(StageError::new(Cause::Machine, message).with_help(format!(
            "install it with {}; {}",
            how_to_install(),
            without_it()
        )))
    }

    /// Whether there is such a program.
    fn is_there(&self) -> bool {
        let program = Path::new(&self.program);
        let can_be_run = |path: &Path| path.is_file() && access(path, AccessFlags::X_OK).is_ok();
        if folder_of(program).is_some() {
            return can_be_run(program);
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).any(|folder| can_be_run(&folder.join(program)))
    }

    /// Whether a package lies where this Python looks for it, as far as folders tell.
    fn has_folder_of(&self, package: &str) -> bool {
        let program = Path::new(&self.program);
        let prefixes = match folder_of(program) {
            // What its environment has.
            Some(folder) => vec![folder.join("..")],
            None => prefixes(program, std::env::var_os("PATH"), std::env::var_os("HOME")),
        };
        (!self.named || self.is_there()) && is_below(&prefixes, package)
    }

    /// What keeps it from starting the worker, as it says itself: the end of a sentence about the worker, and what to
    /// do.
    fn lack(&self) -> Option<(String, String)> {
        let program = self.program.display();
        if self.named && !self.is_there() {
            let lack = format!("and there is no program `{program}`, which {VARIABLE} names");
            return Some((lack, format!("name the Python that has the worker in {VARIABLE}")));
        }
        let install = || format!("install the worker: {}", how_to_install());
        let who = format!("and `{program}`, the Python of {VARIABLE},");
        match self.look().map(|packages| missing_from(&packages)) {
            Ok(missing) if missing.is_empty() => None,
            _ if !self.named => Some(("which is not installed here".to_owned(), install())),
            Ok(missing) => Some((format!("{who} has no {}", missing.join(", no ")), install())),
            Err(error) => {
                // Python ends what it says of a failure with what failed.
                let said = error.to_string();
                let said = said.lines().last().unwrap_or_default().trim_end_matches([':', ' ']);
                let help = format!("name a Python 3.10 or newer that has the worker in {VARIABLE}");
                Some((format!("{who} cannot be used: {said}"), help))
            }
        }
    }

    fn look(&self) -> io::Result<Packages> {
        let mut command = Command::new(&self.program);
        let output = command
            .args(["-c", LOOK])
            .env("PYTHONSAFEPATH", "1")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        match serde_json::from_slice(&output.stdout) {
            Ok(found) if output.status.success() => Ok(found),
            _ => Err(io::Error::other(format!("it returned {}: {}", output.status, text.trim()))),
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
    "without it this program computes in f32 and bf16, on the CPU: `resources: { device: cpu }`, and neither `dtype: f16` nor `backend: torch`"
}

/// The Python of the torch worker, whether the worker is there or not.
pub fn worker_python() -> PathBuf {
    Python::find().program.into()
}

fn named() -> Option<OsString> {
    std::env::var_os(VARIABLE).filter(|program| !program.is_empty())
}

/// Whether `PIPELINE_PYTHON` names a program that is not there.
pub(crate) fn is_named_in_vain() -> bool {
    let python = Python::find();
    python.named && !python.is_there()
}

/// Why the torch worker cannot be started, where nothing else will do: the end of a sentence about the worker, and what
/// to do. As folders tell, and where they do not, as Python says itself, which takes a moment.
pub(crate) fn what_it_lacks() -> Option<(String, String)> {
    static ANSWER: OnceLock<Option<(String, String)>> = OnceLock::new();
    let asked = || {
        let python = Python::find();
        if python.has_folder_of(PACKAGE) { None } else { python.lack() }
    };
    ANSWER.get_or_init(asked).clone()
}

/// The environment that one wheel has installed both this program and the worker into.
fn own_environment() -> Option<&'static Path> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOUND.get_or_init(|| environment_of(&std::env::current_exe().ok()?)).as_deref()
}

fn environment_of(program: &Path) -> Option<PathBuf> {
    let prefix = program.parent().filter(|folder| folder.ends_with("bin"))?.parent()?.to_owned();
    (prefix.join("bin/python3").exists() && is_below(std::slice::from_ref(&prefix), PACKAGE)).then_some(prefix)
}

/// The command that installs the worker, as part of a sentence.
pub(crate) fn how_to_install() -> String {
    let program = Python::find().program;
    format!(
        "`{} -m pip install ./workers/torch` in a checkout of this project (docs/devices.md has the line for each device), or name the \
         Python that has it in {VARIABLE}",
        program.display()
    )
}

/// Whether the torch worker can be started, where nothing else will do: as [`what_it_lacks`].
pub(crate) fn is_usable() -> bool {
    what_it_lacks().is_none()
}

/// The command that installs bitsandbytes beside the worker.
pub(crate) fn how_to_install_bitsandbytes() -> String {
    format!("`{} -m pip install {BITSANDBYTES}`", Python::find().program.display())
}

/// Whether bitsandbytes lies beside the torch worker, where nothing else will do: as [`is_usable`].
pub(crate) fn has_bitsandbytes() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    let asked = || Python::find().packages().is_ok_and(|packages| packages.contains_key(BITSANDBYTES));
    has_folder_of_bitsandbytes() || *ANSWER.get_or_init(asked)
}

/// Whether bitsandbytes lies beside the torch worker, as far as folders tell.
pub(crate) fn has_folder_of_bitsandbytes() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| is_installed() && Python::find().has_folder_of(BITSANDBYTES))
}

/// Whether the torch worker can be started here, as Python says itself.
#[cfg(test)]
pub(crate) fn can_start() -> bool {
    Python::find().packages().is_ok()
}

/// Whether there is a Python with the torch worker, as far as folders tell: a plan asks for it, and starts no program.
/// One that the user named counts: whoever names it means to use it.
pub(crate) fn is_installed() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| named().is_some() || Python::find().has_folder_of(PACKAGE))
}

/// The folder that a program is named with; `None` of one that is looked for in `PATH`.
fn folder_of(program: &Path) -> Option<&Path> {
    program.parent().filter(|folder| *folder != Path::new(""))
}

/// The folders that packages of a Python of `PATH` lie below: that of its environment or of the system, and the user's
/// own.
fn prefixes(program: &Path, path: Option<OsString>, home: Option<OsString>) -> Vec<PathBuf> {
    let path = path.unwrap_or_default();
    let folder = std::env::split_paths(&path).find(|folder| folder.join(program).exists());
    let prefix = folder.and_then(|folder| Some(folder.parent()?.to_owned()));
    let Some(prefix) = prefix else { return Vec::new() };
    let local = prefix.join("local");
    [Some(prefix), Some(local), home.map(|home| PathBuf::from(home).join(".local"))].into_iter().flatten().collect()
}

/// What every device needs and is not among these.
fn missing_from(packages: &Packages) -> Vec<&'static str> {
    NEEDED.into_iter().filter(|name| !packages.contains_key(*name)).collect()
}

/// Whether a package, or the record of its installation, lies below one of these.
fn is_below(prefixes: &[PathBuf], package: &str) -> bool {
    let entries = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let named = |path: &Path, start: &str| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(start))
    };
    let of_versions = prefixes.iter().flat_map(|prefix| entries(&prefix.join("lib")));
    let of_versions = of_versions.filter(|path| named(path, "python3"));
    let packages = of_versions.flat_map(|lib| ["site-packages", "dist-packages"].map(|name| lib.join(name)));
    packages.into_iter().any(|folder| entries(&folder).any(|path| named(&path, package)))
}

#[cfg(test)]
mod tests {
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
        assert!(error.message.ends_with("has no pipeline_torch_worker, no transformers, no peft, no numpy"), "{error}");
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

    #[test]
    fn a_python_that_is_named_is_looked_for_before_its_folders_are() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        let package = folder.path().join("lib/python3.12/site-packages").join(PACKAGE);
        [&bin, &package].into_iter().for_each(|path| fs::create_dir_all(path).unwrap());
        let named = Python { program: bin.join("python").into(), named: true };
        let in_vain = |python: &Python| {
            let (lack, help) = python.lack().unwrap();
            assert!(lack.starts_with("and there is no program `") && lack.ends_with("PIPELINE_PYTHON names"), "{lack}");
            assert_eq!(help, "name the Python that has the worker in PIPELINE_PYTHON");
            !python.is_there() && !python.has_folder_of(PACKAGE)
        };
        assert!(in_vain(&named));
        fs::write(bin.join("python"), "").unwrap();
        assert!(in_vain(&named), "it cannot be run");
        fs::set_permissions(bin.join("python"), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(named.is_there() && named.has_folder_of(PACKAGE) && !named.has_folder_of(BITSANDBYTES));
        assert!(in_vain(&Python { program: "no-such-python".into(), named: true }));
        let unnamed = Python { program: "no-such-python".into(), named: false };
        assert_eq!(unnamed.lack().unwrap().0, "which is not installed here");
    }

    #[test]
    fn why_a_named_python_cannot_start_the_worker_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let lack = |script: &str| python(&folder, script).lack();
        let who = format!("and `{}`, the Python of PIPELINE_PYTHON,", folder.path().join("python").display());
        let has = |packages: &[&str]| {
            let versions: Packages = packages.iter().map(|name| ((*name).to_owned(), "1.0".to_owned())).collect();
            format!("echo '{}'", serde_json::to_string(&versions).unwrap())
        };
        let without_torch: Vec<&str> = NEEDED.into_iter().filter(|name| *name != "torch").collect();
        let (message, help) = lack(&has(&without_torch)).unwrap();
        assert_eq!(message, format!("{who} has no torch"));
        assert!(help.starts_with("install the worker: `"), "{help}");
        let (message, help) = lack("printf 'Traceback:\\nImportError: no json\\n' >&2; exit 1").unwrap();
        assert_eq!(message, format!("{who} cannot be used: ImportError: no json"));
        assert_eq!(help, "name a Python 3.10 or newer that has the worker in PIPELINE_PYTHON");
        let (message, _) = lack("exit 7").unwrap();
        assert_eq!(message, format!("{who} cannot be used: it returned exit status: 7"));
        assert_eq!(lack(&has(&NEEDED)), None);
    }

    #[test]
    fn an_environment_with_the_worker_is_known_by_its_folders() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        fs::create_dir_all(&bin).unwrap();
        fs::write(bin.join("python3"), "").unwrap();
        let python = Path::new("python3");
        let found = || is_below(&prefixes(python, Some(bin.clone().into()), None), PACKAGE);
        let of_program = || environment_of(&bin.join("pipeline"));
        assert!(!found() && of_program().is_none());
        fs::create_dir_all(folder.path().join("lib/python3.12/site-packages/pipeline_torch_worker-0.1.0.dist-info"))
            .unwrap();
        assert!(found());
        assert_eq!(of_program().as_deref(), Some(folder.path()));
        assert!(environment_of(&folder.path().join("pipeline")).is_none());
        assert!(!is_below(&prefixes(python, Some("/nowhere".into()), None), PACKAGE));
    }
}
