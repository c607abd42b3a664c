//! The local executor: each stage is a child of this process, in a process group of its own, and dies with it.

#![allow(unsafe_code, reason = "between fork and exec, descriptors, and signals")]

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use devices::CpuList;
use nix::libc;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use tokio::sync::mpsc::UnboundedSender;

use super::death_pipe::{self, DeathPipe};
use super::executor::{Ending, Executor, Launch, Message, Process, ProcessExit, STAGE_ARGUMENT, StartError, Stop};
use super::spawn::Spawn;
use super::stragglers;
use super::watcher::Watcher;

/// A process that left the group may keep the output open; after this its words are no longer waited for. What was said
/// before the end is in the pipe and read at once, unless the machine is very busy: then its result would be lost.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// A longer line is taken in pieces, so that output without line ends does not fill the memory of the engine.
const LONGEST_LINE: u64 = 16 << 20;

/// Starts stages as children of this process.
#[derive(Debug)]
pub struct Local {
    program: PathBuf,
    death_pipe: DeathPipe,
    /// Started with the first stage: a run that finds everything done needs none.
    watcher: OnceLock<Arc<Watcher>>,
}

impl Local {
    /// An executor that starts this very program.
    ///
    /// # Errors
    /// Fails where the death pipe cannot be made.
    pub fn new() -> io::Result<Self> {
        Ok(Self { program: this_program(), death_pipe: DeathPipe::new()?, watcher: OnceLock::new() })
    }

    fn spawn(&self, launch: &Launch, output: &PipeWriter, log: &File) -> io::Result<Pid> {
        let keep: Vec<_> = std::iter::once(self.death_pipe.reader()).chain(launch.inherit.iter().copied()).collect();
        let _pinned = Pinned::to(&launch.cores);
        Spawn {
            program: &self.program,
            arguments: [OsStr::new("pipeline"), OsStr::new(STAGE_ARGUMENT), launch.job.as_os_str()],
            environment: &launch.env,
            first_kept: death_pipe::VARIABLE,
            keep: &keep,
            stdout: output.as_fd(),
            stderr: log.as_fd(),
        }
        .start()
    }
}

impl Executor for Local {
    fn start(&self, launch: &Launch, messages: UnboundedSender<Message>) -> Result<Box<dyn Process>, StartError> {
        let log = OpenOptions::new().create(true).append(true).open(&launch.log);
        let log = log.map_err(failed("open", &launch.log))?;
        let watcher = Arc::clone(self.watcher.get_or_init(|| Arc::new(Watcher::start())));
        let started = Instant::now();
        let (stdout, output) = io::pipe().map_err(failed("open a pipe for", &self.program))?;
        let leader = self.spawn(launch, &output, &log).map_err(failed("start", &self.program))?;
        // With it closed here the pipe ends with the process.
        drop(output);
        watcher.began(leader);
        let group = Arc::new(ProcessGroup { leader, reaped: Mutex::new(false), watcher });

        let stage = launch.stage;
        let (silent, silence) = mpsc::channel::<()>();
        let listener = messages.clone();
        thread::spawn(move || {
            listen(stage, stdout, log, &listener);
            drop(silent);
        });
        let waited = Arc::clone(&group);
        thread::spawn(move || {
            let (ending, peak_memory_bytes, cpu) = waited.reap();
            // The sender is dropped, never used: this returns when the listener is through, or after the timeout.
            let _ = silence.recv_timeout(LAST_WORDS);
            let exit =
                ProcessExit { ending, ran: started.elapsed(), peak_memory_bytes, cpu, verdict: None, host: None };
            let _ = messages.send(Message::Exited { stage, exit });
        });
        Ok(Box::new(Handle(group)))
    }
}

/// This thread on some CPUs until this is dropped, with all that it starts meanwhile.
struct Pinned {
    before: libc::cpu_set_t,
}

impl Pinned {
    /// `None` where there are none to stay on or the kernel refuses: what is started then runs where it may, slower and
    /// as right.
    fn to(list: &CpuList) -> Option<Self> {
        // SAFETY: a `cpu_set_t` is an array of bits, for which zeros are valid.
        let (mut cpus, mut before): (libc::cpu_set_t, libc::cpu_set_t) = unsafe { std::mem::zeroed() };
        let known = list.cpus().iter().map(|cpu| *cpu as usize).filter(|cpu| *cpu < 8 * size_of::<libc::cpu_set_t>());
        for cpu in known.clone() {
            // SAFETY: the number is within the set.
            unsafe { libc::CPU_SET(cpu, &mut cpus) };
        }
        // SAFETY: the pointer is to a live set of the size given.
        let mut is_known = || unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut before) } == 0;
        if known.count() == 0 || !is_known() {
            return None;
        }
        set_affinity(&cpus);
        Some(Self { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        set_affinity(&self.before);
    }
}

fn set_affinity(cpus: &libc::cpu_set_t) {
    // SAFETY: the pointer is to a live set of the size given.
    unsafe { libc::sched_setaffinity(0, size_of_val(cpus), cpus) };
}

/// A process group and whether its leader's id may have passed to another process.
#[derive(Debug)]
struct ProcessGroup {
    leader: Pid,
    reaped: Mutex<bool>,
    watcher: Arc<Watcher>,
}

impl ProcessGroup {
    fn signal(&self, signal: Signal) {
        let reaped = self.reaped.lock().unwrap_or_else(PoisonError::into_inner);
        if !*reaped {
            let _ = killpg(self.leader, signal);
        }
    }

    /// Waits for the leader's end, ends what is left of its group, and only then gives the leader's id free.
    fn reap(&self) -> (Ending, u64, Duration) {
        let ended = loop {
            match waitid(Id::Pid(self.leader), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
                Err(nix::Error::EINTR) => {}
                ended => break ended,
            }
        };
        let mut reaped = self.reaped.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = killpg(self.leader, Signal::SIGKILL);
        // A process that ends by itself has seen to what its program left.
        if !matches!(ended, Ok(WaitStatus::Exited(..))) {
            stragglers::end_of(self.leader);
        }
        self.watcher.ended(self.leader);
        *reaped = true;
        // Only `wait4` gives the memory of this very child.
        wait4(self.leader)
    }
}

struct Handle(Arc<ProcessGroup>);

impl Process for Handle {
    fn stop(&self, how: Stop) {
        self.0.signal(match how {
            Stop::Ask => Signal::SIGTERM,
            Stop::Kill => Signal::SIGKILL,
        });
    }

    fn id(&self) -> Option<u32> {
        u32::try_from(self.0.leader.as_raw()).ok()
    }
}

/// Passes on each line of the protocol; a line that is none (a library that prints) goes to the log.
fn listen(stage: usize, stdout: PipeReader, mut log: File, messages: &UnboundedSender<Message>) {
    let mut lines = BufReader::new(stdout);
    let mut line = Vec::new();
    while lines.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
        match serde_json::from_slice(&line) {
            Ok(event) => drop(messages.send(Message::Said { stage, event })),
            Err(_) => drop(log.write_all(&line)),
        }
        line.clear();
    }
}

fn wait4(pid: Pid) -> (Ending, u64, Duration) {
    let mut status = 0;
    // SAFETY: `rusage` is plain data, for which zeros are valid.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to live values of the right type, and the process is an unreaped child of this one.
    while unsafe { libc::wait4(pid.as_raw(), &raw mut status, 0, &raw mut usage) } == -1
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
    let ending = if libc::WIFSIGNALED(status) {
        let number = libc::WTERMSIG(status);
        Ending::Signal(
            Signal::try_from(number).map_or_else(|_| format!("signal {number}"), |signal| signal.to_string()),
        )
    } else {
        Ending::Code(libc::WEXITSTATUS(status))
    };
    let time = |time: libc::timeval| {
        Duration::new(time.tv_sec.unsigned_abs(), 0) + Duration::from_micros(time.tv_usec.unsigned_abs())
    };
    // Linux counts in KiB.
    (ending, usage.ru_maxrss.unsigned_abs() * 1024, time(usage.ru_utime) + time(usage.ru_stime))
}

/// This very program, also where a newer build has taken its place meanwhile: the stages of a run are of one build.
pub(super) fn this_program() -> PathBuf {
    let own = PathBuf::from("/proc/self/exe");
    if own.exists() { own } else { std::env::current_exe().unwrap_or(own) }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StartError {
    move |source| StartError { action, path: path.to_owned(), source }
}
