//! Stragglers: processes that a program of the user's has left running, in whatever group or session they have put
//! themselves.
//!
//! They are known by a mark in their environment, which begins with the id of the stage's process. Whoever ends that
//! process, or sees it end badly, ends them too: nobody would read what they still write, and they may hold a device.
//!
//! To find them the environment of every process of the machine is read. A stage's process need not where it has no
//! children left: the kernel gives it those that its programs leave behind, which would else be those of `init`.

use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid, waitpid};
use nix::unistd::Pid;

/// The variable that carries the mark.
pub const VARIABLE: &str = "PIPELINE_COMMAND";

/// Whether this process is a stage's own. It starts one program and nothing else, so that all children which it has
/// without that program are what was left behind; where a stage is run within another process, others may be its.
static IS_A_STAGES: AtomicBool = AtomicBool::new(false);

/// Says that this process is a stage's own.
pub(super) fn is_a_stages() {
    IS_A_STAGES.store(true, Ordering::Relaxed);
}

/// The mark of a program's processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    value: String,
    /// Whether what the program leaves behind becomes a child of this process.
    is_heir: bool,
}

impl Mark {
    /// One for the next program that this process, which is a stage's, starts.
    pub fn new() -> Self {
        let value = format!("{}-{:x}", std::process::id(), RandomState::new().build_hasher().finish());
        Self { value, is_heir: inherit_orphans() }
    }

    /// The value of the variable.
    pub fn as_str(&self) -> &str {
        &self.value
    }

    /// Ends what carries it, once the program is gone and was waited for; in a stage's own process all children that
    /// are left then, whatever their environment is.
    pub fn end_stragglers(&self) {
        if self.is_heir && has_no_children() {
            return;
        }
        end(&format!("{VARIABLE}={}", self.value), |variable, wanted| variable == wanted);
        if self.is_heir && IS_A_STAGES.load(Ordering::Relaxed) {
            end_children();
        }
    }
}

impl Default for Mark {
    fn default() -> Self {
        Self::new()
    }
}

/// From now on a process below this one whose parent ends becomes a child of this one; false where that cannot be.
fn inherit_orphans() -> bool {
    #[cfg(target_os = "linux")]
    return nix::sys::prctl::set_child_subreaper(true).is_ok();
    #[cfg(not(target_os = "linux"))]
    false
}

fn has_no_children() -> bool {
    let any = waitid(Id::All, WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT);
    any == Err(Errno::ECHILD)
}

/// Ends the children of this process, and those that become its children by that.
fn end_children() {
    const MOST: usize = 1000;
    for _ in 0..MOST {
        let Ok(entries) = fs::read_dir("/proc") else { return };
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
        let children: Vec<i32> = pids.filter(|pid| parent(*pid) == Some(Pid::this().as_raw())).collect();
        if children.is_empty() {
            return;
        }
        for pid in children.into_iter().map(Pid::from_raw) {
            let _ = kill(pid, Signal::SIGKILL);
            let _ = waitpid(pid, None);
        }
    }
}

/// The parent of a process.
fn parent(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of a program, in brackets, may hold anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
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
