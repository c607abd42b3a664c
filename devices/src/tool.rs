//! Runs the vendors' tools: with a time limit, with bounded output, and in a process group of their own.
//!
//! A tool talks to a driver, and a driver can hang in ways that no signal ends. So nothing here waits for a tool beyond
//! its limit, not even for one that was killed.

use std::io::{self, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// The most that is read of what a tool prints.
const MOST_BYTES: u64 = 4 << 20;

/// How much of what a tool said is repeated.
const MOST_SAID: usize = 400;

/// Between looks at whether a tool has ended.
const POLL: Duration = Duration::from_millis(5);

/// Why a tool gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// It could not be started.
    #[error("it could not be started: {0}")]
    Start(#[from] io::Error),
    /// It took too long.
    #[error("it gave no answer within {} s{}", .limit.as_secs_f64(), after_colon(.said))]
    Silent {
        limit: Duration,
        /// What it had said by then.
        said: String,
    },
    #[error("it ended with {how}{}", after_colon(.said))]
    Failed {
        /// How it ended.
        how: String,
        said: String,
    },
    /// It printed without end.
    #[error("it printed more than {} MiB", MOST_BYTES >> 20)]
    Endless,
}

fn after_colon(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(": {said}") }
}

/// What a program printed on standard output.
///
/// # Errors
/// Fails if it cannot be started, fails, or does not end within the limit.
pub(crate) fn run(program: &Path, arguments: &[&str], limit: Duration) -> Result<String, ToolError> {
    let mut command = Command::new(program);
    command.args(arguments);
    run_command(command, limit)
}

/// As [`run`], of a command with an environment of its own.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_command(mut command: Command, limit: Duration) -> Result<String, ToolError> {
    let deadline = Instant::now() + limit;
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Of their own group, so that a wrapper script is ended together with what it waits for. In English, whatever the
    // locale.
    command.process_group(0).env("LC_ALL", "C");
    let mut child = start(&mut command)?;
    let stdout = read(child.stdout.take());
    let stderr = read(child.stderr.take());
    let status = wait(&mut child, deadline);
    if !matches!(status, Ok(Some(_))) {
        end(child);
    }
    // Something that the tool started may hold its pipes open: what was printed is waited for no longer than the tool
    // itself.
    let grace = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(100));
    let printed = collect(&stdout, grace);
    let complaint = collect(&stderr, Duration::from_millis(100));
    if printed.len() as u64 >= MOST_BYTES {
        return Err(ToolError::Endless);
    }
    let printed = String::from_utf8_lossy(&printed).into_owned();
    let said = || said(&String::from_utf8_lossy(&complaint), &printed);
    match status? {
        None => Err(ToolError::Silent { limit, said: said() }),
        Some(status) if !status.success() => Err(ToolError::Failed { how: in_words(status), said: said() }),
        Some(_) => Ok(printed),
    }
}

/// A script that another thread of ours is still writing somewhere cannot be started for a moment (`ETXTBSY`): forks
/// inherit descriptors until they start their program.
fn start(command: &mut Command) -> io::Result<Child> {
    let mut tries = 0;
    loop {
        match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && tries < 20 => {
                tries += 1;
                thread::sleep(POLL);
            }
            other => return other,
        }
    }
}

fn wait(child: &mut Child, deadline: Instant) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(POLL);
    }
}

/// Ends a tool and what it started, and leaves it to a thread to see it go: in a hung driver it may never.
fn end(mut child: Child) {
    if let Ok(id) = i32::try_from(child.id()) {
        let _ = killpg(Pid::from_raw(id), Signal::SIGKILL);
    }
    thread::spawn(move || child.wait());
}

/// Reads a stream in a thread, in pieces, so that what was read by the deadline is there.
fn read(stream: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (sender, receiver) = channel();
    if let Some(stream) = stream {
        thread::spawn(move || {
            let mut stream = stream.take(MOST_BYTES);
            let mut piece = vec![0; 1 << 16];
            while let Ok(count @ 1..) = stream.read(&mut piece) {
                if sender.send(piece[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
    }
    receiver
}

fn collect(pieces: &Receiver<Vec<u8>>, limit: Duration) -> Vec<u8> {
    let deadline = Instant::now() + limit;
    let mut all = Vec::new();
    loop {
        match pieces.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(piece) => all.extend(piece),
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return all,
        }
    }
}

fn in_words(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// What a tool said, in one line: its complaint, or the end of what it printed where it complained of nothing.
pub(crate) fn said(complaint: &str, printed: &str) -> String {
    let text = if complaint.trim().is_empty() { printed } else { complaint };
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth_back(MOST_SAID) {
        Some((cut, _)) => format!("… {}", &line[cut..]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<String, ToolError> {
        run(Path::new("/bin/sh"), &["-c", script], limit)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_is_printed_is_returned() {
        assert_eq!(shell("echo one; echo two", LONG).unwrap(), "one\ntwo\n");
    }

    #[test]
    fn a_failure_repeats_what_was_said() {
        let error = shell("echo 'no driver' >&2; exit 9", LONG).unwrap_err().to_string();
        assert_eq!(error, "it ended with code 9: no driver");
        let error = shell("echo dcmi model initialized failed; exit 1", LONG).unwrap_err().to_string();
        assert_eq!(error, "it ended with code 1: dcmi model initialized failed");
    }

    #[test]
    fn one_that_hangs_is_not_waited_for() {
        let start = Instant::now();
        let error = shell("echo begun; sleep 1000 & wait", Duration::from_millis(200)).unwrap_err();
        assert!(matches!(error, ToolError::Silent { .. }), "{error}");
        assert!(error.to_string().contains("begun"), "{error}");
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn a_descendant_that_holds_the_pipe_is_not_waited_for() {
        // A session of its own: it outlives the kill of the group.
        let error = shell("setsid sleep 3 & echo printed; exit 4", Duration::from_millis(500)).unwrap_err();
        assert_eq!(error.to_string(), "it ended with code 4: printed");
    }

    #[test]
    fn one_that_prints_without_end_is_cut_off() {
        assert!(matches!(shell("yes", LONG), Err(ToolError::Endless | ToolError::Failed { .. })));
    }

    #[test]
    fn one_that_is_not_there_says_so() {
        let error = run(Path::new("/nowhere/npu-smi"), &[], LONG).unwrap_err();
        assert!(error.to_string().starts_with("it could not be started: "), "{error}");
    }

    #[test]
    fn a_long_complaint_is_cut_at_a_character() {
        let said = said(&"ä".repeat(1000), "");
        assert!(said.starts_with("… ä") && said.chars().count() <= MOST_SAID + 4, "{}", said.chars().count());
    }
}
