//! Members: further processes of this very program that compute a stage together with the stage's process.
//!
//! The stage's process is member 0 and alone speaks with the engine, saves working state and makes outputs. It starts
//! the others once its inputs are open, hands them its job and the descriptors of the memory that they share, and waits
//! for them. They stay in its process group, which the engine ends whole, and heed the death pipe. Of what they say one
//! thing is heard: why one of them failed.

#![allow(unsafe_code, reason = "between fork and exec, descriptors, and signals")]

use std::fs;
use std::io::{self, Read};
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::str::FromStr;

use nix::sys::signal::{SigHandler, Signal, signal};

use super::death_pipe;
use super::inherited;
use super::local::this_program;
use super::stage_process::{bind, failure, panicked, read_job};
use crate::context::{StageContext, say};
use crate::error::{Cause, Failure, OrFail, StageError};
use crate::protocol::WorkerEvent;
use crate::stage::Registry;

/// The argument that makes this program a member; the job file and its [`Membership`] follow it.
pub const MEMBER_ARGUMENT: &str = "__member";

/// The place of a process among those that compute a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Membership {
    /// Its number; that of the stage's process is 0.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Descriptors that it has inherited, in an order that the stage kind knows.
    pub descriptors: Vec<RawFd>,
}

impl Membership {
    /// As [`Membership::from_str`] reads it: `1/4:5,6`.
    fn to_argument(&self) -> String {
        let descriptors: Vec<String> = self.descriptors.iter().map(RawFd::to_string).collect();
        format!("{}/{}:{}", self.rank, self.size, descriptors.join(","))
    }
}

impl FromStr for Membership {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = || {
            let (place, descriptors) = text.split_once(':')?;
            let (rank, size) = place.split_once('/')?;
            let descriptors = descriptors.split(',').filter(|text| !text.is_empty()).map(str::parse);
            let descriptors = descriptors.collect::<Result<_, _>>().ok()?;
            Some(Self { rank: rank.parse().ok()?, size: size.parse().ok()?, descriptors })
        };
        read().ok_or_else(|| format!("`{text}` is no membership"))
    }
}

/// A member that was started. Dropping it kills it.
#[derive(Debug)]
pub struct Member {
    pub rank: usize,
    child: Child,
}

#[derive(Debug)]
pub struct MemberEnd {
    pub status: ExitStatus,
    /// What it said of its failure, if it did.
    pub failure: Option<StageError>,
}

impl StageContext {
    /// Starts a member. Its inputs are the folders that this context has opened by now.
    ///
    /// # Errors
    /// Fails where the process cannot be started.
    pub fn start_member(&self, membership: &Membership) -> Result<Member, StageError> {
        let job = self.scratch().join("job.json");
        // The same for all: one that was started may be reading it.
        if !job.exists() {
            let text = serde_json::to_vec(self.job()).expect("a job is plain data");
            fs::write(&job, text).or_fail(Cause::Machine, || format!("cannot write `{}`", job.display()))?;
        }
        let mut command = Command::new(this_program());
        command
            .arg(MEMBER_ARGUMENT)
            .arg(&job)
            .arg(membership.to_argument())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        // It stays in this process's group, and has the locks and the death pipe too.
        inherited::pass_on(&mut command);
        let child = command.spawn();
        let child = child.or_fail(Cause::Machine, || format!("cannot start worker {}", membership.rank))?;
        Ok(Member { rank: membership.rank, child })
    }
}

impl Member {
    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// Fails where the system does not tell.
    pub fn ended(&mut self) -> io::Result<Option<MemberEnd>> {
        let Some(status) = self.child.try_wait()? else { return Ok(None) };
        // The process is gone, so that its words have an end; there are few.
        let mut words = String::new();
        if let Some(mut stdout) = self.child.stdout.take() {
            let _ = stdout.read_to_string(&mut words);
        }
        Ok(Some(MemberEnd { status, failure: words.lines().find_map(failure_said) }))
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Waited for, so that its CPU time counts as this process's.
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

fn failure_said(line: &str) -> Option<StageError> {
    let WorkerEvent::Failed(Failure { cause, messages, help, .. }) = serde_json::from_str(line).ok()? else {
        return None;
    };
    let mut error = StageError::new(cause, messages.join(": "));
    error.help = help;
    Some(error)
}

/// Runs a member and says how it failed, if it did: what the program does when it is started with [`MEMBER_ARGUMENT`].
pub fn main(registry: &Registry, job: &Path, membership: Membership) -> ExitCode {
    inherited::seal();
    death_pipe::obey();
    // A request to stop reaches the whole process group; what follows from it is for member 0 to say.
    for number in [Signal::SIGTERM, Signal::SIGINT] {
        // SAFETY: to ignore a signal runs no code.
        let _ = unsafe { signal(number, SigHandler::SigIgn) };
    }
    let run = || {
        let job = read_job(job)?;
        let bound = bind(registry, &job)?;
        bound.run(&mut StageContext::of_member(job, membership)?)
    };
    match catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| Err(panicked(&*panic))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&failure(&error));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_membership_is_an_argument() {
        for descriptors in [vec![], vec![5], vec![5, 16]] {
            let membership = Membership { rank: 3, size: 4, descriptors };
            assert_eq!(membership.to_argument().parse(), Ok(membership));
        }
        for wrong in ["", "1", "1/2", "1/x:", "1/2:a"] {
            assert_eq!(wrong.parse::<Membership>(), Err(format!("`{wrong}` is no membership")));
        }
    }

    #[test]
    fn of_what_a_member_says_its_failure_is_heard() {
        let said = r#"{"event":"failed","cause":"numeric","messages":["training stopped","the loss is NaN"],"help":"lower it"}"#;
        let failure = failure_said(said).unwrap();
        assert_eq!((failure.cause, failure.message.as_str()), (Cause::Numeric, "training stopped: the loss is NaN"));
        assert_eq!(failure.help.as_deref(), Some("lower it"));
        assert!(failure_said("a library's words").is_none());
    }
}
