//! The Hub cache that other tools fill: files are taken from it, after a check, and never written to it.

use std::fs;
use std::io;
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

/// Copies a file out of the cache to `to`, if the cache has it and the copy's content is what the Hub lists.
///
/// The copy is what is checked, so that nothing can change between the check and the use.
pub(super) fn take(cache: &hf_hub::Cache, snapshot: &Snapshot, file: &RemoteFile, to: &Path) -> io::Result<bool> {
    for candidate in places(cache, snapshot, file).into_iter().filter(|path| has_length(path, file)) {
        if copy(&candidate, to).is_ok() && file.checksum.of_file(to)? == file.checksum.hex() {
            return Ok(true);
        }
        match fs::remove_file(to) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(false)
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

/// Copies the content alone: a cache may hold read-only files, and the copy must be writable.
fn copy(from: &Path, to: &Path) -> io::Result<u64> {
    io::copy(&mut fs::File::open(from)?, &mut fs::File::create(to)?)
}
