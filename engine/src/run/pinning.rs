//! Pinning before a run, said where it takes a while: a server that does not answer is silent for long.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use super::event::RunEvent;
use crate::lock_file::{LockError, LockFile, Pinning, name};
use crate::plan::Plan;
use crate::stage::Registry;

/// A server that answers sooner needs no words.
const PATIENCE: Duration = Duration::from_secs(2);

/// As [`LockFile::resolve`]; tells the observer when it takes longer than a moment.
pub(super) fn pin(
    lock: &mut LockFile,
    plan: &Plan,
    registry: &Registry,
    pinning: Pinning,
    observer: &mut dyn FnMut(&RunEvent),
) -> Result<(), LockError> {
    let pins: Vec<String> = lock.missing(plan).iter().map(|(_, request)| name(request)).collect();
    if pins.is_empty() {
        return Ok(());
    }
    thread::scope(|scope| {
        let (answered, answer) = channel();
        scope.spawn(move || {
            // The receiver waits until this is said.
            let _ = answered.send(lock.resolve(plan, registry, pinning).map(drop));
        });
        let in_time = answer.recv_timeout(PATIENCE);
        if in_time.as_ref().is_err_and(|error| *error == RecvTimeoutError::Timeout) {
            observer(&RunEvent::Pinning { pins });
        }
        in_time.or_else(|_| answer.recv()).expect("the thread says what came out before it ends")
    })
}
