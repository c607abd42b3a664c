//! A terminal for the program, of which the test is the person.

#![allow(dead_code, unsafe_code, reason = "calls of the C library; each test file uses its own part of this")]

use std::os::fd::{FromRawFd, OwnedFd};

use nix::libc;

/// Both ends of a new pseudo-terminal: the side of the person, and that of the program.
pub(crate) fn pseudo_terminal() -> (OwnedFd, OwnedFd) {
    let (mut person, mut program) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: both places are valid, and name, settings and size may be null.
    let made =
        unsafe { libc::openpty(&mut person, &mut program, none, none.cast_const().cast(), none.cast_const().cast()) };
    assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the call gave two descriptors that nothing else owns.
    unsafe { (OwnedFd::from_raw_fd(person), OwnedFd::from_raw_fd(program)) }
}
