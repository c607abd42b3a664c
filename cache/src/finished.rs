//! Files that are finished, on their way into the store: each is hashed once, however many ask for its digest, and
//! flushed while other work goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use crate::stat_cache::Attributes;
use crate::{Digest, StoreError};

/// Digests of files that nobody writes to any more.
///
/// A file that has been written to all the same since it was hashed has other attributes, by which it is hashed again.
#[derive(Debug, Default)]
pub struct FinishedFiles {
    hashed: BTreeMap<PathBuf, Hashed>,
    /// Links to files that stay outside the store.
    outside: BTreeSet<PathBuf>,
}

#[derive(Debug, Clone, Copy)]
struct Hashed {
    attributes: Attributes,
    digest: Digest,
    size: u64,
}

impl FinishedFiles {
    /// The digest and the length of a file.
    ///
    /// # Errors
    /// Fails where the file cannot be read.
    pub fn digest(&mut self, path: &Path) -> Result<(Digest, u64), StoreError> {
        let attributes = attributes(path)?;
        if let Some(known) = self.known(path, attributes) {
            return Ok(known);
        }
        let (digest, size) = Digest::of_file(path)?;
        self.hashed.insert(path.to_owned(), Hashed { attributes, digest, size });
        Ok((digest, size))
    }

    /// As [`FinishedFiles::digest`], without remembering it.
    pub(crate) fn known_or_read(&self, path: &Path) -> Result<(Digest, u64), StoreError> {
        match self.known(path, attributes(path)?) {
            Some(known) => Ok(known),
            None => Digest::of_file(path),
        }
    }

    /// Makes a link of this process stand for a file of the user, whose content the store has a note of.
    ///
    /// # Errors
    /// Fails where the link cannot be read.
    pub fn leave(&mut self, link: &Path, (digest, size): (Digest, u64)) -> Result<(), StoreError> {
        self.hashed.insert(link.to_owned(), Hashed { attributes: attributes(link)?, digest, size });
        self.outside.insert(link.to_owned());
        Ok(())
    }

    /// Whether it stands for a file of the user.
    pub(crate) fn is_outside(&self, path: &Path) -> bool {
        self.outside.contains(path)
    }

    fn known(&self, path: &Path, attributes: Attributes) -> Option<(Digest, u64)> {
        let hashed = self.hashed.get(path).filter(|hashed| hashed.attributes == attributes)?;
        Some((hashed.digest, hashed.size))
    }
}

fn attributes(path: &Path) -> Result<Attributes, StoreError> {
    Ok(Attributes::of(&fs::symlink_metadata(path).map_err(StoreError::on("read", path))?))
}

/// A smaller file is on the disk as soon as the list of its tree is.
const WORTH_FLUSHING: u64 = 1 << 20;

fn is_worth_it(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.len() >= WORTH_FLUSHING)
}

/// Files on their way to the disk.
///
/// The system tells of a failed write once, to who flushes first. So the result must be asked for: a later flush of the
/// same files would find nothing wrong.
#[derive(Debug)]
#[must_use = "a failed write is told here and nowhere else"]
pub struct Flushing(Option<JoinHandle<Result<(), StoreError>>>);

impl Flushing {
    /// Begins to flush the files of a folder, those below it left out, and those too small to be worth it: storing the
    /// folder flushes all that is left, at once.
    ///
    /// # Errors
    /// Fails where the folder cannot be listed or the system gives no thread.
    pub fn begin(folder: &Path) -> Result<Self, StoreError> {
        let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        let entries = entries.map_err(StoreError::on("list", folder))?;
        let files: Vec<_> = entries.into_iter().map(|entry| entry.path()).filter(|path| is_worth_it(path)).collect();
        if files.is_empty() {
            return Ok(Self(None));
        }
        let flush = move || {
            files.iter().try_for_each(|path| {
                File::open(path).and_then(|file| file.sync_all()).map_err(StoreError::on("flush", path))
            })
        };
        let thread = std::thread::Builder::new().name("flush".to_owned()).spawn(flush);
        thread.map(|thread| Self(Some(thread))).map_err(StoreError::on("flush", folder))
    }

    /// Waits until they are on the disk.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn end(self) -> Result<(), StoreError> {
        self.0.map_or(Ok(()), |thread| thread.join().expect("flushing does not panic"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_hashed_once_and_again_when_it_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "one").unwrap();
        let mut files = FinishedFiles::default();
        let of = |text: &str| (Digest::of(text.as_bytes()), text.len() as u64);
        assert_eq!(files.digest(&path).unwrap(), of("one"));
        // A wrong digest, to see that it is the remembered one.
        files.hashed.get_mut(&path).unwrap().digest = Digest::of(b"remembered");
        assert_eq!(files.digest(&path).unwrap().0, Digest::of(b"remembered"));
        assert_eq!(files.known_or_read(&path).unwrap().0, Digest::of(b"remembered"));
        fs::write(folder.path().join("other"), "two").unwrap();
        fs::rename(folder.path().join("other"), &path).unwrap();
        assert_eq!(files.known_or_read(&path).unwrap(), of("two"));
        assert_eq!(files.digest(&path).unwrap(), of("two"));
        fs::remove_file(&path).unwrap();
        assert!(matches!(files.digest(&path), Err(StoreError::Io { .. })));
    }

    #[test]
    fn what_is_flushed_is_as_it_was_and_a_missing_folder_is_told() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "content").unwrap();
        fs::create_dir(folder.path().join("below")).unwrap();
        Flushing::begin(folder.path()).unwrap().end().unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("file")).unwrap(), "content");
        assert!(matches!(Flushing::begin(&folder.path().join("absent")), Err(StoreError::Io { .. })));
    }
}
