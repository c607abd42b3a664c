//! How processes that work with a store, and one that collects its garbage, live side by side.
//!
//! **Users.** Whoever opens a store is a *user* of it until the last clone of its [`crate::Store`] is dropped: it holds
//! a kernel lock on a file of its own in `users/`, whose modification time is the moment at which it came. A process
//! that works for it ([`crate::Store::join`]) holds that lock, too. A user that dies, and whose helpers have, is one no
//! more. The oldest user alive gives the moment *since* which the store is in use.
//!
//! **What is in use** follows from times alone, so that a run writes nothing but what it makes:
//! - a result that was recorded, or taken by [`crate::Store::take`], since then. Taking a result sets the modification
//!   time of its record to now, unless it was taken within the last [`FRESH`], so a finished pipeline that is looked at
//!   over and over writes nothing;
//! - every object and tree whose change time lies after that moment: what a live process has stored and not recorded
//!   yet. Storing content that is there already replaces the file, and so its time.
//!
//! **The gate** makes looking and removing exclude each other. Taking a result, and giving a file its final name,
//! happen between `Gate::pass` and its end (shared); garbage is removed in short batches behind `Gate::close`
//! (exclusive). Each batch first asks again since when the store is in use, and each file again for its time. So one of
//! two things holds for a user that takes a result: it passed before the batch, and the batch sees the new time and
//! leaves the result alone; or it passes after it, finds no result, and makes it.
//!
//! **Order.** Results are removed before the trees that they name, and trees before their objects, so that a process
//! that is killed halfway leaves garbage and no result that lacks something.
//!
//! All times are those of one file system and are compared with nothing else, so a clock that differs between the
//! machines that share a store does no harm. Should a file be lost all the same (a file system without locks,
//! somebody's `rm`), its reader fails with [`crate::StoreError::MissingObject`] and the run rebuilds it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use nix::fcntl::OFlag;

use crate::atomic::unique_name;
use crate::lock::open_lock;
use crate::{Lock, StoreError};

/// A use of a result is not written down again within this time.
pub const FRESH: Duration = Duration::from_secs(60);

/// This process, as a user of a store; it is none any more when this is dropped.
#[derive(Debug)]
pub(crate) struct User {
    path: PathBuf,
    since: SystemTime,
    mode: u32,
    lock: Lock,
}

impl User {
    /// Makes this process a user.
    pub(crate) fn register(users: &Path) -> Result<Self, StoreError> {
        let path = users.join(format!("{}.lock", unique_name()));
        let lock = Lock::take(&path)?;
        let told = |metadata: fs::Metadata| Ok((metadata.modified()?, metadata.permissions().mode()));
        let (since, mode) = fs::metadata(&path).and_then(told).map_err(StoreError::on("read", &path))?;
        Ok(Self { path, since, mode, lock })
    }

    /// What says so, for a process that goes on with the work of this one.
    pub(crate) fn lock(&self) -> &Lock {
        &self.lock
    }

    /// When it became one, by the clock of the store's file system.
    pub(crate) fn since(&self) -> SystemTime {
        self.since
    }

    /// The mode that a file gets which this process makes in the store, and says nothing about: what its umask lets
    /// through.
    pub(crate) fn mode(&self) -> u32 {
        self.mode
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // What cannot be removed is held by nobody in a moment, which says the same.
        let _ = fs::remove_file(&self.path);
    }
}

/// Since when the store is in use, by the users that are alive; `None` where nobody is. `own` is not counted.
pub(crate) fn in_use_since(users: &Path, own: Option<&User>) -> Result<Option<SystemTime>, StoreError> {
    let mut oldest: Option<SystemTime> = None;
    let entries = match fs::read_dir(users) {
        // A store that no process of this version has opened.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read.map_err(StoreError::on("list", users))?,
    };
    for entry in entries {
        let path = entry.map_err(StoreError::on("list", users))?.path();
        if own.is_some_and(|own| own.path == path) || !is_held(&path) {
            continue;
        }
        // One that has left since is in the way of nobody.
        let Ok(since) = fs::metadata(&path).and_then(|metadata| metadata.modified()) else { continue };
        oldest = Some(oldest.map_or(since, |oldest| oldest.min(since)));
    }
    Ok(oldest)
}

/// Removes the files of users that died.
pub(crate) fn sweep(users: &Path) -> Result<(), StoreError> {
    for entry in fs::read_dir(users).map_err(StoreError::on("list", users))? {
        let path = entry.map_err(StoreError::on("list", users))?.path();
        if let Ok(Some(_lock)) = Lock::try_take(&path) {
            let _ = fs::remove_file(&path);
        }
    }
    Ok(())
}

/// Whether a living process holds the lock on a file. One that may not be asked is taken for held.
fn is_held(path: &Path) -> bool {
    // A pipe that somebody put there is nobody's lock, and nothing to wait for.
    match OpenOptions::new().read(true).custom_flags(OFlag::O_NONBLOCK.bits()).open(path) {
        Ok(file) => !matches!(file.try_lock_shared(), Ok(())),
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// The gate of a store, within this process; shared by all its threads.
#[derive(Debug)]
pub(crate) struct Gate {
    path: PathBuf,
    passing: Mutex<Passing>,
}

/// How many threads are in the gate, and the file that is locked meanwhile. Kept open: a finished pipeline passes once
/// per stage.
#[derive(Debug, Default)]
struct Passing {
    file: Option<File>,
    threads: usize,
}

impl Gate {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path, passing: Mutex::default() }
    }

    /// Keeps garbage from being removed until the passage is dropped; waits for a batch that is being removed.
    pub(crate) fn pass(&self) -> Result<Passage<'_>, StoreError> {
        let mut passing = self.passing();
        let opened = match passing.file.take() {
            Some(file) => Some(file),
            None => self.open_to_pass()?,
        };
        if let (Some(file), 0) = (&opened, passing.threads) {
            without_interruption(|| file.lock_shared()).map_err(StoreError::on("lock", &self.path))?;
        }
        passing.file = opened;
        passing.threads += 1;
        Ok(Passage { gate: self })
    }

    /// Keeps everybody from passing until the result is dropped; waits for those who do.
    pub(crate) fn close(&self) -> Result<Closed, StoreError> {
        let file = open_lock(&self.path).map_err(StoreError::on("open lock", &self.path))?;
        without_interruption(|| file.lock()).map_err(StoreError::on("lock", &self.path))?;
        Ok(Closed { file })
    }

    /// `None` where this process may not write to the store: through such a file system nobody removes anything either.
    fn open_to_pass(&self) -> Result<Option<File>, StoreError> {
        match open_lock(&self.path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if is_read_only(&error) => Ok(File::open(&self.path).ok()),
            Err(error) => Err(StoreError::io("open lock", &self.path, error)),
        }
    }

    fn passing(&self) -> MutexGuard<'_, Passing> {
        self.passing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A thread that keeps garbage from being collected.
#[derive(Debug)]
pub struct Passage<'a> {
    gate: &'a Gate,
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        let mut passing = self.gate.passing();
        passing.threads -= 1;
        if passing.threads > 0 {
            return;
        }
        // Unlocked and not only closed: a child that was forked meanwhile has the same file open until it calls exec.
        let unlocked = passing.file.as_ref().is_none_or(|file| file.unlock().is_ok());
        if !unlocked {
            passing.file = None;
        }
    }
}

/// The gate, closed.
#[derive(Debug)]
pub(crate) struct Closed {
    file: File,
}

impl Drop for Closed {
    fn drop(&mut self) {
        // Closing the file would do, but for children forked meanwhile.
        let _ = self.file.unlock();
    }
}

/// Whether the user may not write, or nobody may.
pub(crate) fn is_read_only(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied)
}

fn without_interruption(mut lock: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match lock() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            locked => return locked,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::TryLockError;
    use std::sync::atomic::{AtomicI32, Ordering};
    use std::thread;

    use super::*;

    /// Whether nobody passes at this moment.
    fn is_empty(path: &Path) -> bool {
        match open_lock(path).map(|file| file.try_lock()) {
            Ok(Ok(())) => true,
            Ok(Err(TryLockError::WouldBlock)) => false,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_oldest_living_user_counts_and_the_dead_do_not() {
        let folder = tempfile::tempdir().unwrap();
        let users = folder.path();
        assert_eq!(in_use_since(users, None).unwrap(), None);
        let first = User::register(users).unwrap();
        thread::sleep(Duration::from_millis(20));
        let second = User::register(users).unwrap();
        assert!(first.since() < second.since());
        assert_eq!(in_use_since(users, None).unwrap(), Some(first.since()));
        assert_eq!(in_use_since(users, Some(&first)).unwrap(), Some(second.since()));
        // What kill -9 leaves: a file that nobody holds.
        fs::write(users.join("1-dead-0.lock"), "").unwrap();
        drop(first);
        assert_eq!(in_use_since(users, None).unwrap(), Some(second.since()));
        sweep(users).unwrap();
        assert_eq!(fs::read_dir(users).unwrap().count(), 1);
        drop(second);
        assert_eq!(in_use_since(users, None).unwrap(), None);
    }

    #[test]
    fn nobody_passes_a_closed_gate_and_many_pass_an_open_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gate");
        // Negative while closed, else the number of threads in it; two gates stand for two processes.
        let inside = AtomicI32::new(0);
        let gates = [Gate::new(path.clone()), Gate::new(path.clone())];
        thread::scope(|scope| {
            for gate in gates.iter().chain(&gates).chain(&gates) {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let passage = gate.pass().unwrap();
                        assert!(inside.fetch_add(1, Ordering::SeqCst) >= 0);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        drop(passage);
                    }
                });
            }
            scope.spawn(|| {
                for _ in 0..100 {
                    let closed = gates[0].close().unwrap();
                    assert_eq!(inside.swap(-100, Ordering::SeqCst), 0);
                    inside.fetch_add(100, Ordering::SeqCst);
                    drop(closed);
                }
            });
        });
        let first = gates[0].pass().unwrap();
        let second = gates[0].pass().unwrap();
        drop(first);
        assert!(!is_empty(&path));
        drop(second);
        assert!(is_empty(&path));
    }
}
