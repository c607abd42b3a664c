//! The program's process: started with an environment of its own, heard line by line, and gone with everything it
//! started.
//!
//! It stays in the stage's process group, which the engine ends whole, also where the engine itself dies. What a
//! program put into another group is found by a mark in its environment. Nothing is open in it but its three streams.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::{self, PipeReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use engine::error::{Cause, OrFail, StageError};
use engine::execute::stragglers::{self, Mark};
use nix::libc;
use nix::unistd::{AccessFlags, access};

use super::mask::{Masker, Tail};

/// How long the output of processes that were just killed may take to end.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// What to run, and where.
pub(super) struct Start<'a> {
    pub arguments: Vec<String>,
    /// All of it: nothing else is inherited.
    pub environment: BTreeMap<OsString, OsString>,
    pub folder: &'a Path,
    /// What all that it starts is known by.
    pub mark: Mark,
}

/// How a program ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub status: ExitStatus,
    /// Its last lines, without secrets.
    pub last_lines: Vec<String>,
}

/// What is heard of a program.
enum Heard {
    /// So many lines so far.
    Lines(u64),
    /// It is gone, and its output has ended or not.
    Gone(io::Result<ExitStatus>),
    /// Its output has ended.
    Silence(Tail),
}

/// Runs a program to its end. What it prints goes to `log`, without secrets; `lines` hears how many lines there are.
///
/// # Errors
/// Fails where it cannot be started.
pub(super) fn run(
    start: &Start<'_>,
    masker: Masker,
    log: impl Write + Send + 'static,
    lines: &mut dyn FnMut(u64),
) -> Result<Ended, StageError> {
    let (reader, writer) = io::pipe().or_fail(Cause::Machine, || "cannot make a pipe".to_owned())?;
    let mut child = spawn(start, writer)?;
    let (sender, receiver) = mpsc::channel();
    let listener = sender.clone();
    thread::spawn(move || listen(reader, masker, log, &listener));
    thread::spawn(move || drop(sender.send(Heard::Gone(child.wait()))));

    let (mut tail, mut ended) = (None, None);
    while ended.is_none() {
        match receiver.recv().expect("the thread that waits for the child sends before it ends") {
            Heard::Lines(count) => lines(count),
            Heard::Silence(last) => tail = Some(last),
            Heard::Gone(status) => ended = Some(status),
        }
    }
    start.mark.end_stragglers();
    while tail.is_none() {
        match receiver.recv_timeout(LAST_WORDS) {
            Ok(Heard::Lines(count)) => lines(count),
            Ok(Heard::Silence(last)) => tail = Some(last),
            Ok(Heard::Gone(_)) => {}
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    let status =
        ended.expect("the loop ends with it").or_fail(Cause::Machine, || "cannot wait for the program".to_owned())?;
    Ok(Ended { status, last_lines: tail.map(Tail::finish).unwrap_or_default() })
}

fn spawn(start: &Start<'_>, output: io::PipeWriter) -> Result<Child, StageError> {
    let (program, arguments) = start.arguments.split_first().expect("the check refuses an empty list");
    // A command keeps its ends of the pipe open: with it gone, the output ends when the program does.
    let spawn = |path: &Path| {
        Command::new(path)
            .arg0(program)
            .args(arguments)
            .env_clear()
            .envs(&start.environment)
            .env(stragglers::VARIABLE, start.mark.as_str())
            .current_dir(start.folder)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?)
            .spawn()
    };
    let spawned = match in_path(program, start.environment.get(OsStr::new("PATH"))) {
        // A script that names no interpreter: by its name the shell runs it.
        Some(path) => spawn(&path).or_else(|error| match error.raw_os_error() {
            Some(libc::ENOEXEC) => spawn(Path::new(program)),
            _ => Err(error),
        }),
        None => spawn(Path::new(program)),
    };
    spawned.map_err(|error| {
        let (cause, help) = match error.kind() {
            io::ErrorKind::NotFound => (
                Cause::BadParameters,
                Some("a program is looked for in the folders of PATH; a file of yours is named under `files:`"),
            ),
            io::ErrorKind::PermissionDenied => {
                (Cause::BadParameters, Some("make the file executable, or name its interpreter: `[python3, ...]`"))
            }
            _ => (Cause::Machine, None),
        };
        let failure = StageError::new(cause, format!("cannot start `{program}`")).with_source(error);
        match help {
            Some(help) => failure.with_help(help),
            None => failure,
        }
    })
}

/// Where a program is in the folders of PATH: by its path it is started without a copy of this process. `None` where
/// only starting it can tell.
fn in_path(program: &str, folders: Option<&OsString>) -> Option<PathBuf> {
    if program.contains('/') {
        return None;
    }
    let mut paths = std::env::split_paths(folders?).map(|folder| folder.join(program));
    let is_it = |path: &PathBuf| path.is_relative() || (path.is_file() && access(path, AccessFlags::X_OK).is_ok());
    paths.find(is_it).filter(|path| path.is_absolute())
}

/// Passes the output on to the log and counts its lines.
fn listen(mut output: PipeReader, mut masker: Masker, mut log: impl Write, heard: &Sender<Heard>) {
    let mut tail = Tail::default();
    let mut lines = 0_u64;
    let mut buffer = [0; 8 << 10];
    loop {
        let read = match output.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        let shown = masker.feed(&buffer[..read]);
        lines += shown.iter().filter(|byte| **byte == b'\n').count() as u64;
        tail.feed(&shown);
        // A log that cannot be written is no reason to stop the program.
        let _ = log.write_all(&shown);
        let _ = heard.send(Heard::Lines(lines));
    }
    let shown = masker.finish();
    tail.feed(&shown);
    let _ = log.write_all(&shown).and_then(|()| log.flush());
    let _ = heard.send(Heard::Silence(tail));
}
