//! Digests of source files, remembered as long as the files' attributes stay what they were.
//!
//! The file's first line is the digest of the rest: a flipped bit in a remembered digest would otherwise make a source
//! file that never changed one that changes in every run.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{self, Path};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::atomic::write_atomically;
use crate::digest::open_regular;
use crate::entry::{self, checked, read_entry, remove_entry, with_check};
use crate::{Digest, StoreError};

/// Version of the cache's form on disk.
const VERSION: u32 = 2;

/// How long a file must have been left alone before its attributes can stand for its content. A second write within one
/// tick of the file system's clock changes no attribute; the coarsest clock in use (FAT's) ticks every two seconds.
const SETTLED: Duration = Duration::from_secs(2);

/// Remembers digests of files outside the store.
///
/// Attributes can lie (a clock set back, a file system without inodes), so this serves source files and the decision
/// that nothing is to be done; what a stage computes from is always read.
#[derive(Debug, Default)]
pub struct StatCache {
    files: BTreeMap<String, Entry>,
    changed: bool,
}

impl StatCache {
    /// Loads what [`StatCache::save`] wrote; a missing or damaged file gives an empty cache.
    pub fn load(path: &Path) -> Self {
        let stored = match read_entry(path) {
            Ok(entry::Entry::File(bytes)) => read(&bytes),
            Ok(entry::Entry::None | entry::Entry::Other(_)) | Err(_) => None,
        };
        Self { files: stored.map(|stored| stored.files).unwrap_or_default(), changed: false }
    }

    /// The digest and the length of a file; it is read only if its attributes are not those remembered.
    ///
    /// # Errors
    /// Fails where the file cannot be read.
    pub fn digest(&mut self, path: &Path) -> Result<(Digest, u64), StoreError> {
        self.digest_at(path, SystemTime::now())
    }

    /// The digest and the length of a file whose attributes are those remembered; of no other, since nothing is read.
    pub fn known(&self, path: &Path) -> Option<(Digest, u64)> {
        let entry = self.files.get(path::absolute(path).ok()?.to_str()?)?;
        let found = Attributes::of(&fs::metadata(path).ok()?);
        (found == entry.attributes).then_some((entry.digest, found.size))
    }

    /// Writes the cache in one step, if it has changed since it was loaded. Files that are gone are forgotten.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn save(&mut self, path: &Path) -> Result<(), StoreError> {
        if !self.changed {
            return Ok(());
        }
        self.files.retain(|file, _| Path::new(file).exists());
        let stored = StoredRef { version: VERSION, files: &self.files };
        let json = serde_json::to_vec(&stored).expect("entries are made of strings and numbers");
        if let entry::Entry::Other(_) = read_entry(path)? {
            remove_entry(path)?;
        }
        write_atomically(path, &with_check(&json))?;
        self.changed = false;
        Ok(())
    }

    fn digest_at(&mut self, path: &Path, now: SystemTime) -> Result<(Digest, u64), StoreError> {
        // A path that is not UTF-8 is not remembered.
        let name = path::absolute(path).ok().and_then(|path| path.into_os_string().into_string().ok());
        let named = || fs::metadata(path).map_err(StoreError::on("read", path)).map(|found| Attributes::of(&found));
        let known = name.as_ref().and_then(|name| self.files.get(name));
        if let Some(entry) = known
            && entry.attributes == named()?
        {
            return Ok((entry.digest, entry.attributes.size));
        }
        let mut file = open_regular(path)?;
        let before = file.metadata().map_err(StoreError::on("read", path))?;
        let attributes = Attributes::of(&before);
        let (digest, size) = Digest::of_open_file(&mut file).map_err(StoreError::on("read", path))?;
        let Some(name) = name else { return Ok((digest, size)) };
        if named()? == attributes && size == attributes.size && attributes.settled(now) {
            self.files.insert(name, Entry { attributes, digest });
            self.changed = true;
        } else {
            self.changed |= self.files.remove(&name).is_some();
        }
        Ok((digest, size))
    }
}

/// Reads the file's form; `None` where it is damaged or of another version.
fn read(bytes: &[u8]) -> Option<Stored> {
    let stored: Stored = serde_json::from_slice(checked(bytes)?).ok()?;
    (stored.version == VERSION).then_some(stored)
}

/// What a file's content had as digest while it had these attributes.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    attributes: Attributes,
    digest: Digest,
}

/// What tells one content of a file from another without reading it. Times are nanoseconds since 1970; `changed` is the
/// time of the last change to the file or its attributes, which no program can set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Attributes {
    device: u64,
    inode: u64,
    size: u64,
    modified: i64,
    changed: i64,
}

impl Attributes {
    pub(crate) fn of(metadata: &Metadata) -> Self {
        let nanoseconds = |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.len(),
            modified: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            changed: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Whether they are those of the same file with the same content, on whichever machine: a file system has another
    /// number on each that mounts it.
    pub(crate) fn agree_with(&self, other: &Self) -> bool {
        Self { device: other.device, ..*self } == *other
    }

    /// Whether both times lay well before `now`, which was taken before the file was read.
    pub(crate) fn settled(&self, now: SystemTime) -> bool {
        let since_1970 = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let limit = since_1970.saturating_sub(SETTLED).as_nanos();
        i128::from(self.modified.max(self.changed)) < i128::try_from(limit).unwrap_or(i128::MAX)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    files: BTreeMap<String, Entry>,
}

#[derive(Serialize)]
struct StoredRef<'a> {
    version: u32,
    files: &'a BTreeMap<String, Entry>,
}

#[cfg(test)]
mod tests {
    use std::fs::{File, FileTimes};

    use super::*;

    /// A moment at which a file written just now has long been left alone.
    fn later() -> SystemTime {
        SystemTime::now() + Duration::from_secs(60)
    }

    /// Replaces the remembered digest, so that an answer tells whether it was remembered.
    fn poison(cache: &mut StatCache) -> Digest {
        let poison = Digest::of(b"poison");
        cache.files.values_mut().for_each(|entry| entry.digest = poison);
        poison
    }

    #[test]
    fn a_settled_file_is_read_once_and_again_when_anything_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut cache = StatCache::default();
        fs::write(&path, "one").unwrap();
        assert_eq!(cache.digest_at(&path, later()).unwrap(), (Digest::of(b"one"), 3));
        let poison = poison(&mut cache);
        assert_eq!(cache.digest_at(&path, later()).unwrap(), (poison, 3));

        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        fs::write(&path, "two").unwrap();
        File::options().write(true).open(&path).unwrap().set_times(FileTimes::new().set_modified(modified)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), modified);
        assert_eq!(cache.digest_at(&path, later()).unwrap(), (Digest::of(b"two"), 3));

        let other = folder.path().join("other");
        fs::write(&other, "three").unwrap();
        fs::rename(&other, &path).unwrap();
        assert_eq!(cache.digest_at(&path, later()).unwrap(), (Digest::of(b"three"), 5));
    }

    #[test]
    fn what_is_known_is_told_without_reading() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut cache = StatCache::default();
        fs::write(&path, "one").unwrap();
        assert_eq!(cache.known(&path), None);
        cache.digest_at(&path, later()).unwrap();
        assert_eq!(cache.known(&path), Some((Digest::of(b"one"), 3)));
        let poison = poison(&mut cache);
        assert_eq!(cache.known(&path), Some((poison, 3)));
        std::thread::sleep(Duration::from_millis(20));
        fs::write(&path, "other").unwrap();
        assert_eq!(cache.known(&path), None);
        fs::remove_file(&path).unwrap();
        assert_eq!(cache.known(&path), None);
    }

    #[test]
    fn a_file_written_just_now_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut cache = StatCache::default();
        // Content of one length, faster than any clock of a file system ticks.
        for content in ["one", "two", "six", "ten"].repeat(25) {
            fs::write(&path, content).unwrap();
            assert_eq!(cache.digest(&path).unwrap(), (Digest::of(content.as_bytes()), 3));
        }
    }

    #[test]
    fn a_file_from_the_future_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut cache = StatCache::default();
        fs::write(&path, "one").unwrap();
        let future = FileTimes::new().set_modified(later() + Duration::from_secs(3600));
        File::options().write(true).open(&path).unwrap().set_times(future).unwrap();
        cache.digest_at(&path, later()).unwrap();
        assert!(cache.files.is_empty());
    }

    #[test]
    fn the_cache_survives_its_file_and_forgets_files_that_are_gone() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("stat.json");
        let [kept, gone] = ["kept", "gone"].map(|name| folder.path().join(name));
        let mut cache = StatCache::load(&place);
        for path in [&kept, &gone] {
            fs::write(path, "content").unwrap();
            cache.digest_at(path, later()).unwrap();
        }
        let poison = poison(&mut cache);
        fs::remove_file(&gone).unwrap();
        cache.save(&place).unwrap();
        let mut cache = StatCache::load(&place);
        assert_eq!(cache.files.len(), 1);
        assert_eq!(cache.digest(&kept).unwrap(), (poison, 7));
        assert!(cache.digest(&gone).is_err());
    }

    #[test]
    fn every_flipped_bit_empties_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let (file, place) = (folder.path().join("file"), folder.path().join("stat"));
        let mut cache = StatCache::default();
        fs::write(&file, "content").unwrap();
        cache.digest_at(&file, later()).unwrap();
        cache.save(&place).unwrap();
        let sound = fs::read(&place).unwrap();
        assert_eq!(StatCache::load(&place).files.len(), 1);
        for position in 0..sound.len() {
            let mut bytes = sound.clone();
            bytes[position] ^= 1;
            assert!(read(&bytes).is_none(), "byte {position}");
            assert!(read(&sound[..position]).is_none(), "length {position}");
        }
    }

    #[test]
    fn an_unchanged_cache_is_not_written_and_a_damaged_one_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("stat.json");
        StatCache::default().save(&place).unwrap();
        assert!(!place.exists());
        for damaged in ["", "{", r#"{"version":2,"files":{}}"#, r#"{"version":1,"files":{"a":1}}"#] {
            fs::write(&place, damaged).unwrap();
            assert!(StatCache::load(&place).files.is_empty(), "{damaged}");
        }
    }
}
