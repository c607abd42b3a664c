//! What is in a store, and how much room it takes.

use std::fs;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::Serialize;

use crate::entry::is_absent;
use crate::record::Records;
use crate::{Digest, OutputRecord, ResultRecord, Store, StoreError};

/// What is in a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    /// The results, sorted by kind and key.
    pub results: Vec<ListedResult>,
    /// Records of results that cannot be read and are not among these, each with the operating system's error message.
    pub unreadable: Vec<(PathBuf, String)>,
    /// Objects, each counted once.
    pub objects: u64,
    /// Their length together.
    pub object_bytes: u64,
    /// Objects that are outside the store, each counted once.
    pub outside: u64,
    /// The length of their files together.
    pub outside_bytes: u64,
    /// Folders of resumable working state.
    pub partials: u64,
    /// Their length together.
    pub partial_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedResult {
    pub key: Digest,
    /// The kind of stage that made it.
    pub kind: String,
    /// Its outputs, sorted by name.
    pub outputs: Vec<ListedOutput>,
    /// The length of all outputs together; files shared with other results count in each.
    pub bytes: u64,
    /// When it was last taken or recorded.
    pub last_use: SystemTime,
}

/// One output of a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ListedOutput {
    pub name: String,
    /// The artefact's kind.
    pub kind: String,
    /// The stored folder.
    pub tree: Digest,
    pub files: usize,
    /// Their length together.
    pub bytes: u64,
    /// Whether every file is there with its right size.
    pub complete: bool,
}

impl Store {
    /// What is in the store, and how much room it takes.
    ///
    /// # Errors
    /// Fails where a folder of the store cannot be listed.
    pub fn list(&self) -> Result<Listing, StoreError> {
        let Records { sound, unreadable } = self.records()?;
        let mut results: Vec<_> = sound.into_iter().map(|(key, record)| self.list_result(key, record)).collect();
        results.sort_by(|one, other| (&one.kind, one.key).cmp(&(&other.kind, other.key)));
        let mut listing = Listing { results, unreadable, ..Listing::default() };
        for object in self.digest_files("objects")?.iter().filter(|file| file.digest.is_some()) {
            listing.objects += 1;
            listing.object_bytes += object.size;
        }
        for (_, file) in self.outside_files()? {
            listing.outside += 1;
            listing.outside_bytes += file.size();
        }
        for partial in self.partials()? {
            listing.partials += 1;
            listing.partial_bytes += partial.bytes;
        }
        Ok(listing)
    }

    fn list_result(&self, key: Digest, record: ResultRecord) -> ListedResult {
        let list = |(name, output)| self.list_output(name, output);
        let outputs: Vec<_> = record.outputs.into_iter().map(list).collect();
        let bytes = outputs.iter().map(|output| output.bytes).sum();
        let last_use = self.last_use(&key).unwrap_or(SystemTime::UNIX_EPOCH);
        ListedResult { key, kind: record.kind, outputs, bytes, last_use }
    }

    fn list_output(&self, name: String, output: OutputRecord) -> ListedOutput {
        let OutputRecord { kind, tree, .. } = output;
        match self.tree(&tree) {
            Ok(stored) => {
                let complete = stored.files().iter().all(|file| self.has(file));
                ListedOutput { name, kind, tree, files: stored.files().len(), bytes: stored.bytes(), complete }
            }
            Err(_) => ListedOutput { name, kind, tree, files: 0, bytes: 0, complete: false },
        }
    }

    /// The files in the shards of `objects`, `outside` or `trees`, sorted by path.
    pub(crate) fn digest_files(&self, name: &str) -> Result<Vec<DigestFile>, StoreError> {
        let folder = self.folder(name);
        let mut files = Vec::new();
        for (shard, metadata) in entries(&folder)? {
            if metadata.is_dir() {
                let inside = entries(&shard)?.into_iter();
                files.extend(inside.map(|(path, metadata)| DigestFile::new(&folder, path, &metadata)));
            } else {
                files.push(DigestFile::new(&folder, shard, &metadata));
            }
        }
        files.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(files)
    }
}

/// A file that should be named after its digest.
pub(crate) struct DigestFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its length in bytes.
    pub size: u64,
    /// When it last changed in any way.
    pub changed: SystemTime,
    /// The digest in its name, if that is one.
    pub digest: Option<Digest>,
}

impl DigestFile {
    fn new(folder: &Path, path: PathBuf, metadata: &Metadata) -> Self {
        let below = path.strip_prefix(folder).ok().and_then(Path::to_str);
        let digest = below.and_then(|name| name.split_once('/')).and_then(|(shard, rest)| {
            let name = format!("{shard}{rest}");
            // The same digits in another spelling, or split elsewhere, name a file that nobody will look for.
            name.parse::<Digest>().ok().filter(|digest| shard.len() == 2 && digest.to_string() == name)
        });
        Self { path, size: metadata.len(), changed: changed(metadata), digest }
    }
}

/// When a file last changed in any way: in its content, its name, its attributes. No program can set this time.
pub(crate) fn changed(metadata: &Metadata) -> SystemTime {
    let seconds = Duration::from_secs(u64::try_from(metadata.ctime()).unwrap_or(0));
    let rest = Duration::from_nanos(u64::try_from(metadata.ctime_nsec()).unwrap_or(0));
    SystemTime::UNIX_EPOCH + seconds + rest
}

/// What is in a folder, if that is there; what vanishes meanwhile is left out.
pub(crate) fn entries(folder: &Path) -> Result<Vec<(PathBuf, fs::Metadata)>, StoreError> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(folder) {
        Err(error) if is_absent(&error) => return Ok(found),
        entries => entries.map_err(StoreError::on("list", folder))?,
    };
    for entry in entries {
        let path = entry.map_err(StoreError::on("list", folder))?.path();
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        found.push((path, metadata));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::testing::{add, store};
    use crate::{Class, KeyDocument};

    #[test]
    fn results_are_listed_with_their_sizes_and_shared_files_counted_once_in_all() {
        let (_home, store) = store();
        let record = |kind: &str, files: &[(&str, &str)]| {
            let mut document = KeyDocument::default();
            document.push("stage", kind, Class::Semantic);
            let tree = add(&store, files);
            let facts = serde_json::Map::new();
            let output = OutputRecord { kind: "rows".to_owned(), tree, identity: tree, facts };
            let outputs = [("out".to_owned(), output)].into();
            let record = ResultRecord::new(document.clone(), kind, outputs, serde_json::Map::new());
            store.record(&document.result_key(), &record).unwrap();
            tree
        };
        record("tokenize", &[("a", "shared"), ("b", "own")]);
        let tree = record("dataset", &[("a", "shared")]);
        fs::write(store.partial(&Digest::of(b"key")).unwrap().join("state"), "12345").unwrap();

        let listing = store.list().unwrap();
        let kinds: Vec<_> = listing.results.iter().map(|result| (result.kind.as_str(), result.bytes)).collect();
        assert_eq!(kinds, [("dataset", 6), ("tokenize", 9)]);
        let output = &listing.results[0].outputs[0];
        let expected =
            ListedOutput { name: "out".into(), kind: "rows".into(), tree, files: 1, bytes: 6, complete: true };
        assert_eq!(*output, expected);
        assert_eq!((listing.objects, listing.object_bytes), (2, 9));
        assert_eq!((listing.partials, listing.partial_bytes), (1, 5));

        store.evict(&Digest::of(b"own")).unwrap();
        let listing = store.list().unwrap();
        assert!(listing.results[0].outputs[0].complete);
        assert!(!listing.results[1].outputs[0].complete);
    }
}
