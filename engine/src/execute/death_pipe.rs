//! The death pipe: a pipe whose write end only the engine holds, so that its end tells every process below that the
//! engine is gone, however it went.
//!
//! Each process that this project starts inherits the read end and kills its own process group when it reads the end;
//! one that is stopped reads nothing and is left to the [`watcher`](super::watcher). PR_SET_PDEATHSIG is not relied on:
//! it fires when the *thread* that started the child ends.

#![allow(unsafe_code, reason = "between fork and exec, descriptors, and signals")]

use std::env;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::thread;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::getpgrp;

/// The variable that names the inherited descriptor.
pub const VARIABLE: &str = "PIPELINE_DEATH_PIPE";

/// Both ends, in the engine. Dropping it, or dying, ends everything below.
#[derive(Debug)]
pub struct DeathPipe {
    reader: PipeReader,
    _writer: PipeWriter,
}

impl DeathPipe {
    /// A new pipe; both ends are close-on-exec.
    ///
    /// # Errors
    /// Fails where the process has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        Ok(Self { reader, _writer: writer })
    }

    /// The descriptor that a child inherits.
    pub fn reader(&self) -> RawFd {
        self.reader.as_raw_fd()
    }
}

/// In a child: kills this process group as soon as the engine is gone.
///
/// Without [`VARIABLE`], or where it names no pipe, nothing happens: the process was started by hand.
pub fn obey() {
    let Some(descriptor) = env::var(VARIABLE).ok().and_then(|text| text.parse::<RawFd>().ok()) else { return };
    // SAFETY: the variable is set only by a parent that passes the descriptor, and nothing else in this process owns
    // it. It is checked to be a pipe before it is read; one that is not is given back unclosed.
    let mut pipe = unsafe { File::from_raw_fd(descriptor) };
    if !pipe.metadata().is_ok_and(|metadata| metadata.file_type().is_fifo()) {
        std::mem::forget(pipe);
        return;
    }
    thread::spawn(move || {
        let mut byte = [0];
        while pipe.read(&mut byte).is_err_and(|error| error.kind() == io::ErrorKind::Interrupted) {}
        let _ = killpg(getpgrp(), Signal::SIGKILL);
    });
}
