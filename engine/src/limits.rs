//! Limits that the shell sets (`ulimit`): what they refuse is an error with a message, as any other refusal of the
//! machine.
//!
//! It leaves to others: memory, of which [`crate::memory`] tells, and files, whose errors say enough.

#![allow(unsafe_code, reason = "signals and limits are calls of the C library")]

use std::any::Any;
use std::fs::File;
use std::io;

use nix::libc::c_int;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use tokio::runtime::{Builder, Runtime};

use crate::error::{Cause, StageError};

/// The files that an event loop which heeds signals opens, and some to spare.
const FILES_OF_AN_EVENT_LOOP: usize = 8;

/// What the standard library and rayon say where no thread can be had: neither asks who wants one for an error.
const REFUSED: [&str; 2] = ["failed to spawn thread", "ThreadPoolBuildError"];

/// Lets a write beyond the largest size of a file (`ulimit -f`) fail, where the process would be killed.
///
/// The signal is handled and not ignored: programs that this one starts have it as they would without.
pub fn heed_file_size() {
    extern "C" fn nothing(_: c_int) {}
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing.
    let _ = unsafe { sigaction(Signal::SIGXFSZ, &action) };
}

/// Builds an event loop, with timers, sockets and signals.
///
/// # Errors
/// Fails where the limits of files (`ulimit -n`) or threads leave no room for one.
pub fn event_loop(builder: &mut Builder) -> io::Result<Runtime> {
    // It makes a pair of sockets for signals, and panics where it cannot.
    (0..FILES_OF_AN_EVENT_LOOP).map(|_| File::open("/dev/null")).collect::<io::Result<Vec<_>>>()?;
    builder.enable_all().build()
}

pub fn words(panic: &(dyn Any + Send)) -> Option<&str> {
    panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied())
}

/// The error behind a panic that is none of this program's: the machine gives no more threads.
pub fn refused(words: &str) -> Option<StageError> {
    let is_refused = REFUSED.iter().any(|refused| words.contains(refused));
    is_refused.then(|| {
        StageError::new(Cause::Machine, "the machine gives this program no more threads".to_owned())
            .with_help("raise the limit of processes (`ulimit -u`) or of address space (`ulimit -v`), or run less at once (`--jobs 1`)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_cannot_be_had_is_the_machines_refusal() {
        let said = "failed to spawn thread: Os { code: 11, kind: WouldBlock, message: \"…\" }".to_owned();
        assert_eq!(words(&said), Some(said.as_str()));
        assert_eq!(refused(&said).map(|error| error.cause), Some(Cause::Machine));
        assert!(refused("index out of bounds").is_none());
    }
}
