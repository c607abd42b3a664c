//! Publishing: copies of artefacts outside the store, for people and other programs, or links to what the store holds.
//!
//! A copy is exchanged with the old one whole. What was published is written down in a record in the copy, with enough
//! to tell whether somebody has changed it since; it leaves to the store how a folder is copied and exchanged. Where
//! nothing may be published is found before anything runs.

mod record;
mod targets;

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use cache::atomic::{replace_folder, write_atomically};
use cache::{Digest, OutputRecord, StatCache, Store, StoreError};

pub(crate) use self::record::is_record;
use self::record::{Look, Record};
pub use self::record::{PublishedAs, RECORD, description, published_as};
pub use self::targets::{Moment, check_targets, lies_in};
use crate::artifact::stored_files;
use crate::context::OUTSIDE;
use crate::error::{Cause, by_system_error};
use crate::plan::{Link, Plan, Publish};

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
    Written,
}

/// Why a target was not written.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// Something is there that was not published by this program.
    #[error("`{}` exists and was not written by this program", .target.display())]
    Foreign { target: PathBuf },
    /// The target was changed since it was published.
    #[error("`{}` was changed since it was published: `{file}` {how}", .target.display())]
    Changed {
        target: PathBuf,
        /// The first file that differs.
        file: String,
        /// In what way.
        how: &'static str,
    },
    /// The target holds something else that was published: another pipeline's.
    #[error("`{}` holds a published {found}, and a {kind} is to be published there", .target.display())]
    OtherKind {
        target: PathBuf,
        /// The kind of what is there.
        found: String,
        /// The kind of what is to be there.
        kind: String,
    },
    /// The output holds a file with the name of the record.
    #[error("the output contains a file `{RECORD}`, which is the name of the record of a published folder")]
    NameTaken,
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
            Self::Foreign { .. } | Self::Changed { .. } | Self::OtherKind { .. } | Self::NameTaken => Cause::BadData,
            Self::Io { .. }
            | Self::Store(StoreError::Io { .. } | StoreError::DiskFull { .. } | StoreError::Rename { .. }) => {
                by_system_error(self).unwrap_or(Cause::Machine)
            }
            Self::Store(StoreError::Outside { .. }) => Cause::ChangedWhileRunning,
            Self::Store(_) => Cause::CorruptInput,
            Self::Panicked => Cause::Internal,
        }
    }

    /// What was to be written when the file system refused, where that is known.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            Self::Io { path, .. } | Self::Store(StoreError::Io { path, .. } | StoreError::DiskFull { path, .. }) => {
                Some(path)
            }
            Self::Store(StoreError::Rename { to, .. }) => Some(to),
            Self::Foreign { .. }
            | Self::Changed { .. }
            | Self::OtherKind { .. }
            | Self::NameTaken
            | Self::Store(_)
            | Self::Panicked => None,
        }
    }

    /// What the user can do about it.
    pub fn help(&self) -> Option<&'static str> {
        match self {
            Self::Foreign { .. } | Self::Changed { .. } | Self::OtherKind { .. } => {
                Some("move it away, or replace it with `pipeline run --overwrite`")
            }
            Self::NameTaken => {
                Some("give the file another name in the stage that makes it, or leave it out (`exclude` of a download)")
            }
            Self::Store(StoreError::Outside { .. }) => Some(OUTSIDE),
            Self::Io { .. } | Self::Store(_) | Self::Panicked => None,
        }
    }
}

/// Makes `target` a copy of an output, unless it is one. `seen` is the file with the digests of published files.
///
/// # Errors
/// Fails where somebody else made or changed the target, or the disk refuses; the target is then as it was.
pub fn publish(
    store: &Store,
    output: &OutputRecord,
    (target, link): (&Path, Link),
    on_changed: OnChanged,
    seen: &Path,
) -> Result<Published, PublishError> {
    // One at a time: the temporary names below are then this process's, and what is there is a dead process's.
    let _lock = store.lock(&lock_name(target))?;
    let _alone = Alone::beside(target)?;
    tidy(target)?;
    let found = match on_changed {
        // What the user asks for is the very content.
        OnChanged::Overwrite => inspect(target, Some(&output.kind), Look::Contents),
        OnChanged::Refuse => {
            let mut files = StatCache::load(seen);
            let found = inspect(target, Some(&output.kind), Look::Attributes(&mut files));
            // What could not be written down is read again.
            let _ = files.save(seen);
            found
        }
    };
    match (found, on_changed) {
        (Ok(Some(published)), _) if published == (output.tree, link) => {
            if link == Link::Copy {
                return Ok(Published::Current);
            }
            // The store may have been moved, or have lost what the links lead to.
            if record::leads_to(store, &stored_files(store, &output.tree, &output.identity)?, target) {
                store.note_linked(target, &output.tree)?;
                return Ok(Published::Current);
            }
        }
        (Ok(_), _) => {}
        (
            Err(PublishError::Foreign { .. } | PublishError::Changed { .. } | PublishError::OtherKind { .. }),
            OnChanged::Overwrite,
        ) => {}
        (Err(error), _) => return Err(error),
    }
    let temporary = beside(target, NEW);
    let written = write(store, output, link, &temporary, target);
    if written.is_err() {
        // The first error is the one to tell; what stays is removed by the next run.
        let _ = remove(&temporary);
    }
    written.map(|()| Published::Written)
}

/// Where an entry of `publish:` is copied to, absolute.
pub(crate) fn target(plan: &Plan, publish: &Publish) -> PathBuf {
    plan.folder.join(&publish.path)
}

/// The lock of those who publish to a target.
fn lock_name(target: &Path) -> String {
    format!("publish-{}", Digest::of(target.as_os_str().as_encoded_bytes()))
}

/// Keeps out others who publish into the same folder, runs with another home and on other machines too where the file
/// system tells them: the temporary names are the same for all.
struct Alone {
    /// The folder, locked for as long as it is open.
    _folder: File,
}

impl Alone {
    fn beside(target: &Path) -> Result<Self, PublishError> {
        let parent = target.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(parent).map_err(failed("create folder", parent))?;
        let folder = File::open(parent).map_err(failed("open", parent))?;
        // Some network file systems have no locks.
        let _ = folder.lock();
        Ok(Self { _folder: folder })
    }

    /// None where another one publishes there at this moment, or nobody can.
    fn at_once_beside(target: &Path) -> Option<Self> {
        let folder = File::open(target.parent().unwrap_or(Path::new("."))).ok()?;
        (!matches!(folder.try_lock(), Err(TryLockError::WouldBlock))).then_some(Self { _folder: folder })
    }
}

/// The tree that a target is a copy of, or links to, or `None` where nothing is there; `kind` is that of the output
/// that is to be there, where it is known.
fn inspect(target: &Path, kind: Option<&str>, look: Look<'_>) -> Result<Option<(Digest, Link)>, PublishError> {
    let foreign = || PublishError::Foreign { target: target.to_owned() };
    let metadata = match fs::symlink_metadata(target) {
        Ok(metadata) => metadata,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        Err(error) => return Err(failed("look at", target)(error)),
    };
    if !metadata.is_dir() {
        return Err(foreign());
    }
    let Some(record) = Record::read(target)? else {
        let mut entries = fs::read_dir(target).map_err(failed("list", target))?;
        return if entries.next().is_none() { Ok(None) } else { Err(foreign()) };
    };
    if let (Some(found), Some(kind)) = (record.kind(), kind)
        && found != kind
    {
        let (target, found, kind) = (target.to_owned(), found.to_owned(), kind.to_owned());
        return Err(PublishError::OtherKind { target, found, kind });
    }
    record.compare(target, look)?;
    Ok(Some((record.tree, record.link)))
}

/// What the new folder is called while it is made, and the old one where the two cannot be exchanged in one step.
const NEW: &str = "new";
const OLD: &str = "old";

/// A name beside the target that is this program's.
fn beside(target: &Path, which: &str) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    target.with_file_name(format!(".{name}.pipeline-{which}"))
}

/// Removes what a process left that was killed while it published, or puts the old folder back where that has no other
/// name.
fn tidy(target: &Path) -> Result<(), PublishError> {
    remove(&beside(target, NEW))?;
    let old = beside(target, OLD);
    if fs::symlink_metadata(&old).is_err() {
        return Ok(());
    }
    match fs::symlink_metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::rename(&old, target).map_err(failed("restore", target))
        }
        _ => remove(&old),
    }
}

/// Removes whatever has a name, if anything has; a link and not what it leads to.
fn remove(path: &Path) -> Result<(), PublishError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => return Ok(()),
    };
    removed.map_err(failed("remove", path))
}

/// Copies or links an output beside the target, and puts the copy in its place when it is whole.
fn write(
    store: &Store,
    output: &OutputRecord,
    link: Link,
    temporary: &Path,
    target: &Path,
) -> Result<(), PublishError> {
    let parent = target.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).map_err(failed("create folder", parent))?;
    let files = stored_files(store, &output.tree, &output.identity)?;
    if files.get(RECORD).is_some() {
        return Err(PublishError::NameTaken);
    }
    match link {
        Link::Copy => store.copy_files_out(&files, temporary)?,
        Link::Symlink => {
            store.note_linked(target, &output.tree)?;
            store.link_files_out(&files, temporary)?;
        }
    }
    write_atomically(&temporary.join(RECORD), &Record::new(output, &files, link).to_json())?;
    replace_folder(temporary, target, &beside(target, OLD))?;
    Ok(())
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PublishError {
    let path = path.to_owned();
    move |source| PublishError::Io { action, path, source }
}
