//! Records of results: what a key led to, and how that came about.
//!
//! A record is a JSON document whose first line holds the digest of all that follows it: what it says of an output (the
//! tree, the identity that enters other keys, the facts that other stages are checked by) is in no key, so nothing else
//! would show a flipped bit.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::fcntl::AT_FDCWD;
use nix::sys::stat::{UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::entry::{Entry, is_absent, read_entry, read_with_metadata, remove_entry};
use crate::in_use::{FRESH, is_read_only};
use crate::stat_cache::Attributes;
use crate::{Digest, KeyDocument, Store, StoreError};

/// Version of the record's form on disk. Records of version 1 are read; their trees may hold files that describe the
/// output, which those of version 2 never do: a program that looks for them passes over these.
pub const RECORD_VERSION: u32 = 2;

/// The oldest version that is read.
const OLDEST_VERSION: u32 = 1;

/// What a key led to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResultRecord {
    /// Of the program that wrote it: [`RECORD_VERSION`], or an older one.
    pub version: u32,
    /// Everything the result depends on; its digest is the record's name.
    pub key: KeyDocument,
    /// The kind of stage that made it.
    pub kind: String,
    /// The outputs by name.
    pub outputs: BTreeMap<String, OutputRecord>,
    /// How it came about (backend, kernel set, threads); part of no key.
    pub how: serde_json::Map<String, serde_json::Value>,
}

/// One output of a result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OutputRecord {
    /// The artefact's kind.
    pub kind: String,
    /// The stored folder.
    pub tree: Digest,
    /// What enters downstream keys.
    pub identity: Digest,
    /// Facts for later checks.
    pub facts: serde_json::Map<String, serde_json::Value>,
}

impl ResultRecord {
    /// A record in the present form.
    pub fn new(
        key: KeyDocument,
        kind: impl Into<String>,
        outputs: BTreeMap<String, OutputRecord>,
        how: serde_json::Map<String, serde_json::Value>,
    ) -> Self {
        Self { version: RECORD_VERSION, key, kind: kind.into(), outputs, how }
    }
}

/// What a look at the record of a key finds.
#[derive(Debug, Clone, PartialEq)]
pub enum Examined {
    /// There is none that this version of the program could read.
    None,
    /// It is as it was written.
    Sound(Box<ResultRecord>),
    /// It is not: it contradicts its check or its key.
    Damaged,
}

/// A result whose record was read, for who takes it a moment later ([`Store::take_seen`]).
#[derive(Debug)]
pub struct SeenResult {
    /// The key of the result.
    pub key: Digest,
    /// The outputs by name.
    pub outputs: BTreeMap<String, OutputRecord>,
    /// Those of the record's file.
    attributes: Attributes,
}

/// What a record's file turns out to hold.
pub(crate) enum Stored {
    /// The record of the key in the file's name.
    Sound(ResultRecord),
    /// A record of another version of this program, which may still want it.
    Foreign,
    /// Neither.
    Damaged,
}

/// The records of a store, but for damaged ones.
#[derive(Default)]
pub(crate) struct Records {
    /// With their keys, sorted by these.
    pub sound: Vec<(Digest, ResultRecord)>,
    /// Files that the operating system does not let read, each with the system's error message.
    pub unreadable: Vec<(PathBuf, String)>,
}

/// How the first line of a record begins, behind the brace, and how it ends.
const CHECK: (&str, &str) = ("{\n  \"check\": \"", "\",\n");

/// Length of a digest in hexadecimal digits.
const DIGITS: usize = 64;

/// The form of a record on disk.
pub(crate) fn to_bytes(record: &ResultRecord) -> Vec<u8> {
    let json = serde_json::to_string_pretty(record).expect("a record is made of strings and JSON values");
    let fields = json.strip_prefix("{\n").expect("a record has fields");
    format!("{}{}{}{fields}\n", CHECK.0, Digest::of(format!("{fields}\n").as_bytes()), CHECK.1).into_bytes()
}

/// The document without the line of its check. `None` where the two contradict each other. A record of before that line
/// was written is taken as it is.
fn checked(bytes: &[u8]) -> Option<Vec<u8>> {
    let Some(rest) = bytes.strip_prefix(CHECK.0.as_bytes()) else { return Some(bytes.to_vec()) };
    let (digits, rest) = rest.split_at_checked(DIGITS)?;
    let fields = rest.strip_prefix(CHECK.1.as_bytes())?;
    let digest: Digest = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (digest == Digest::of(fields)).then(|| [b"{", fields].concat())
}

impl Stored {
    /// What is in the place of a record; `None` where nothing is.
    pub(crate) fn at(path: &Path, key: &Digest) -> Result<Option<Self>, StoreError> {
        Ok(match read_entry(path)? {
            Entry::None => None,
            Entry::Other(_) => Some(Self::Damaged),
            Entry::File(bytes) => Some(Self::read(&bytes, key)),
        })
    }

    /// Whether the bytes of a record hold a check. Those of before there was one do not.
    pub(crate) fn has_check(bytes: &[u8]) -> bool {
        bytes.starts_with(CHECK.0.as_bytes())
    }

    /// Reads a record and compares it with its check and with the key in its name.
    pub(crate) fn read(bytes: &[u8], key: &Digest) -> Self {
        let Some(bytes) = checked(bytes) else { return Self::Damaged };
        let bytes = bytes.as_slice();
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let record = serde_json::from_slice::<ResultRecord>(bytes);
        // A record of another version may have another form.
        let version = match &record {
            Ok(record) => Some(record.version),
            Err(_) => serde_json::from_slice(bytes).ok().map(|Version { version }| version),
        };
        match record {
            _ if version.is_some_and(|version| !(OLDEST_VERSION..=RECORD_VERSION).contains(&version)) => Self::Foreign,
            Ok(record) if record.key.result_key() == *key => Self::Sound(record),
            Ok(_) | Err(_) => Self::Damaged,
        }
    }
}

impl Store {
    /// Looks at the record of a key, and leaves it as it is.
    ///
    /// # Errors
    /// Fails where the record exists and cannot be read.
    pub fn examine(&self, key: &Digest) -> Result<Examined, StoreError> {
        Ok(match Stored::at(&self.record_path(key), key)? {
            None | Some(Stored::Foreign) => Examined::None,
            Some(Stored::Sound(record)) => Examined::Sound(Box::new(record)),
            Some(Stored::Damaged) => Examined::Damaged,
        })
    }

    /// The result of a key. A damaged record counts as none, and is removed by who may.
    ///
    /// # Errors
    /// Fails where the record exists and cannot be read.
    pub fn result(&self, key: &Digest) -> Result<Option<ResultRecord>, StoreError> {
        let path = self.record_path(key);
        match Stored::at(&path, key)? {
            Some(Stored::Sound(record)) => Ok(Some(record)),
            None | Some(Stored::Foreign) => Ok(None),
            Some(Stored::Damaged) => match remove_entry(&path) {
                Err(StoreError::Io { source, .. }) if is_read_only(&source) => Ok(None),
                removed => removed.map(|_| None),
            },
        }
    }

    /// The result of a key, by its record alone. Changes nothing, and passes over what cannot be read.
    pub fn see(&self, key: &Digest) -> Option<SeenResult> {
        let (entry, metadata) = read_with_metadata(&self.record_path(key)).ok()?;
        let (Entry::File(bytes), Some(metadata)) = (entry, metadata) else { return None };
        let Stored::Sound(record) = Stored::read(&bytes, key) else { return None };
        Some(SeenResult { key: *key, outputs: record.outputs, attributes: Attributes::of(&metadata) })
    }

    /// The result of a key if every file of it is there, taken into use: as long as this store is open, no garbage
    /// collection removes it. Whoever goes on to read a result takes it; [`Store::result`] and [`Store::see`] are for
    /// those who look at the record alone.
    ///
    /// # Errors
    /// As [`Store::result`], and where the lock on the store fails.
    pub fn take(&self, key: &Digest) -> Result<Option<ResultRecord>, StoreError> {
        let _passage = self.pass()?;
        let Some(record) = self.result(key)? else { return Ok(None) };
        let used = self.use_outputs(key, &record.outputs, self.last_use(key))?;
        Ok(used.then_some(record))
    }

    /// As [`Store::take`], the outputs alone; the record is not read again where its file is the one that was seen.
    ///
    /// # Errors
    /// As [`Store::take`].
    pub fn take_seen(&self, seen: SeenResult) -> Result<Option<BTreeMap<String, OutputRecord>>, StoreError> {
        let passage = self.pass()?;
        let metadata = fs::symlink_metadata(self.record_path(&seen.key)).ok();
        if let Some(metadata) = metadata.filter(|metadata| Attributes::of(metadata) == seen.attributes) {
            let used = self.use_outputs(&seen.key, &seen.outputs, metadata.modified().ok())?;
            return Ok(used.then_some(seen.outputs));
        }
        drop(passage);
        Ok(self.take(&seen.key)?.map(|record| record.outputs))
    }

    /// Takes a result into use that was last used then; whether every file of its outputs is there.
    fn use_outputs(
        &self,
        key: &Digest,
        outputs: &BTreeMap<String, OutputRecord>,
        last_use: Option<SystemTime>,
    ) -> Result<bool, StoreError> {
        if !outputs.values().all(|output| self.complete(&output.tree)) {
            return Ok(false);
        }
        self.mark_used(key, last_use)?;
        Ok(true)
    }

    /// When a result was last taken or recorded; `None` where there is none.
    pub fn last_use(&self, key: &Digest) -> Option<SystemTime> {
        fs::metadata(self.record_path(key)).and_then(|metadata| metadata.modified()).ok()
    }

    /// Records the result of a key.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    ///
    /// # Panics
    /// Panics if `key` is not that of the record's key document: such a record could never be found again.
    pub fn record(&self, key: &Digest, record: &ResultRecord) -> Result<(), StoreError> {
        assert_eq!(*key, record.key.result_key(), "a record is kept under its own key");
        self.publish(&self.record_path(key), &to_bytes(record))
    }

    /// All results, sorted by key; those whose records are damaged or cannot be read are left out.
    ///
    /// # Errors
    /// Fails where the folder cannot be listed.
    pub fn results(&self) -> Result<Vec<(Digest, ResultRecord)>, StoreError> {
        Ok(self.records()?.sound)
    }

    /// [`Store::results`], and what cannot be read.
    pub(crate) fn records(&self) -> Result<Records, StoreError> {
        let mut records = Records::default();
        for (path, key) in self.record_files()? {
            let Some(key) = key else { continue };
            match Stored::at(&path, &key) {
                Ok(Some(Stored::Sound(record))) => records.sound.push((key, record)),
                Ok(Some(Stored::Foreign | Stored::Damaged) | None) => {}
                Err(error) => records.unreadable.push((path, error.into_io().to_string())),
            }
        }
        Ok(records)
    }

    /// Removes the record of a key; whether there was one.
    ///
    /// # Errors
    /// Fails where the file cannot be removed.
    pub fn forget(&self, key: &Digest) -> Result<bool, StoreError> {
        remove_entry(&self.record_path(key))
    }

    /// The files of records, sorted, with the key in each one's name; `None` for a file that is no record.
    pub(crate) fn record_files(&self) -> Result<Vec<(PathBuf, Option<Digest>)>, StoreError> {
        let folder = self.folder("results");
        let mut files = Vec::new();
        let entries = match fs::read_dir(&folder) {
            Err(error) if is_absent(&error) => return Ok(files),
            entries => entries.map_err(StoreError::on("list", &folder))?,
        };
        for entry in entries {
            let path = entry.map_err(StoreError::on("list", &folder))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".json"));
            let key = name.and_then(|name| name.parse().ok()).filter(|key| self.record_path(key) == path);
            files.push((path, key));
        }
        files.sort();
        Ok(files)
    }

    pub(crate) fn record_path(&self, key: &Digest) -> PathBuf {
        self.folder("results").join(format!("{key}.json"))
    }

    /// Sets the time of the record, which is that of its last use, unless that is recent enough to say that the result
    /// is in use.
    pub(crate) fn mark_used(&self, key: &Digest, last_use: Option<SystemTime>) -> Result<(), StoreError> {
        let (Some(since), Some(last)) = (self.user_since(), last_use) else { return Ok(()) };
        if last.checked_add(FRESH).is_some_and(|until| until >= since) {
            return Ok(());
        }
        let path = self.record_path(key);
        // The file system's own "now", which is not this machine's where the store is shared.
        let now = TimeSpec::UTIME_NOW;
        match utimensat(AT_FDCWD, &path, &now, &now, UtimensatFlags::FollowSymlink).map_err(io::Error::from) {
            Err(error) if error.kind() != io::ErrorKind::NotFound && !is_read_only(&error) => {
                Err(StoreError::io("mark as used", &path, error))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Class;
    use crate::testing::{add, store};

    fn record(rank: &str) -> (Digest, ResultRecord) {
        let mut key = KeyDocument::default();
        key.push("stage", "train", Class::Semantic);
        key.push("epochs", "1", Class::Resumable);
        key.push("lora.rank", rank, Class::Semantic);
        let facts = serde_json::from_value(serde_json::json!({ "z": 1, "a": [0.1, "x"] })).unwrap();
        let output =
            OutputRecord { kind: "adapter".to_owned(), tree: Digest::of(b"tree"), identity: Digest::of(b"id"), facts };
        let outputs = [("adapter".to_owned(), output)].into();
        (key.result_key(), ResultRecord::new(key, "train", outputs, serde_json::Map::new()))
    }

    #[test]
    fn a_record_is_found_replaced_listed_and_forgotten() {
        let (_home, store) = store();
        let (key, mut four) = record("4");
        let (other, eight) = record("8");
        assert_eq!(store.result(&key).unwrap(), None);
        store.record(&key, &four).unwrap();
        four.how.insert("threads".to_owned(), 2.into());
        store.record(&key, &four).unwrap();
        store.record(&other, &eight).unwrap();
        assert_eq!(store.result(&key).unwrap().as_ref(), Some(&four));
        let mut expected = vec![(key, four), (other, eight)];
        expected.sort_by_key(|(key, _)| *key);
        assert_eq!(store.results().unwrap(), expected);
        assert!(store.forget(&key).unwrap());
        assert!(!store.forget(&key).unwrap());
        assert_eq!(store.result(&key).unwrap(), None);
    }

    #[test]
    fn a_seen_result_is_taken_as_long_as_its_record_and_its_files_are_there() {
        let (_home, store) = store();
        let tree = add(&store, &[("a", "first")]);
        let (_, mut record) = record("4");
        record.outputs.values_mut().for_each(|output| output.tree = tree);
        let key = record.key.result_key();
        assert!(store.see(&key).is_none());
        store.record(&key, &record).unwrap();
        let see = || store.see(&key).unwrap();
        assert_eq!(store.take_seen(see()).unwrap().as_ref(), Some(&record.outputs));

        // Another process has made it anew since, with other facts.
        let seen = see();
        let mut newer = record.clone();
        newer.outputs.values_mut().for_each(|output| drop(output.facts.insert("rows".to_owned(), 2.into())));
        store.record(&key, &newer).unwrap();
        assert_eq!(store.take_seen(seen).unwrap(), Some(newer.outputs));

        let seen = see();
        store.forget(&key).unwrap();
        assert_eq!(store.take_seen(seen).unwrap(), None);

        store.record(&key, &record).unwrap();
        let seen = see();
        store.evict(&Digest::of(b"first")).unwrap();
        assert_eq!(store.take_seen(seen).unwrap(), None);
    }

    #[test]
    fn taking_a_result_writes_down_its_use_but_not_over_and_over() {
        let (_home, store) = store();
        let tree = add(&store, &[("a", "first")]);
        let (_, mut record) = record("4");
        record.outputs.values_mut().for_each(|output| output.tree = tree);
        let key = record.key.result_key();
        store.record(&key, &record).unwrap();
        let set = |time| {
            let file = fs::File::options().write(true).open(store.record_path(&key)).unwrap();
            file.set_modified(time).unwrap();
        };
        let since = store.user_since().unwrap();
        let fresh = since - FRESH;
        set(fresh);
        assert_eq!(store.take(&key).unwrap().as_ref(), Some(&record));
        assert_eq!(store.last_use(&key), Some(fresh));
        set(fresh - Duration::from_secs(1));
        assert_eq!(store.result(&key).unwrap().as_ref(), Some(&record));
        assert!(store.last_use(&key) < Some(fresh));
        assert_eq!(store.take(&key).unwrap().as_ref(), Some(&record));
        assert!(store.last_use(&key) >= Some(since));
        store.evict(&Digest::of(b"first")).unwrap();
        assert_eq!(store.take(&key).unwrap(), None);
    }

    #[test]
    fn a_damaged_record_counts_as_none_and_is_removed() {
        let (_home, store) = store();
        let (key, record_of_key) = record("4");
        let (_, other) = record("8");
        store.record(&key, &record_of_key).unwrap();
        let path = store.record_path(&key);
        let sound = fs::read(&path).unwrap();
        let damaged = [Vec::new(), sound[..sound.len() / 2].to_vec(), serde_json::to_vec(&other).unwrap()];
        for bytes in damaged {
            fs::write(&path, bytes).unwrap();
            assert_eq!(store.results().unwrap(), []);
            assert_eq!(store.result(&key).unwrap(), None);
            assert!(!path.exists());
        }
    }

    #[test]
    fn every_flipped_bit_of_a_record_is_noticed() {
        let (_home, store) = store();
        let (key, record) = record("4");
        store.record(&key, &record).unwrap();
        let sound = fs::read(store.record_path(&key)).unwrap();
        assert!(serde_json::from_slice::<serde_json::Value>(&sound).unwrap()["check"].is_string());
        for position in 0..sound.len() {
            for bit in 0..8 {
                let mut bytes = sound.clone();
                bytes[position] ^= 1 << bit;
                match Stored::read(&bytes, &key) {
                    Stored::Damaged => {}
                    // An upper-case digit of the check, which says the same.
                    Stored::Sound(read) => assert_eq!(read, record, "byte {position}"),
                    Stored::Foreign => panic!("byte {position}"),
                }
            }
            assert!(matches!(Stored::read(&sound[..position], &key), Stored::Damaged), "length {position}");
        }
    }

    #[test]
    fn a_record_of_before_there_was_a_check_is_read() {
        let (_home, store) = store();
        let (key, record) = record("4");
        fs::write(store.record_path(&key), serde_json::to_vec_pretty(&record).unwrap()).unwrap();
        assert_eq!(store.result(&key).unwrap(), Some(record));
    }

    #[test]
    fn a_record_of_the_version_before_is_read() {
        let (_home, store) = store();
        let (key, record) = record("4");
        let record = ResultRecord { version: OLDEST_VERSION, ..record };
        store.record(&key, &record).unwrap();
        assert_eq!(store.result(&key).unwrap(), Some(record));
    }

    #[test]
    fn a_record_of_another_version_is_not_ours_to_remove() {
        let (_home, store) = store();
        let (key, _) = record("4");
        let path = store.record_path(&key);
        fs::write(&path, r#"{"version":9,"new":"form"}"#).unwrap();
        assert_eq!(store.result(&key).unwrap(), None);
        assert!(path.exists());
    }

    #[test]
    #[should_panic(expected = "under its own key")]
    fn a_record_under_anothers_key_is_a_bug() {
        let (_home, store) = store();
        let _ = store.record(&record("4").0, &record("8").1);
    }
}
