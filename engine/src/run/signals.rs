//! The signals that stop a run: those that the loop hears, and those before it.
//!
//! A closed terminal or a lost connection (SIGHUP) is taken as a request to stop, as SIGTERM and Ctrl-C are, unless the
//! program was started to go on then (`nohup`).

#![allow(unsafe_code, reason = "signals and limits are calls of the C library")]

use std::io;
use std::mem::MaybeUninit;
use std::ptr::null;

use nix::libc::{self, c_int};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal as Number, sigaction};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The exit code of a program that the user stopped.
const INTERRUPTED: c_int = 130;

/// Those that ask for an end.
const STOPPING: [Number; 3] = [Number::SIGINT, Number::SIGTERM, Number::SIGHUP];

/// The signals that stop a run.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hang_up: Option<Signal>,
}

impl Signals {
    /// Begins to heed them, in the runtime that has been entered.
    pub(super) fn new() -> io::Result<Self> {
        let hang_up = (!is_ignored(Number::SIGHUP)).then(|| signal(SignalKind::hangup())).transpose()?;
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())?, hang_up })
    }

    /// Waits for the next one.
    pub(super) async fn next(&mut self) -> Request {
        let hang_up = async {
            match &mut self.hang_up {
                Some(signal) => drop(signal.recv().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => Request::Stop,
            _ = self.terminate.recv() => Request::Stop,
            () = hang_up => Request::StopOnce,
        }
    }
}

/// What a signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request {
    /// An end; asked for a second time, an end at once.
    Stop,
    /// An end. The kernel and the shell each tell of a terminal that is gone, so that a second word means no more than
    /// the first.
    StopOnce,
}

/// While this lives a signal that asks for an end ends the program at once. A program that a signal kills has no exit
/// code, and callers wait for one. To be dropped before [`run`](super::run) begins, whose handlers call those that were
/// there before.
#[derive(Debug)]
pub struct ExitOnInterrupt(Vec<(Number, SigAction)>);

impl Default for ExitOnInterrupt {
    fn default() -> Self {
        Self::new()
    }
}

impl ExitOnInterrupt {
    /// Begins it.
    pub fn new() -> Self {
        extern "C" fn exit(_: c_int) {
            // SAFETY: `_exit` is async-signal-safe and does not return.
            unsafe { libc::_exit(INTERRUPTED) }
        }
        let action = SigAction::new(SigHandler::Handler(exit), SaFlags::SA_RESTART, SigSet::empty());
        let handled = STOPPING.into_iter().filter(|number| *number == Number::SIGINT || !is_ignored(*number));
        // SAFETY: the handler does nothing but end the process. Where it cannot be set, a signal kills as it always
        // did.
        Self(handled.filter_map(|number| Some((number, unsafe { sigaction(number, &action) }.ok()?))).collect())
    }
}

impl Drop for ExitOnInterrupt {
    fn drop(&mut self) {
        for (number, before) in &self.0 {
            // SAFETY: this is the action that was in place before.
            let _ = unsafe { sigaction(*number, before) };
        }
    }
}

/// Whether this process was started to ignore a signal.
fn is_ignored(number: Number) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action the present one is written to the place given, and nothing is changed.
    unsafe {
        libc::sigaction(number as c_int, null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}
