//! Locks that the kernel holds, and private folders that vanish with their process.
//!
//! A lock belongs to an open file description: it is free when the last process that has it is gone, however it went.
//! A child process that inherits the descriptor keeps it held.

#![allow(unsafe_code, reason = "between fork and exec")]

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::StoreError;
use crate::atomic::unique_name;

/// An exclusive lock, held until the last copy of its descriptor is closed.
///
/// The descriptor is close-on-exec; who wants a child to hold the lock clears that flag in the child. Dropping closes
/// the descriptor and does not unlock it, since that would take the lock from such a child as well.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Takes the lock on a file, made if need be, and waits for it.
    pub(crate) fn take(path: &Path) -> Result<Self, StoreError> {
        loop {
            let file = open(path)?;
            match file.lock() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                locked => locked.map_err(StoreError::on("lock", path))?,
            }
            if is_at(&file, path) {
                return Ok(Self { file });
            }
        }
    }

    /// Takes the lock on a file, made if need be, if it is free.
    pub(crate) fn try_take(path: &Path) -> Result<Option<Self>, StoreError> {
        loop {
            let file = open(path)?;
            match file.try_lock() {
                Ok(()) if is_at(&file, path) => return Ok(Some(Self { file })),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(TryLockError::Error(error)) => return Err(StoreError::io("lock", path, error)),
            }
        }
    }
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsRawFd for Lock {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

fn open(path: &Path) -> Result<File, StoreError> {
    open_lock(path).map_err(StoreError::on("open lock", path))
}

/// Opens the file of a lock, made if need be.
pub(crate) fn open_lock(path: &Path) -> io::Result<File> {
    // Network file systems lend an exclusive lock only to a descriptor that may write.
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let opened = options.open(path);
    let Err(error) = opened else { return opened };
    // No folder of that name was ever made here, and no socket.
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path)?,
        Ok(found) if found.file_type().is_socket() => fs::remove_file(path)?,
        Ok(_) | Err(_) => return Err(error),
    }
    options.open(path)
}

/// Whether the locked file is still the one with that name: its last holder may have removed it while we waited.
fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(named)) => (ours.dev(), ours.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// A private folder on the store's file system, removed when dropped, or at a later [`crate::Store::open`] if its
/// process died.
#[derive(Debug)]
pub struct Staging {
    folder: PathBuf,
    lock_path: PathBuf,
    lock: Lock,
}

impl Staging {
    /// Makes a folder below `root`. Its lock is next to it, exists before it and outlives it, so that [`sweep`] can
    /// tell at every moment whether somebody is there.
    pub(crate) fn create(root: &Path) -> Result<Self, StoreError> {
        let name = unique_name();
        let lock_path = root.join(format!("{name}.lock"));
        let lock = Lock::take(&lock_path)?;
        let staging = Self { folder: root.join(name), lock_path, lock };
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&staging.folder)
            .map_err(StoreError::on("create folder", &staging.folder))?;
        Ok(staging)
    }

    /// The folder, empty at first.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// What keeps the folder from being swept: a process that works in it after this one may be gone inherits this.
    pub fn lock(&self) -> &Lock {
        &self.lock
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // What cannot be removed now is removed by a later sweep.
        let _ = remove(&self.folder, &self.lock_path);
    }
}

/// Removes the folders below `root` whose processes are gone. What another user owns, or is busy, is left alone.
pub(crate) fn sweep(root: &Path) -> Result<(), StoreError> {
    for entry in fs::read_dir(root).map_err(StoreError::on("list", root))? {
        let path = entry.map_err(StoreError::on("list", root))?.path();
        let (folder, lock_path) = match path.extension() {
            Some(extension) if extension == "lock" => (path.with_extension(""), path),
            Some(_) | None => (path.clone(), path.with_extension("lock")),
        };
        if let Ok(Some(_lock)) = Lock::try_take(&lock_path) {
            let _ = remove(&folder, &lock_path);
        }
    }
    Ok(())
}

/// Removes a staging folder and then its lock, which the caller holds.
fn remove(folder: &Path, lock_path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::remove_file(lock_path),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;
    use std::time::Duration;

    use nix::fcntl::{FcntlArg, FdFlag, fcntl};

    use super::*;

    /// Forks run beside each other in one process, and each holds every descriptor until it calls exec.
    fn eventually(mut condition: impl FnMut() -> bool) -> bool {
        (0..500).any(|_| {
            let holds = condition();
            if !holds {
                thread::sleep(Duration::from_millis(10));
            }
            holds
        })
    }

    #[test]
    fn a_lock_is_held_by_one_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let holders = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _lock = Lock::take(&path).unwrap();
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                        assert!(Lock::try_take(&path).unwrap().is_none());
                        holders.fetch_sub(1, Ordering::SeqCst);
                    }
                });
            }
        });
    }

    #[test]
    fn a_lock_whose_file_is_removed_while_another_waits_is_still_exclusive() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let holders = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _lock = Lock::take(&path).unwrap();
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0);
                        holders.fetch_sub(1, Ordering::SeqCst);
                        fs::remove_file(&path).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_child_that_inherits_a_lock_holds_it_after_its_parent_let_go_and_until_it_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = Lock::take(&path).unwrap();
        let inherited = lock.as_raw_fd();
        let mut command = Command::new("sleep");
        command.arg("600").stdin(Stdio::null());
        // SAFETY: fcntl is async-signal-safe, and the parent keeps the descriptor open until the child has started.
        let mut child = unsafe {
            command
                .pre_exec(move || {
                    fcntl(BorrowedFd::borrow_raw(inherited), FcntlArg::F_SETFD(FdFlag::empty()))?;
                    Ok(())
                })
                .spawn()
                .unwrap()
        };
        drop(lock);
        thread::sleep(Duration::from_millis(50));
        assert!(Lock::try_take(&path).unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(eventually(|| Lock::try_take(&path).unwrap().is_some()));
    }

    #[test]
    fn staging_goes_when_dropped() {
        let root = tempfile::tempdir().unwrap();
        let staging = Staging::create(root.path()).unwrap();
        fs::create_dir(staging.path().join("folder")).unwrap();
        fs::write(staging.path().join("folder/file"), "").unwrap();
        drop(staging);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn sweeping_takes_what_the_dead_left_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let alive = Staging::create(root.path()).unwrap();
        fs::write(alive.path().join("file"), "").unwrap();
        // What kill -9 leaves: the folder and the lock file, and nobody who holds the lock.
        fs::create_dir(root.path().join("1-dead-0")).unwrap();
        fs::write(root.path().join("1-dead-0/file"), "").unwrap();
        fs::write(root.path().join("1-dead-0.lock"), "").unwrap();
        // Killed between making the lock and the folder, and a folder without a lock.
        fs::write(root.path().join("2-dead-0.lock"), "").unwrap();
        fs::create_dir(root.path().join("3-dead-0")).unwrap();
        sweep(root.path()).unwrap();
        assert!(alive.path().join("file").exists());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2);
    }

    #[test]
    fn staging_made_while_others_sweep_is_never_swept() {
        let root = tempfile::tempdir().unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let staging = Staging::create(root.path()).unwrap();
                        fs::write(staging.path().join("file"), "mine").unwrap();
                        sweep(root.path()).unwrap();
                        assert_eq!(fs::read_to_string(staging.path().join("file")).unwrap(), "mine");
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
