//! Publishing: copies of artefacts outside the store, for people and other programs.
//!
//! A copy is exchanged with the old one whole. What was published is written down in the copy, with enough to tell whether somebody
//! has changed it since; it leaves to the store how a folder is copied and exchanged.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cache::atomic::replace_folder;
use cache::{Digest, Store, StoreError};
use serde::{Deserialize, Serialize};

use crate::error::{Cause, by_system_error};

/// The file inside a published folder that says what it is.
pub const RECORD: &str = ".pipeline-published.json";

/// Version of that file's form.
const VERSION: u32 = 1;

/// What to do with a target that somebody has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnChanged {
    /// Leave it and fail.
    #[default]
    Refuse,
    /// `--overwrite`: replace it.
    Overwrite,
}

/// What became of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    /// It was current already.
    Current,
    /// It was written.
    Written,
}

/// Why a target was not written.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// Something is there that was not published by this program.
    #[error("`{}` is there already and was not made by this program", .target.display())]
    Foreign {
        /// The target.
        target: PathBuf,
    },
    /// The target was changed since it was published.
    #[error("`{}` was changed since it was published: `{file}` {how}", .target.display())]
    Changed {
        /// The target.
        target: PathBuf,
        /// The first file that differs.
        file: String,
        /// In what way.
        how: &'static str,
    },
    /// A file operation failed.
    #[error("cannot {action} `{}`", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// What it was tried on.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The store failed.
    #[error("cannot copy the result out of the store")]
    Store(#[from] StoreError),
    /// A defect of this program.
    #[error("the copy panicked")]
    Panicked,
}

impl PublishError {
    /// What kind of failure it is.
    pub fn cause(&self) -> Cause {
        match self {
            Self::Foreign { .. } | Self::Changed { .. } => Cause::BadData,
            Self::Io { .. }
            | Self::Store(StoreError::Io { .. } | StoreError::DiskFull { .. } | StoreError::Rename { .. }) => {
                by_system_error(self).unwrap_or(Cause::Machine)
            }
            Self::Store(_) => Cause::CorruptInput,
            Self::Panicked => Cause::Internal,
        }
    }

    /// What the user can do about it.
    pub fn help(&self) -> Option<&'static str> {
        match self {
            Self::Foreign { .. } | Self::Changed { .. } => {
                Some("move it away, or replace it with `pipeline run --overwrite`")
            }
            Self::Io { .. } | Self::Store(_) | Self::Panicked => None,
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    version: u32,
    tree: Digest,
    identity: Digest,
    files: BTreeMap<String, RecordedFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordedFile {
    digest: Digest,
    size: u64,
    /// Nanoseconds since 1970. A file with this time and size is not read again.
    modified: i128,
}

/// What a folder was published as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedAs {
    /// The stored folder.
    pub tree: Digest,
    /// Its identity.
    pub identity: Digest,
    /// How it was changed since, where it was.
    pub changed: Option<String>,
}

/// What a folder was published as; `None` where it was not published by this program.
///
/// # Errors
/// Fails where the folder cannot be read.
pub fn published_as(target: &Path) -> Result<Option<PublishedAs>, PublishError> {
    let text = match fs::read(target.join(RECORD)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", &target.join(RECORD))(error)),
    };
    let Ok(Record { version: VERSION, tree, identity, .. }) = serde_json::from_slice(&text) else { return Ok(None) };
    let changed = match inspect(target) {
        Ok(_) => None,
        Err(PublishError::Changed { file, how, .. }) => Some(format!("`{file}` {how}")),
        Err(error) => return Err(error),
    };
    Ok(Some(PublishedAs { tree, identity, changed }))
}

/// Makes `target` a copy of a stored folder, unless it is one.
///
/// # Errors
/// Fails where somebody else made or changed the target, or the disk refuses; the target is then as it was.
pub fn publish(
    store: &Store,
    tree: &Digest,
    identity: &Digest,
    target: &Path,
    on_changed: OnChanged,
) -> Result<Published, PublishError> {
    // One at a time: the temporary name below is then this process's, and what lies there is a dead process's.
    let name = format!("publish-{}", Digest::of(target.as_os_str().as_encoded_bytes()));
    let _lock = store.lock(&name)?;
    let temporary = temporary(target);
    if temporary.exists() {
        fs::remove_dir_all(&temporary).map_err(failed("remove", &temporary))?;
    }
    let found = inspect(target);
    match (found, on_changed) {
        (Ok(Some(published)), _) if published == *tree => return Ok(Published::Current),
        (Ok(_), _) | (Err(PublishError::Foreign { .. } | PublishError::Changed { .. }), OnChanged::Overwrite) => {}
        (Err(error), _) => return Err(error),
    }
    write(store, tree, identity, &temporary, target)?;
    Ok(Published::Written)
}

/// The tree that a target holds unchanged, or `None` where nothing is there.
fn inspect(target: &Path) -> Result<Option<Digest>, PublishError> {
    let foreign = || PublishError::Foreign { target: target.to_owned() };
    let metadata = match fs::symlink_metadata(target) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("look at", target)(error)),
    };
    if !metadata.is_dir() {
        return Err(foreign());
    }
    let Ok(text) = fs::read(target.join(RECORD)) else {
        let mut entries = fs::read_dir(target).map_err(failed("list", target))?;
        return if entries.next().is_none() { Ok(None) } else { Err(foreign()) };
    };
    let record: Record = serde_json::from_slice(&text).map_err(|_| foreign())?;
    if record.version != VERSION {
        return Err(foreign());
    }
    let changed = |file: &str, how| PublishError::Changed { target: target.to_owned(), file: file.to_owned(), how };
    let mut present = Vec::new();
    list(target, "", &mut present).map_err(failed("list", target))?;
    for (path, metadata) in &present {
        let recorded = record.files.get(path).ok_or_else(|| changed(path, "was added"))?;
        if !recorded.matches(metadata, &target.join(path)) {
            return Err(changed(path, "has another content"));
        }
    }
    match record.files.keys().find(|path| present.binary_search_by(|(other, _)| other.cmp(path)).is_err()) {
        Some(gone) => Err(changed(gone, "is gone")),
        None => Ok(Some(record.tree)),
    }
}

impl RecordedFile {
    fn matches(&self, metadata: &Metadata, path: &Path) -> bool {
        metadata.is_file()
            && metadata.len() == self.size
            && (modified(metadata) == self.modified
                || Digest::of_file(path).is_ok_and(|(digest, _)| digest == self.digest))
    }
}

/// Where the new folder is made, and the old one lies for a moment: beside the target.
fn temporary(target: &Path) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.pipeline-new"))
}

fn write(store: &Store, tree: &Digest, identity: &Digest, temporary: &Path, target: &Path) -> Result<(), PublishError> {
    let parent = target.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(failed("create folder", parent))?;
    let copied = store.copy_tree_out(tree, temporary)?;
    let mut files = BTreeMap::new();
    for file in copied.files() {
        let path = temporary.join(&file.path);
        let metadata = fs::metadata(&path).map_err(failed("look at", &path))?;
        let recorded = RecordedFile { digest: file.digest, size: file.size, modified: modified(&metadata) };
        files.insert(file.path.clone(), recorded);
    }
    let record = Record { version: VERSION, tree: *tree, identity: *identity, files };
    let text = serde_json::to_vec_pretty(&record).expect("a record is plain data");
    cache::atomic::write_atomically(&temporary.join(RECORD), &text)?;
    if target.is_symlink() || target.is_file() {
        fs::remove_file(target).map_err(failed("remove", target))?;
    }
    replace_folder(temporary, target)?;
    Ok(())
}

/// Every file below a folder but the record, sorted by path.
fn list(folder: &Path, prefix: &str, files: &mut Vec<(String, Metadata)>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
        let metadata = entry.metadata()?;
        if metadata.is_dir() {
            list(&entry.path(), &path, files)?;
        } else if path != RECORD {
            files.push((path, metadata));
        }
    }
    files.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(())
}

fn modified(metadata: &Metadata) -> i128 {
    i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec())
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PublishError {
    let path = path.to_owned();
    move |source| PublishError::Io { action, path, source }
}
