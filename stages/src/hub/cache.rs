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
    let repository = &snapshot.repository;
    let repo =
        Repo::with_revision(repository.name().to_owned(), repository.kind().repo_type(), snapshot.commit.clone());
    let blob = cache.path().join(repo.folder_name()).join("blobs").join(file.checksum.hex());
    let link = cache.repo(repo).pointer_path(&snapshot.commit).join(&file.path);
    for candidate in [link, blob] {
        if !fs::metadata(&candidate).is_ok_and(|found| found.is_file() && found.len() == file.size) {
            continue;
        }
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

/// Copies the content alone: a cache may hold read-only files, and the copy must be writable.
fn copy(from: &Path, to: &Path) -> io::Result<u64> {
    io::copy(&mut fs::File::open(from)?, &mut fs::File::create(to)?)
}
