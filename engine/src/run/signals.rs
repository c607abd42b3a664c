//! The signals that stop a run: those that the loop hears, and those before it.

use std::io;

use nix::libc::{self, c_int};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal as Number, sigaction};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The exit code of a program that the user stopped.
const INTERRUPTED: c_int = 130;

/// The signals that stop a run.
pub(super) struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// Begins to heed them, in the runtime that has been entered.
    pub fn new() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// Waits for the next one.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

/// While this lives Ctrl-C ends the program at once. A program that a signal kills has no exit code, and callers wait for one.
pub(super) struct ExitOnInterrupt(Option<SigAction>);

impl ExitOnInterrupt {
    /// Begins it.
    pub fn new() -> Self {
        extern "C" fn exit(_: c_int) {
            // SAFETY: `_exit` is async-signal-safe and does not return.
            unsafe { libc::_exit(INTERRUPTED) }
        }
        let action = SigAction::new(SigHandler::Handler(exit), SaFlags::SA_RESTART, SigSet::empty());
        // SAFETY: the handler does nothing but end the process. Where it cannot be set, a signal kills as it always did.
        Self(unsafe { sigaction(Number::SIGINT, &action) }.ok())
    }
}

impl Drop for ExitOnInterrupt {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            // SAFETY: this is the action that was in place before.
            let _ = unsafe { sigaction(Number::SIGINT, before) };
        }
    }
}
