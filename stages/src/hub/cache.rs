//! The Hub cache that other tools fill: files are taken from it, after a check, and never written to it.

use std::fs;
use std::io::{self, Seek as _};
use std::path::{Path, PathBuf};

use hf_hub::Repo;

use super::listing::RemoteFile;
use super::repository::Snapshot;

/// Where the user's tools keep what they downloaded: `HF_HUB_CACHE`, else `HF_HOME/hub`, else the usual place.
pub(super) fn from_environment() -> Option<hf_hub::Cache> {
    if let Some(path) = std::env::var_os("HF_HUB_CACHE").filter(|path| !path.is_empty()) {
        return Some(hf_hub::Cache::new(PathBuf::from(path)));
    }
    // Without either, hf-hub has no folder to name and panics.
    (std::env::var_os("HF_HOME").is_some() || std::env::home_dir().is_some()).then(hf_hub::Cache::from_env)
}

/// The token that `hf auth login` stored.
pub(super) fn stored_token() -> Option<String> {
    (std::env::var_os("HF_HOME").is_some() || std::env::home_dir().is_some())
        .then(hf_hub::Cache::from_env)
        .and_then(|cache| cache.token())
}

/// What the cache has of a file.
pub(super) enum Cached {
    /// What the Hub lists.
    Same,
    /// Another file, or one that cannot be read, here.
    Other(PathBuf),
    Nothing,
}

/// Copies a file out of the cache to `to`, if the cache has it and the copy's content is what the Hub lists.
///
/// The copy is what is checked, so that nothing can change between the check and the use. A file that cannot be read is
/// another one; a copy that cannot be written is an error.
pub(super) fn take(cache: &hf_hub::Cache, snapshot: &Snapshot, file: &RemoteFile, to: &Path) -> io::Result<Cached> {
    let mut other = None;
    for candidate in places(cache, snapshot, file).into_iter().filter(|path| path.is_file()) {
        if has_length(&candidate, file) && copy(&candidate, to)? && file.checksum.of_file(to)? == file.checksum.hex() {
            return Ok(Cached::Same);
        }
        match fs::remove_file(to) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        other = other.or(Some(candidate));
    }
    Ok(other.map_or(Cached::Nothing, Cached::Other))
}

/// A file in the cache that is as long as the Hub's; what is in it is not looked at.
pub(super) fn find(cache: &hf_hub::Cache, snapshot: &Snapshot, file: &RemoteFile) -> Option<PathBuf> {
    places(cache, snapshot, file).into_iter().find(|path| has_length(path, file))
}

/// Where the cache may have a file: under its name at the commit, and under its checksum.
fn places(cache: &hf_hub::Cache, snapshot: &Snapshot, file: &RemoteFile) -> [PathBuf; 2] {
    let repository = &snapshot.repository;
    let repo =
        Repo::with_revision(repository.name().to_owned(), repository.kind().repo_type(), snapshot.commit.clone());
    let blob = cache.path().join(repo.folder_name()).join("blobs").join(file.checksum.hex());
    [cache.repo(repo).pointer_path(&snapshot.commit).join(&file.path), blob]
}

fn has_length(path: &Path, file: &RemoteFile) -> bool {
    fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() == file.size)
}

/// Copies the content alone: a cache may hold read-only files, and the copy must be writable. Gives whether it could be
/// read; where the copy cannot be written nothing of it stays.
fn copy(from: &Path, to: &Path) -> io::Result<bool> {
    let Ok(mut source) = fs::File::open(from) else { return Ok(false) };
    let mut target = fs::File::create(to)?;
    let Err(error) = io::copy(&mut source, &mut target) else { return Ok(true) };
    // The error does not say which side it is of; what can be read to its end is not that one.
    let is_readable = source.rewind().and_then(|()| io::copy(&mut source, &mut io::sink())).is_ok();
    if !is_readable {
        return Ok(false);
    }
    // The error that is told is the one of the copy.
    let _ = fs::remove_file(to);
    Err(error)
}

#[cfg(test)]
mod tests {
    use super::super::checksum::Checksum;
    use super::super::repository::{Repository, RepositoryKind};
    use super::*;

    #[test]
    fn a_copy_that_cannot_be_written_is_no_other_file() {
        let folder = tempfile::tempdir().unwrap();
        let cache = hf_hub::Cache::new(folder.path().join("hub"));
        let snapshot = Repository::parse(RepositoryKind::Model, "owner/model").unwrap().at(&"c".repeat(40));
        let file = RemoteFile {
            path: "hello.txt".to_owned(),
            size: 6,
            // `echo hello | sha256sum`
            checksum: Checksum::Sha256("5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03".to_owned()),
        };
        let [at, _] = places(&cache, &snapshot, &file);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        fs::write(&at, "hello\n").unwrap();
        let error = |to: &Path| take(&cache, &snapshot, &file, to).err().map(|error| error.kind());
        assert_eq!(error(&folder.path().join("missing/copy")), Some(io::ErrorKind::NotFound));
        assert_eq!(error(&at.join("copy")), Some(io::ErrorKind::NotADirectory));
        let to = folder.path().join("copy");
        #[cfg(target_os = "linux")]
        {
            // A full disk; what is removed is the link alone.
            std::os::unix::fs::symlink("/dev/full", &to).unwrap();
            assert_eq!(error(&to), Some(io::ErrorKind::StorageFull));
            assert!(!to.is_symlink());
        }
        assert!(matches!(take(&cache, &snapshot, &file, &to).unwrap(), Cached::Same));
        assert_eq!(fs::read_to_string(&to).unwrap(), "hello\n");
        fs::write(&at, "hullo\n").unwrap();
        assert!(matches!(take(&cache, &snapshot, &file, &to).unwrap(), Cached::Other(path) if path == at));
        assert!(!to.exists());
    }
}
