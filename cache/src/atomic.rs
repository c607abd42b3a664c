//! Files and folders that appear under their name whole and flushed, or not at all.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::SystemTime;

use crate::StoreError;
use crate::entry::remove_entry;

/// Flushes that wait for the disk at the same time.
const MOST_FLUSHES: usize = 16;

/// Writes a file so that a reader, and a machine that lost power, finds the old content or the new and nothing between.
///
/// # Errors
/// Fails where the disk refuses; the old content is then still there, and no temporary file.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let temporary = beside(path, "tmp");
    let written = write_through(&temporary, path, bytes);
    if written.is_err() {
        // The first error is the one to tell; where the rename went through there is nothing to remove.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Writes and flushes a file under a temporary name and then gives it its own.
fn write_through(temporary: &Path, path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    write_flushed(temporary, bytes)?;
    rename(temporary, path)?;
    flush_folder(parent(path))
}

/// Writes and flushes a new file.
pub(crate) fn write_flushed(path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let mut file = File::create_new(path).map_err(StoreError::on("create", path))?;
    file.write_all(bytes).map_err(StoreError::on("write", path))?;
    file.sync_all().map_err(StoreError::on("flush", path))
}

/// Puts a finished, flushed folder in the place of whatever has a name, in one step where the file system can exchange
/// names.
///
/// Both must be on one file system. What had the name is removed afterwards; where nothing had it, the new folder is
/// renamed.
///
/// # Errors
/// Fails where the disk refuses; under the name is then the old or the new, whole. Only where names cannot be
/// exchanged (some network file systems) and the process dies between two renames is the old one left as `aside`, to be
/// renamed back.
pub fn replace_folder(new: &Path, target: &Path, aside: &Path) -> Result<(), StoreError> {
    let old = match exchange(new, target) {
        Ok(()) => Some(new.to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            rename(new, target)?;
            None
        }
        Err(error) if cannot_exchange(&error) => {
            swap_by_renaming(new, target, aside)?;
            Some(aside.to_owned())
        }
        Err(source) => return Err(StoreError::Rename { from: new.to_owned(), to: target.to_owned(), source }),
    };
    flush_folder(parent(target))?;
    old.map_or(Ok(()), |old| remove_entry(&old).map(drop))
}

/// Flushes a folder's entries, so that names in it survive a loss of power.
///
/// # Errors
/// Fails where the folder cannot be opened or flushed.
pub fn flush_folder(folder: &Path) -> Result<(), StoreError> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(StoreError::on("flush folder", folder))
}

/// Flushes files and folders of which none has to be on the disk before another: all at once, since a file system with
/// a journal then commits once for all of them.
///
/// `syncfs` would be one call, and would wait for what everybody else has written to the file system.
pub(crate) fn flush_together<P: AsRef<Path> + Sync>(paths: &[P]) -> Result<(), StoreError> {
    let flush = |path: &P| {
        let path = path.as_ref();
        File::open(path).and_then(|file| file.sync_all()).map_err(StoreError::on("flush", path))
    };
    let share = paths.len().div_ceil(MOST_FLUSHES).max(1);
    // This thread flushes, too: the result of a stage is two files more often than not.
    let (own, others) = paths.split_at(share.min(paths.len()));
    thread::scope(|scope| {
        let flushes: Vec<_> =
            others.chunks(share).map(|paths| scope.spawn(|| paths.iter().try_for_each(flush))).collect();
        let own = own.iter().try_for_each(flush);
        flushes.into_iter().fold(own, |so_far, flush| so_far.and(flush.join().expect("flushing does not panic")))
    })
}

/// Renames, over whatever has the new name.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<(), StoreError> {
    fs::rename(from, to).map_err(|source| match StoreError::io("rename", to, source) {
        StoreError::Io { source, .. } => StoreError::Rename { from: from.to_owned(), to: to.to_owned(), source },
        full => full,
    })
}

/// Makes a folder in an existing one and flushes the latter; one that is there is left alone.
pub(crate) fn ensure_folder(folder: &Path) -> Result<(), StoreError> {
    match fs::create_dir(folder) {
        Ok(()) => flush_folder(parent(folder)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(source) => Err(StoreError::io("create folder", folder, source)),
    }
}

/// A name that no other call has, in this process or another.
pub(crate) fn unique_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    // The process id alone is not unique between the machines that share a file system.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
    format!("{}-{now:x}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// The folder that holds a path.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) | None => Path::new("."),
    }
}

/// A hidden, unique name in the folder of `path`.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.{suffix}", unique_name()))
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    Ok(renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE)?)
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn exchange(_one: &Path, other: &Path) -> io::Result<()> {
    fs::symlink_metadata(other)?;
    Err(io::ErrorKind::Unsupported.into())
}

/// Whether the file system does not know how to exchange names; `EINVAL` is what NFS says.
fn cannot_exchange(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}

/// Replaces a folder in two steps; the old one is then `aside`.
fn swap_by_renaming(new: &Path, target: &Path, aside: &Path) -> Result<(), StoreError> {
    rename(target, aside)?;
    rename(new, target).inspect_err(|_| {
        // Back to how it was; if even that fails, the first error is the one to tell.
        let _ = fs::rename(aside, target);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn folder_with(folder: PathBuf, content: &str) -> PathBuf {
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("file"), content).unwrap();
        folder
    }

    #[test]
    fn a_file_is_written_and_replaced_without_leftovers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.json");
        for content in ["one", "two"] {
            write_atomically(&path, content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(names(folder.path()), ["file.json"]);
    }

    #[test]
    fn a_failed_write_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), "").unwrap();
        assert!(matches!(write_atomically(&path, b"bytes"), Err(StoreError::Rename { .. })));
        assert_eq!(names(folder.path()), ["taken"]);
    }

    #[test]
    fn a_folder_takes_the_place_of_none_and_of_another() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("target");
        for content in ["one", "two"] {
            let new = folder_with(root.path().join("new"), content);
            replace_folder(&new, &target, &root.path().join("aside")).unwrap();
            assert_eq!(fs::read_to_string(target.join("file")).unwrap(), content);
            assert_eq!(names(root.path()), ["target"]);
        }
    }

    #[test]
    fn a_folder_takes_the_place_of_a_link_and_leaves_what_that_led_to() {
        let root = tempfile::tempdir().unwrap();
        let [target, aside] = ["target", "aside"].map(|name| root.path().join(name));
        let elsewhere = folder_with(root.path().join("elsewhere"), "precious");
        std::os::unix::fs::symlink(&elsewhere, &target).unwrap();
        replace_folder(&folder_with(root.path().join("new"), "new"), &target, &aside).unwrap();
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "new");
        assert_eq!(fs::read_to_string(elsewhere.join("file")).unwrap(), "precious");
        assert_eq!(names(root.path()), ["elsewhere", "target"]);
    }

    #[test]
    fn a_folder_is_replaced_where_names_cannot_be_exchanged() {
        let root = tempfile::tempdir().unwrap();
        let target = folder_with(root.path().join("target"), "old");
        let old = root.path().join("aside");
        swap_by_renaming(&folder_with(root.path().join("new"), "new"), &target, &old).unwrap();
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "new");
        assert_eq!(fs::read_to_string(old.join("file")).unwrap(), "old");
        let other = root.path().join("other");
        assert!(swap_by_renaming(&root.path().join("absent"), &target, &other).is_err());
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "new");
    }
}
