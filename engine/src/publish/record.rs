//! The record in a published folder: what it is a copy of, and whether it still is.
//!
//! It is the one file of this program in there, so that a folder that is moved or sent elsewhere says what it is. It
//! holds no time and nothing of the machine.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io::{self, Read};
use std::path::Path;

use cache::digest::open_regular;
use cache::{Digest, OutputRecord, Place, StatCache, Store, StoreError, Tree};
use serde::{Deserialize, Serialize};

use super::{Link, PublishError, failed};
use crate::artifact::{ARTIFACT_FILE, ARTIFACT_FORMAT, Description, Facts};

/// The file's name. An output that holds a file of this name cannot be published.
pub const RECORD: &str = ".pipeline-published.json";

/// Version of the file's form. Version 1 had no kind and no facts, which lay in a file of the folder, and times
/// instead.
const VERSION: u32 = 2;

/// The longest that is taken for a record.
const LONGEST: u64 = 64 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Record {
    version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    pub tree: Digest,
    pub identity: Digest,
    #[serde(default, skip_serializing_if = "Facts::is_empty")]
    facts: Facts,
    files: BTreeMap<String, RecordedFile>,
    #[serde(default = "copy", skip_serializing_if = "is_copy")]
    pub link: Link,
}

fn copy() -> Link {
    Link::Copy
}

fn is_copy(link: &Link) -> bool {
    *link == Link::Copy
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordedFile {
    digest: Digest,
    size: u64,
    /// Of version 1: proves nothing.
    #[serde(default, skip_serializing)]
    #[expect(dead_code, reason = "read so that version 1 is understood")]
    modified: Option<i128>,
}

/// How closely the files of a folder are compared with its record.
pub(super) enum Look<'a> {
    /// Their names and lengths.
    Names,
    /// Their contents, where their attributes (the times and the number of the file) do not say that they were compared
    /// before.
    Attributes(&'a mut StatCache),
    /// Their contents.
    Contents,
}

impl Record {
    /// The record of a folder that `files` are copied to.
    pub(super) fn new(output: &OutputRecord, files: &Tree, link: Link) -> Self {
        let file = |file: &cache::TreeFile| {
            (file.path.clone(), RecordedFile { digest: file.digest, size: file.size, modified: None })
        };
        Self {
            version: VERSION,
            kind: Some(output.kind.clone()),
            tree: output.tree,
            identity: output.identity,
            facts: output.facts.clone(),
            files: files.files().iter().map(file).collect(),
            link,
        }
    }

    /// The record in a folder; `None` where there is none that this version understands.
    pub(super) fn read(folder: &Path) -> Result<Option<Self>, PublishError> {
        let Some(text) = read(&folder.join(RECORD))? else { return Ok(None) };
        let record = serde_json::from_slice::<Self>(&text).ok();
        Ok(record.filter(|record| matches!(record.version, 1 | VERSION)))
    }

    /// The kind of what was published; version 1 does not say it here.
    pub(super) fn kind(&self) -> Option<&str> {
        self.kind.as_deref()
    }

    pub(super) fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("a record is plain data")
    }

    /// What the folder was when it was published.
    fn description(self, folder: &Path) -> Option<Description> {
        let Self { kind, identity, facts, files, .. } = self;
        match kind {
            Some(kind) => Some(Description { format: ARTIFACT_FORMAT, kind, identity, facts }),
            None => {
                let text = read(&folder.join(ARTIFACT_FILE)).ok()??;
                let recorded = files.get(ARTIFACT_FILE)?;
                let description: Description = serde_json::from_slice(&text).ok()?;
                (Digest::of(&text) == recorded.digest && description.identity == identity).then_some(description)
            }
        }
    }

    /// Compares the files of a folder with the record.
    ///
    /// # Errors
    /// Fails with [`PublishError::Changed`], which names the first file that differs.
    pub(super) fn compare(&self, folder: &Path, mut look: Look<'_>) -> Result<(), PublishError> {
        let changed = |file: &str, how| PublishError::Changed { target: folder.to_owned(), file: file.to_owned(), how };
        let mut present = Vec::new();
        list(folder, "", &mut present).map_err(failed("list", folder))?;
        for (path, metadata) in &present {
            let recorded = self.files.get(path).ok_or_else(|| changed(path, "was added"))?;
            if !recorded.matches(metadata, &folder.join(path), self.link, &mut look) {
                return Err(changed(path, "has another content"));
            }
        }
        match self.files.keys().find(|path| present.binary_search_by(|(other, _)| other.cmp(path)).is_err()) {
            Some(gone) => Err(changed(gone, "is gone")),
            None => Ok(()),
        }
    }
}

impl RecordedFile {
    fn matches(&self, metadata: &Metadata, path: &Path, link: Link, look: &mut Look<'_>) -> bool {
        // What is not in the store is copied also where links are asked for.
        if link == Link::Symlink && !metadata.is_file() {
            // An object is its digest: what else it may hold is a matter of the store (`cache verify`).
            let leads_to = |object: &Path| object.ends_with(Store::place_of_object(&self.digest));
            return metadata.is_symlink() && fs::read_link(path).is_ok_and(|object| leads_to(&object));
        }
        let expected = (self.digest, self.size);
        metadata.is_file()
            && metadata.len() == self.size
            && match look {
                Look::Names => true,
                Look::Attributes(seen) => seen.digest(path).is_ok_and(|found| found == expected),
                Look::Contents => Digest::of_file(path).is_ok_and(|found| found == expected),
            }
    }
}

/// Whether all files of a tree are in a folder as links to the objects of this very store, which has them; those that
/// it has not, as copies.
pub(super) fn leads_to(store: &Store, files: &Tree, folder: &Path) -> bool {
    files.files().iter().all(|file| match (store.place(&file.digest), fs::read_link(folder.join(&file.path))) {
        (Place::Inside(object), Ok(target)) => target == object && store.has(file),
        (Place::Outside(_), target) => target.is_err(),
        (Place::Inside(_), Err(_)) => false,
    })
}

/// What a folder was published as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedAs {
    /// The stored folder.
    pub tree: Digest,
    pub identity: Digest,
    /// How it was changed since, where it was. Every file was read for it.
    pub changed: Option<String>,
}

/// What a folder was published as; `None` where it was not published by this program.
///
/// # Errors
/// Fails where the folder cannot be read.
pub fn published_as(target: &Path) -> Result<Option<PublishedAs>, PublishError> {
    let Some(record) = Record::read(target)? else { return Ok(None) };
    let changed = match record.compare(target, Look::Contents) {
        Ok(()) => None,
        Err(PublishError::Changed { file, how, .. }) => Some(format!("`{file}` {how}")),
        Err(error) => return Err(error),
    };
    Ok(Some(PublishedAs { tree: record.tree, identity: record.identity, changed }))
}

/// What a published folder says of itself: its kind, its identity when it was published, its facts. `None` for any
/// other folder.
///
/// Its files may have been changed since; [`published_as`] finds that out.
pub fn description(folder: &Path) -> Option<Description> {
    Record::read(folder).ok().flatten()?.description(folder)
}

/// Whether the content of a file of that name is a record of this program, and not a user's file.
pub(crate) fn is_record(path: &Path) -> bool {
    let text = read(path).ok().flatten();
    text.is_some_and(|text| serde_json::from_slice::<Record>(&text).is_ok())
}

/// A regular file's content; `None` where there is no such file, or one too long for a record.
fn read(path: &Path) -> Result<Option<Vec<u8>>, PublishError> {
    let file = match open_regular(path) {
        Ok(file) => file,
        Err(StoreError::Io { source, .. })
            if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
        {
            return Ok(None);
        }
        Err(StoreError::NotAFile { .. }) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let mut text = Vec::new();
    file.take(LONGEST + 1).read_to_end(&mut text).map_err(failed("read", path))?;
    Ok((text.len() as u64 <= LONGEST).then_some(text))
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
