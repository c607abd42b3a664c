//! Starting a process without a copy of this one: what `fork` copies grows with the plan, and is copied for each of its
//! stages.
//!
//! In the new process a descriptor that it is to keep has another number, as its three streams have; every other is
//! closed in it.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::stat::Mode;
use nix::unistd::Pid;

/// A process to start, at the head of a group of its own, with nothing to read.
pub(super) struct Spawn<'a> {
    pub program: &'a Path,
    /// Its own name first.
    pub arguments: [&'a OsStr; 3],
    /// Variables beside those of this process.
    pub environment: &'a [(&'static str, String)],
    /// The variable that is to have the number of the first of `keep`.
    pub first_kept: &'static str,
    /// Descriptors that stay open in it.
    pub keep: &'a [RawFd],
    pub stdout: BorrowedFd<'a>,
    pub stderr: BorrowedFd<'a>,
}

impl Spawn<'_> {
    pub(super) fn start(&self) -> io::Result<Pid> {
        let streams = [self.stdout.as_raw_fd(), self.stderr.as_raw_fd()];
        // Above all that is still to be read from.
        let first = 1 + self.keep.iter().chain(&streams).copied().max().unwrap_or_default();
        let mut actions = PosixSpawnFileActions::init()?;
        actions.add_open(0, "/dev/null", OFlag::O_RDONLY, Mode::empty())?;
        for (from, to) in streams.iter().zip(1..).chain(self.keep.iter().zip(first..)) {
            actions.add_dup2(*from, to)?;
        }
        let mut attributes = PosixSpawnAttr::init()?;
        attributes.set_pgroup(Pid::from_raw(0))?;
        attributes.set_sigmask(&SigSet::empty())?;
        // Ignored here, and so it would be there.
        attributes.set_sigdefault(&SigSet::from(Signal::SIGPIPE))?;
        attributes.set_flags(
            PosixSpawnFlags::POSIX_SPAWN_SETPGROUP
                | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK
                | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF,
        )?;
        let arguments: Vec<CString> =
            self.arguments.iter().map(|argument| CString::new(argument.as_bytes())).collect::<Result<_, _>>()?;
        Ok(posix_spawn(self.program, &actions, &attributes, &arguments, &self.variables(first)?)?)
    }

    /// The whole environment, as `NAME=VALUE`.
    fn variables(&self, first: RawFd) -> io::Result<Vec<CString>> {
        let mut variables: BTreeMap<OsString, OsString> = std::env::vars_os().collect();
        variables.extend(self.environment.iter().map(|(name, value)| ((*name).into(), value.into())));
        variables.insert(self.first_kept.into(), first.to_string().into());
        let whole = variables.into_iter().map(|(mut variable, value)| {
            variable.push("=");
            variable.push(value);
            Ok(CString::new(variable.into_vec())?)
        });
        whole.collect()
    }
}
