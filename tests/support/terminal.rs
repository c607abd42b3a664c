//! A terminal for the program, of which the test is the person.

#![allow(dead_code, reason = "each suite uses its own part of this")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::fcntl::{OFlag, open};
use nix::pty::{grantpt, posix_openpt, ptsname_r, unlockpt};
use nix::sys::stat::Mode;

/// Both ends of a new pseudo-terminal: the side of the person, and that of the program. No program that another test
/// starts meanwhile keeps them open.
pub(crate) fn pseudo_terminal() -> (OwnedFd, OwnedFd) {
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let person = posix_openpt(flags).unwrap();
    grantpt(&person).unwrap();
    unlockpt(&person).unwrap();
    let program = open(ptsname_r(&person).unwrap().as_str(), flags, Mode::empty()).unwrap();
    (person.into(), program)
}

/// A program at a pseudo-terminal of its own, which it is in front of: `^C` reaches it as a signal.
pub(crate) struct Session {
    child: Child,
    keys: File,
    shown: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Session {
    /// Starts a program of a folder.
    pub(crate) fn start(program: &Command, variables: &[(&str, &str)]) -> Self {
        let (person, end) = pseudo_terminal();
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(program.get_program()).args(program.get_args());
        command.current_dir(program.get_current_dir().unwrap());
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("TERM", "xterm").envs(variables.iter().copied());
        command.stdin(end.try_clone().unwrap()).stdout(end.try_clone().unwrap()).stderr(end);
        let child = command.spawn().unwrap();
        let keys = File::from(person.try_clone().unwrap());
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (mut screen, kept) = (File::from(person), Arc::clone(&shown));
        let reader = std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = screen.read(&mut bytes) {
                kept.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        Self { child, keys, shown, reader }
    }

    /// Presses keys.
    pub(crate) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// What has been shown so far, without carriage returns.
    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).replace('\r', "")
    }

    /// Waits until what is shown is so.
    pub(crate) fn wait_until(&self, what: &str, is_so: impl Fn(&str) -> bool) {
        let began = Instant::now();
        while !is_so(&self.shown()) {
            assert!(began.elapsed() < Duration::from_secs(60), "{what}: {:?}", self.shown());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for its end; returns the exit status and all that was shown.
    pub(crate) fn end(mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        drop(self.keys);
        self.reader.join().unwrap();
        (code, String::from_utf8_lossy(&self.shown.lock().unwrap()).replace('\r', ""))
    }
}
