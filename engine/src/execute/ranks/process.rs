//! One rank's process: its start, its two streams, its end.

#![allow(unsafe_code, reason = "between fork and exec, descriptors, and signals")]

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::RawFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;
use serde_json::Value;

use super::{RankAnswer, Ranks};
use crate::execute::inherited::{self, keep_on_exec};
use crate::protocol::WorkerEvent;

/// A longer line is taken in pieces.
const LONGEST_LINE: u64 = 16 << 20;

/// Lines that are kept of what a rank said last.
const LAST_LINES: usize = 20;

/// A process that a rank left behind may keep its streams open; after this they are no longer waited for.
const LAST_WORDS: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Rank {
    child: Child,
    exited: Option<(Ending, Instant)>,
    /// How it ended, once nothing more is heard of it.
    pub ending: Option<Ending>,
    /// Streams that have not ended.
    pub open_streams: usize,
    last_lines: VecDeque<String>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// It exited with a code.
    Code(i32),
    /// A signal ended it.
    Signal(i32),
}

impl Ending {
    fn of(status: ExitStatus) -> Self {
        status.code().map_or_else(|| Self::Signal(status.signal().unwrap_or_default()), Self::Code)
    }

    /// Whether its work is done.
    pub(super) fn is_well(self) -> bool {
        self == Self::Code(0)
    }
}

/// What a stream of a rank has.
#[derive(Debug)]
pub(super) enum StreamItem {
    /// A word of the protocol.
    Event(WorkerEvent),
    /// The answer to a request.
    Answer(RankAnswer),
    Line(String),
    End,
}

/// The line of an answer.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer {
    answer: Value,
    /// Of the numbers that follow the line.
    #[serde(default)]
    bytes: usize,
}

/// One of a rank's two streams.
pub(super) struct Stream {
    lines: Box<dyn BufRead + Send>,
    speaks_protocol: bool,
}

impl Rank {
    /// Starts a rank with these variables beside those of all.
    pub(super) fn spawn(ranks: &Ranks, env: BTreeMap<String, OsString>) -> io::Result<(Self, [Stream; 2])> {
        let nothing = || io::Error::new(io::ErrorKind::InvalidInput, "an empty command");
        let (program, arguments) = ranks.command.split_first().ok_or_else(nothing)?;
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(&ranks.env)
            .envs(env)
            .stdin(if ranks.take_requests { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let inherit: Vec<RawFd> = ranks.inherit.clone();
        // SAFETY: between fork and exec only `fcntl` is called, which is async-signal-safe, on descriptors that the
        // caller keeps open until `spawn` has returned.
        unsafe { command.pre_exec(move || inherit.iter().try_for_each(|descriptor| keep_on_exec(*descriptor))) };
        // It computes on the stage's devices and writes its working state. What starts ranks on other machines does
        // neither.
        if ranks.nodes <= 1 {
            inherited::pass_on(&mut command);
        }
        let mut child = command.spawn()?;
        let stdout = child.stdout.take().expect("standard output is piped");
        let stderr = child.stderr.take().expect("standard error is piped");
        let streams = [
            Stream { lines: Box::new(BufReader::new(stdout)), speaks_protocol: true },
            Stream { lines: Box::new(BufReader::new(stderr)), speaks_protocol: false },
        ];
        let rank = Self { child, exited: None, ending: None, open_streams: streams.len(), last_lines: VecDeque::new() };
        Ok((rank, streams))
    }

    /// Its standard input, where it reads requests.
    pub(super) fn take_stdin(&mut self) -> Option<ChildStdin> {
        self.child.stdin.take()
    }

    /// Looks whether it is gone: its process has ended, and so have its streams.
    pub(super) fn look(&mut self) -> Option<Ending> {
        if self.exited.is_none()
            && let Ok(Some(status)) = self.child.try_wait()
        {
            self.exited = Some((Ending::of(status), Instant::now()));
        }
        let (ending, since) = self.exited?;
        if self.open_streams == 0 || since.elapsed() >= LAST_WORDS {
            self.ending = Some(ending);
        }
        self.ending
    }

    /// Sends a signal to a process that has not been waited for, whose id is therefore its own.
    pub(super) fn signal(&self, signal: Signal) {
        if self.exited.is_none() {
            let _ = kill(Pid::from_raw(self.child.id().cast_signed()), signal);
        }
    }

    /// Waits for a process that was killed.
    pub(super) fn reap(&mut self) {
        if self.exited.is_none() {
            let _ = self.child.wait();
        }
    }

    /// Its process's id.
    pub(super) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Keeps a line as one of the last.
    pub(super) fn remember(&mut self, line: String) {
        if self.last_lines.len() == LAST_LINES {
            self.last_lines.pop_front();
        }
        self.last_lines.push_back(line);
    }

    /// What it said last, the oldest first.
    pub(super) fn last_lines(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.last_lines.iter().map(String::as_str)
    }
}

impl StreamItem {
    /// An event or an answer, if the line is one; an answer has room for its numbers.
    fn of_protocol(line: &[u8]) -> Option<Self> {
        let answer = |Answer { answer, bytes }| Self::Answer(RankAnswer { value: answer, numbers: vec![0; bytes] });
        serde_json::from_slice(line).ok().map(Self::Event).or_else(|| serde_json::from_slice(line).ok().map(answer))
    }
}

impl Stream {
    /// Tells what it has until its end, or until nobody hears.
    pub(super) fn listen(mut self, tell: &mut dyn FnMut(StreamItem) -> bool) {
        let mut line = Vec::new();
        while self.lines.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            let mut item = self.speaks_protocol.then(|| StreamItem::of_protocol(&line)).flatten();
            if let Some(StreamItem::Answer(answer)) = &mut item
                && self.lines.read_exact(&mut answer.numbers).is_err()
            {
                break;
            }
            if !tell(item.unwrap_or_else(|| StreamItem::Line(shown(&line)))) {
                return;
            }
            line.clear();
        }
        tell(StreamItem::End);
    }
}

/// A line as it would stand on a terminal: of a bar that draws itself anew only the last state.
fn shown(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let text = text.trim_end();
    text.rsplit('\r').next().unwrap_or(text).to_owned()
}
