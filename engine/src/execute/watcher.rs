//! The watcher: one small process beside an engine, which outlives it by a moment and ends what the engine's death has
//! left.
//!
//! A stage's process handles the death pipe by itself, unless it is stopped (SIGSTOP, a debugger): then none of its
//! threads runs, and it would stay behind with its locks. SIGKILL reaches a stopped process too, but somebody has to
//! send it. So the engine tells a process that it starts for this alone which process groups are there, over a pipe
//! whose end says that the engine is gone.
//!
//! `pipeline __watch` is in a group of its own, so that what is sent to the engine's group does not reach it, and has
//! nothing open but that pipe.

#![allow(unsafe_code, reason = "between fork and exec, descriptors, and signals")]

use std::collections::BTreeSet;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;

use nix::sys::signal::{SigHandler, Signal, killpg, signal};
use nix::unistd::Pid;

use super::local::this_program;
use super::stragglers;

/// The argument that makes this program a watcher.
pub const WATCH_ARGUMENT: &str = "__watch";

/// The engine's end. The watcher ends when this is dropped.
#[derive(Debug)]
pub(super) struct Watcher {
    told: Mutex<Option<ChildStdin>>,
}

impl Watcher {
    /// Starts a watcher. Where that fails there is none: the death pipe does by itself, but for a process that is
    /// stopped.
    pub(super) fn start() -> Self {
        Self { told: Mutex::new(spawn().ok()) }
    }

    /// A process group was started.
    pub(super) fn began(&self, leader: Pid) {
        self.tell('+', leader);
    }

    /// A process group is gone; to be said before its number can be that of another.
    pub(super) fn ended(&self, leader: Pid) {
        self.tell('-', leader);
    }

    fn tell(&self, what: char, leader: Pid) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let heard = told.as_mut().is_some_and(|pipe| writeln!(pipe, "{what}{leader}").is_ok());
        if !heard {
            // It was killed. A new one would not know what there is.
            *told = None;
        }
    }
}

fn spawn() -> io::Result<ChildStdin> {
    let mut child = Command::new(this_program())
        .arg0("pipeline")
        .arg(WATCH_ARGUMENT)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()?;
    let told = child.stdin.take().expect("standard input is piped");
    // Waited for, so that it does not stay as a zombie; a machine that has no thread left for that keeps one until the
    // engine ends.
    let _ = thread::Builder::new().name("watcher".to_owned()).spawn(move || child.wait());
    Ok(told)
}

/// What the program does when it is started with [`WATCH_ARGUMENT`]: hears an engine to its end.
pub fn main() -> ExitCode {
    // Who ends a session, or asks all processes to stop, asks the engine; this one ends with it.
    for number in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGPIPE] {
        // SAFETY: to ignore a signal runs no code.
        let _ = unsafe { signal(number, SigHandler::SigIgn) };
    }
    for leader in left_of(BufReader::new(io::stdin().lock())) {
        let _ = killpg(leader, Signal::SIGKILL);
        stragglers::end_of(leader);
    }
    ExitCode::SUCCESS
}

/// The groups that were there when the engine fell silent.
fn left_of(words: impl BufRead) -> Vec<Pid> {
    let mut groups = BTreeSet::new();
    for word in words.lines().map_while(Result::ok) {
        // A group is never that of this process (0) or of everybody (-1).
        let Some((what, Ok(leader))) = word.split_at_checked(1).map(|(what, id)| (what, id.parse::<i32>())) else {
            continue;
        };
        match what {
            "+" if leader > 1 => drop(groups.insert(leader)),
            "-" => drop(groups.remove(&leader)),
            _ => {}
        }
    }
    groups.into_iter().map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_begun_and_not_ended_is_left() {
        let left = |words: &str| left_of(words.as_bytes()).into_iter().map(Pid::as_raw).collect::<Vec<_>>();
        assert_eq!(left("+12\n+13\n-12\n+14\n"), [13, 14]);
        assert_eq!(left("+12\n-12\n"), [0; 0]);
        // A word that the engine did not end, and what would be everybody.
        assert_eq!(left("+12\n+0\n+1\n+-1\nx\n\n+"), [12]);
    }
}
