//! Who holds a lock, for messages alone: the kernel knows, and no file has to say it.
//!
//! It leaves to others: taking locks. Nothing may depend on what is found here, which is old when it is read.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::{Store, StoreError};

/// The longest command line that is told.
const LONGEST_COMMAND: usize = 200;

/// A process that holds a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub pid: u32,
    /// What it was started as, never empty.
    pub command: String,
}

impl Store {
    /// The processes of this machine that hold a lock. Empty where it is free, held on another machine, or the system
    /// does not tell. One without a command line is ending, and left out.
    ///
    /// # Errors
    /// Fails where the name is none of a lock.
    pub fn holders(&self, name: &str) -> Result<Vec<Holder>, StoreError> {
        Ok(holders(&self.lock_path(name)?))
    }
}

fn holders(path: &Path) -> Vec<Holder> {
    let Ok(file) = fs::metadata(path) else { return Vec::new() };
    let identity = (file.dev(), file.ino());
    // A lock belongs to the open file, which may have passed from the process that took it to others: they are looked
    // for first. Those of other users do not show what they have open, but the kernel tells who took a lock.
    let mut pids = those_with_it_open(identity);
    if pids.is_empty() {
        pids = those_who_took_it(identity.1);
    }
    pids.into_iter().filter_map(|pid| Some(Holder { pid, command: command(pid)? })).collect()
}

/// Those that have an open file with the lock on it.
fn those_with_it_open(identity: (u64, u64)) -> Vec<u32> {
    let has_it = |pid: &u32| {
        let Ok(open) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        open.filter_map(Result::ok).any(|entry| {
            let is_the_file = fs::metadata(entry.path()).is_ok_and(|file| (file.dev(), file.ino()) == identity);
            is_the_file && is_locked(*pid, &entry.file_name().to_string_lossy())
        })
    };
    processes().filter(has_it).collect()
}

/// Whether a lock is on an open file: who only waits for one has the file open too.
fn is_locked(pid: u32, descriptor: &str) -> bool {
    let told = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).unwrap_or_default();
    told.lines().any(|line| line.starts_with("lock:"))
}

/// Those that took a lock on a file of this number: `1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF`. A waiting one
/// has `->` behind the first number.
fn those_who_took_it(inode: u64) -> Vec<u32> {
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let taken = locks.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, file, ..] = fields.as_slice() else { return None };
        let (_, number) = file.rsplit_once(':')?;
        (number.parse() == Ok(inode)).then(|| pid.parse().ok()).flatten()
    });
    taken.collect::<BTreeSet<u32>>().into_iter().collect()
}

fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// What a process was started as; `None` where it is gone, or going: then it has no command line any more.
fn command(pid: u32) -> Option<String> {
    in_words(&fs::read(format!("/proc/{pid}/cmdline")).ok()?)
}

/// A command line as the kernel tells it, with a zero byte behind each word; `None` where it has none.
fn in_words(told: &[u8]) -> Option<String> {
    let words = told.split(|byte| *byte == 0).filter(|word| !word.is_empty()).map(String::from_utf8_lossy);
    let text = words.collect::<Vec<_>>().join(" ");
    (!text.is_empty()).then(|| text.chars().take(LONGEST_COMMAND).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_holds_a_lock_is_told_and_who_only_has_the_file_open_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        assert_eq!(store.holders("a").unwrap(), []);
        let lock = store.lock("a").unwrap();
        let _open = fs::File::open(folder.path().join("locks/a")).unwrap();
        let holders = store.holders("a").unwrap();
        assert_eq!(holders.iter().map(|holder| holder.pid).collect::<Vec<_>>(), [std::process::id()]);
        let own = std::env::args().next().unwrap();
        assert!(holders[0].command.starts_with(&own[..own.len().min(LONGEST_COMMAND)]), "{holders:?}");
        drop(lock);
        assert_eq!(store.holders("a").unwrap(), []);
        assert!(store.holders("../a").is_err());
    }

    #[test]
    fn a_command_line_is_told_in_words_and_an_ending_process_has_none() {
        assert_eq!(in_words(b"pipeline\0run\0\0a b.yaml\0").as_deref(), Some("pipeline run a b.yaml"));
        assert_eq!((in_words(b""), in_words(b"\0")), (None, None));
    }

    #[test]
    fn the_kernels_list_names_who_took_it() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let inode = || fs::metadata(folder.path().join("locks/a")).unwrap().ino();
        let lock = store.lock("a").unwrap();
        // The list is read in parts, and loses lines to locks that are released meanwhile.
        assert!((0..100).any(|_| those_who_took_it(inode()).contains(&std::process::id())));
        drop(lock);
        assert!(!those_who_took_it(inode()).contains(&std::process::id()));
    }
}
