//! What this process was started with open: locks, leases, the death pipe.
//!
//! They are for this project's own processes, which are in their place until all work under them is over. A program of
//! the user's has no use for them, and one that it leaves behind would hold them for as long as it lives. So they are
//! closed in every program that is started, but for those that are asked to keep them.

#![allow(unsafe_code, reason = "between fork and exec, descriptors, and signals")]

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};

/// Those that were open in this process when [`seal`] was called, and not close-on-exec.
static INHERITED: OnceLock<Vec<RawFd>> = OnceLock::new();

/// Lists of a process's own open descriptors: Linux, and the other systems.
const LISTS: [&str; 2] = ["/proc/self/fd", "/dev/fd"];

/// Where there is no list, so many are looked at.
const MOST: RawFd = 1024;

/// Closes what this process has inherited in the programs that it starts from now on. To be called before any file is
/// opened.
pub(super) fn seal() {
    INHERITED.get_or_init(|| {
        let inherited: Vec<RawFd> =
            open_descriptors().into_iter().filter(|descriptor| is_inheritable(*descriptor)).collect();
        for descriptor in &inherited {
            let _ = set_flags(*descriptor, FdFlag::FD_CLOEXEC);
        }
        inherited
    });
}

/// Lets one of this project's own processes have what this one was given: it works under the same locks.
pub(super) fn pass_on(command: &mut Command) {
    let inherited = INHERITED.get().cloned().unwrap_or_default();
    // SAFETY: between fork and exec only `fcntl` is called, which is async-signal-safe and touches no memory.
    unsafe {
        command.pre_exec(move || {
            // One that was closed meanwhile has nothing to keep.
            inherited.iter().for_each(|descriptor| drop(keep_on_exec(*descriptor)));
            Ok(())
        })
    };
}

/// Between fork and exec: lets a descriptor stay open in the new program.
pub(super) fn keep_on_exec(descriptor: RawFd) -> io::Result<()> {
    set_flags(descriptor, FdFlag::empty())
}

fn set_flags(descriptor: RawFd, flags: FdFlag) -> io::Result<()> {
    // SAFETY: the number is used for this call alone, which says so where it names no open file.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    fcntl(descriptor, FcntlArg::F_SETFD(flags))?;
    Ok(())
}

fn is_inheritable(descriptor: RawFd) -> bool {
    // SAFETY: as above.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    fcntl(descriptor, FcntlArg::F_GETFD)
        .is_ok_and(|flags| !FdFlag::from_bits_truncate(flags).contains(FdFlag::FD_CLOEXEC))
}

/// Numbers that may be open, without the three streams.
fn open_descriptors() -> Vec<RawFd> {
    let listed = LISTS.iter().find_map(|list| fs::read_dir(list).ok());
    let numbers: Vec<RawFd> = match listed {
        Some(entries) => entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect(),
        None => (0..MOST).collect(),
    };
    numbers.into_iter().filter(|descriptor| *descriptor > 2).collect()
}
