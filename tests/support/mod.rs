//! One temporary project folder and the built program, for the end-to-end tests.

#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses its own part of this; tests may unwrap")]

pub(crate) mod fake_tools;
pub(crate) mod server;
pub(crate) mod terminal;
pub(crate) mod tiny;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::unistd::Uid;
use test_harness::{Requirement, Unmet};

/// Fails where this user cannot become another.
pub(crate) fn needs_root() -> Result<(), Unmet> {
    if Uid::effective().is_root() { Ok(()) } else { Err(Requirement::Root.unmet("only root can become another user")) }
}

/// A folder with a pipeline in it, gone when the test ends.
pub(crate) struct Project {
    folder: tempfile::TempDir,
}

/// What a run of the program left behind.
pub(crate) struct Ran {
    arguments: String,
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Project {
    /// An empty project.
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// A project with the small pipeline of `tests/pipelines/NAME` and its data.
    pub(crate) fn with_pipeline(name: &str) -> Self {
        let project = Self::new();
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pipelines");
        for entry in fs::read_dir(&from).unwrap() {
            let path = entry.unwrap().path();
            let file = path.file_name().unwrap();
            if file == name || path.extension().is_some_and(|extension| extension == "jsonl") {
                fs::copy(&path, project.path(&file.to_string_lossy())).unwrap();
            }
        }
        assert!(project.path(name).is_file(), "tests/pipelines has no {name}");
        project
    }

    /// A path in the project.
    pub(crate) fn path(&self, relative: &str) -> PathBuf {
        self.folder.path().join(relative)
    }

    /// Writes a file of the project.
    pub(crate) fn write(&self, relative: &str, text: &str) {
        fs::write(self.path(relative), text).unwrap();
    }

    /// Replaces text that stands once in a file of the project.
    pub(crate) fn edit(&self, relative: &str, from: &str, to: &str) {
        let text = fs::read_to_string(self.path(relative)).unwrap();
        assert_eq!(text.matches(from).count(), 1, "`{from}` should stand once in {relative}");
        self.write(relative, &text.replace(from, to));
    }

    /// The program, to be run in the project's folder with nothing of the caller's environment that it reads.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program(self.folder.path());
        command.args(arguments);
        command
    }

    /// Runs the program to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Ran {
        Ran::of(self.command(arguments), arguments)
    }

    /// Starts the program in a process group of its own.
    pub(crate) fn start(&self, arguments: &[&str]) -> Child {
        use std::os::unix::process::CommandExt;
        self.command(arguments)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Processes whose command line names this project's folder, with their arguments: the stages of its runs.
    pub(crate) fn processes(&self) -> Vec<(i32, String)> {
        let folder = self.folder.path().to_string_lossy().into_owned();
        let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let path = entry.ok()?.path();
            let pid = path.file_name()?.to_str()?.parse().ok()?;
            // A process that ended between the two looks has no command line any more; neither has a zombie.
            let line = String::from_utf8_lossy(&fs::read(path.join("cmdline")).ok()?).replace('\0', " ");
            line.contains(&folder).then_some((pid, line))
        });
        processes.collect()
    }
}

/// Copies a file to one that can be run. Another process does it: had this one the copy open for writing while another
/// test starts a program, that could hold it open, too, and the system runs no file that is open for writing.
pub(crate) fn install(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let copied = Command::new("install").args(["-m", "755"]).arg(from.as_ref()).arg(to.as_ref()).status().unwrap();
    assert!(copied.success());
}

/// As [`install`], of a text.
pub(crate) fn install_script(text: &str, to: impl AsRef<Path>) {
    let script = tempfile::NamedTempFile::new().unwrap();
    fs::write(&script, text).unwrap();
    install(&script, to);
}

/// The program in a folder, with a plain environment.
pub(crate) fn program(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pipeline"));
    for name in
        ["PIPELINE_HOME", "PIPELINE_PYTHON", "CLICOLOR_FORCE", "NO_COLOR", "COLUMNS", "LC_ALL", "LC_CTYPE", "TERM"]
    {
        command.env_remove(name);
    }
    command.env("LANG", "C.UTF-8").current_dir(folder).stdin(Stdio::null());
    command
}

impl Ran {
    /// Runs a command to its end.
    pub(crate) fn of(mut command: Command, arguments: &[&str]) -> Self {
        let Output { status, stdout, stderr } = command.output().unwrap();
        Self {
            arguments: arguments.join(" "),
            code: status.code(),
            stdout: String::from_utf8(stdout).unwrap(),
            stderr: String::from_utf8(stderr).unwrap(),
        }
    }

    /// Asserts the exit code.
    #[track_caller]
    pub(crate) fn ends_with(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self}");
        self
    }

    /// Asserts that standard output holds a text.
    #[track_caller]
    pub(crate) fn says(self, text: &str) -> Self {
        assert!(self.stdout.contains(text), "standard output lacks `{text}`:\n{self}");
        self
    }

    /// Asserts that standard error holds a text.
    #[track_caller]
    pub(crate) fn warns(self, text: &str) -> Self {
        assert!(self.stderr.contains(text), "standard error lacks `{text}`:\n{self}");
        self
    }

    /// Asserts that standard error has a problem of this code, wherever the line with it is broken.
    #[track_caller]
    pub(crate) fn reports(self, code: &str) -> Self {
        let text = self.stderr.replace("-\n  │ ", "-");
        assert!(text.contains(&format!("[{code}]")), "standard error has no problem `{code}`:\n{self}");
        self
    }

    /// Asserts that a run with `--format json` made the results of so many stages, and had the others.
    #[track_caller]
    pub(crate) fn made(self, stages: u64) -> Self {
        let counts = self.json()["counts"].clone();
        assert_eq!((&counts["done"], &counts["failed"]), (&stages.into(), &0.into()), "{self}");
        self
    }

    /// Asserts that `runs verify --format json` did so many stages again, each with an equal result.
    #[track_caller]
    pub(crate) fn found_equal(self, stages: usize) -> Self {
        let verified = self.json()["stages"].clone();
        let verified = verified.as_array().unwrap();
        assert_eq!(verified.len(), stages, "{self}");
        assert!(verified.iter().all(|stage| stage["verdict"]["verdict"] == "equal"), "{self}");
        self
    }

    /// Asserts that what is listed with `--format json` is empty.
    #[track_caller]
    pub(crate) fn lists_nothing(self) -> Self {
        assert_eq!(self.json(), serde_json::json!([]), "{self}");
        self
    }

    /// Standard output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}:\n{self}"))
    }
}

impl std::fmt::Display for Ran {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { arguments, code, stdout, stderr } = self;
        write!(f, "pipeline {arguments} ended with {code:?}\n--- stdout\n{stdout}--- stderr\n{stderr}---")
    }
}
