//! Stragglers: processes that a program of the user's has left running, in whatever group or session they have put
//! themselves.
//!
//! They are known by a mark in their environment, which begins with the id of the stage's process. Whoever ends that
//! process, or sees it end badly, ends them too: nobody would read what they still write, and they may hold a device.

use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The variable that carries the mark.
pub const VARIABLE: &str = "PIPELINE_COMMAND";

/// The mark of a program's processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark(String);

impl Mark {
    /// One for the next program that this process, which is a stage's, starts.
    pub fn new() -> Self {
        Self(format!("{}-{:x}", std::process::id(), RandomState::new().build_hasher().finish()))
    }

    /// The value of the variable.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Ends what carries it.
    pub fn end_stragglers(&self) {
        end(&format!("{VARIABLE}={}", self.0), |variable, wanted| variable == wanted);
    }
}

impl Default for Mark {
    fn default() -> Self {
        Self::new()
    }
}

/// Ends what the programs of a stage's process have left.
pub(super) fn end_of(leader: Pid) {
    end(&format!("{VARIABLE}={leader}-"), |variable, wanted| variable.starts_with(wanted));
}

fn end(wanted: &str, is_it: fn(&[u8], &[u8]) -> bool) {
    let is_marked = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| is_it(variable, wanted.as_bytes()))
    };
    // A process that is killed may just have started another one.
    for _ in 0..3 {
        let Ok(entries) = fs::read_dir("/proc") else { return };
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
        let marked: Vec<i32> = pids.filter(is_marked).collect();
        if marked.is_empty() {
            return;
        }
        for pid in marked {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}
