//! A census: everything in a store, how much room it takes, and which results hold it.
//!
//! What `cache du` shows and what garbage collection decides by. It reads every record and every tree, and of the
//! objects their attributes alone.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Serialize;

use crate::entry::{Entry, read_entry};
use crate::listing::{DigestFile, entries};
use crate::outside::{NOTES, read_note};
use crate::record::Stored;
use crate::{Digest, Store, StoreError};

/// What is in a store.
#[derive(Debug, Default)]
pub struct Census {
    /// The results, sorted by key; damaged ones and those of another version of this program are left out.
    pub results: Vec<CountedResult>,
    /// The objects, sorted by digest; one that is outside as well as in the store stands here twice.
    pub objects: Vec<CountedObject>,
    /// The trees, sorted by digest.
    pub trees: Vec<CountedTree>,
    /// Working state of stages, sorted by key.
    pub partials: Vec<CountedPartial>,
    /// Length of all records together.
    pub record_bytes: u64,
    /// Length of what processes are making at the moment, or left when they were killed.
    pub staging_bytes: u64,
}

#[derive(Debug)]
pub struct CountedResult {
    pub key: Digest,
    /// The key of the working state that belongs to it.
    pub working_key: Digest,
    /// The kind of stage that made it.
    pub kind: String,
    /// How long making it took, where the record says so.
    pub seconds: Option<f64>,
    /// When it was last taken or recorded.
    pub last_use: SystemTime,
    /// The trees of its outputs.
    pub trees: BTreeSet<Digest>,
    /// Its files, as positions in [`Census::objects`], each once.
    pub objects: Vec<usize>,
    /// Their length together.
    pub bytes: u64,
}

#[derive(Debug)]
pub struct CountedObject {
    pub digest: Digest,
    /// The room that it takes in the store: none where it is outside.
    pub bytes: u64,
    /// The length of the file outside, where it is in one.
    pub outside_bytes: u64,
    /// Its file in the store: of one that is outside, the note of it.
    pub(crate) path: PathBuf,
    /// When that file last changed in any way: stored, or held by a process.
    pub changed: SystemTime,
    /// How many results hold it.
    pub holders: u32,
}

#[derive(Debug)]
pub struct CountedTree {
    pub digest: Digest,
    /// The length of its list.
    pub bytes: u64,
    /// When the file last changed in any way.
    pub changed: SystemTime,
    /// How many results name it.
    pub names: u32,
}

/// The working state of a stage.
#[derive(Debug)]
pub struct CountedPartial {
    /// The working key.
    pub key: Digest,
    /// Its length.
    pub bytes: u64,
    /// When something in it was last written.
    pub written: SystemTime,
}

/// The room that a group of results takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Usage {
    pub results: usize,
    /// The length of their files, each counted once.
    pub bytes: u64,
    /// The part of it that no result of another group holds.
    pub own_bytes: u64,
    /// How long making them took, where that is known.
    pub seconds: f64,
}

/// The name under which a record says how long making its result took.
pub const SECONDS: &str = "seconds";

impl Store {
    /// Counts everything.
    ///
    /// # Errors
    /// Fails where a folder of the store cannot be listed, or a record or a tree cannot be read.
    pub fn census(&self) -> Result<Census, StoreError> {
        let mut census = Census::default();
        // Records first: what they name was there before them.
        let records = self.read_records(&mut census)?;
        let mut counting = Counting::of(self, &mut census)?;
        for record in records {
            counting.count(self, record)?;
        }
        census.partials = self.partials()?;
        census.staging_bytes = Below::of(&self.folder("staging")).bytes;
        Ok(census)
    }

    /// Every record, with the trees that it names. One of another version of this program gives every digest that it
    /// holds, so that what that version needs is kept.
    fn read_records(&self, census: &mut Census) -> Result<Vec<Record>, StoreError> {
        let mut records = Vec::new();
        for (path, key) in self.record_files()? {
            let Some(key) = key else { continue };
            let Entry::File(bytes) = read_entry(&path)? else { continue };
            census.record_bytes += bytes.len() as u64;
            let Some(last_use) = self.last_use(&key) else { continue };
            match Stored::read(&bytes, &key) {
                Stored::Sound(record) => {
                    let trees: BTreeSet<Digest> = record.outputs.values().map(|output| output.tree).collect();
                    let counted = CountedResult {
                        key,
                        working_key: record.key.working_key(),
                        kind: record.kind,
                        seconds: record.how.get(SECONDS).and_then(serde_json::Value::as_f64),
                        last_use,
                        trees: trees.clone(),
                        objects: Vec::new(),
                        bytes: 0,
                    };
                    records.push(Record { result: Some(counted), trees });
                }
                Stored::Foreign => records.push(Record { result: None, trees: digests_in(&bytes) }),
                Stored::Damaged => {}
            }
        }
        Ok(records)
    }

    pub(crate) fn partials(&self) -> Result<Vec<CountedPartial>, StoreError> {
        let folder = self.folder("partial");
        let mut partials = Vec::new();
        for (path, _) in entries(&folder)? {
            let Some(key) = path.file_name().and_then(|name| name.to_str()?.parse().ok()) else { continue };
            let Below { bytes, written } = Below::of(&path);
            partials.push(CountedPartial { key, bytes, written });
        }
        partials.sort_by_key(|partial| partial.key);
        Ok(partials)
    }

    /// The digests that a tree's list names; of one that is damaged, or of another version, every digest in it.
    pub(crate) fn named_by(&self, tree: &Digest) -> Result<BTreeSet<Digest>, StoreError> {
        match self.tree(tree) {
            Ok(tree) => Ok(tree.files().iter().map(|file| file.digest).collect()),
            Err(StoreError::CorruptTree { path, .. }) => Ok(match read_entry(&path) {
                Ok(Entry::File(bytes)) => digests_in(&bytes),
                Ok(Entry::None | Entry::Other(_)) | Err(_) => BTreeSet::new(),
            }),
            Err(StoreError::MissingTree { .. }) => Ok(BTreeSet::new()),
            Err(error) => Err(error),
        }
    }
}

impl Census {
    /// The length of all objects.
    pub fn object_bytes(&self) -> u64 {
        self.objects.iter().map(|object| object.bytes).sum()
    }

    /// The length of all working state.
    pub fn partial_bytes(&self) -> u64 {
        self.partials.iter().map(|partial| partial.bytes).sum()
    }

    /// What the store takes, but for its lists and records, which are small: objects and working state.
    pub fn bytes(&self) -> u64 {
        self.object_bytes() + self.partial_bytes()
    }

    /// The number of objects of results that are outside, and the length of their files.
    pub fn outside(&self) -> (usize, u64) {
        let outside = self.objects.iter().filter(|object| object.holders > 0 && object.outside_bytes > 0);
        outside.fold((0, 0), |(count, bytes), object| (count + 1, bytes + object.outside_bytes))
    }

    /// The number of objects that no result holds, and their length.
    pub fn unheld(&self) -> (usize, u64) {
        let unheld = self.objects.iter().filter(|object| object.holders == 0);
        unheld.fold((0, 0), |(count, bytes), object| (count + 1, bytes + object.bytes))
    }

    /// Counts some results as gone.
    pub(crate) fn forget(&mut self, keys: &BTreeSet<Digest>) {
        let (gone, left): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.results).into_iter().partition(|result| keys.contains(&result.key));
        self.results = left;
        for result in gone {
            result.objects.iter().for_each(|object| self.objects[*object].holders -= 1);
            for tree in &result.trees {
                if let Ok(found) = self.trees.binary_search_by_key(tree, |counted| counted.digest) {
                    self.trees[found].names -= 1;
                }
            }
        }
    }

    /// The room that results take, by groups; one may belong to several, and is then nobody's own.
    pub fn usage<G: Ord + Clone>(&self, groups_of: impl Fn(&CountedResult) -> BTreeSet<G>) -> BTreeMap<G, Usage> {
        let mut usage: BTreeMap<G, Usage> = BTreeMap::new();
        let mut holders: BTreeMap<usize, BTreeSet<G>> = BTreeMap::new();
        for result in &self.results {
            let groups = groups_of(result);
            for group in &groups {
                let of_group = usage.entry(group.clone()).or_default();
                of_group.results += 1;
                of_group.seconds += result.seconds.unwrap_or(0.0);
            }
            for object in &result.objects {
                holders.entry(*object).or_default().extend(groups.iter().cloned());
            }
        }
        for (object, groups) in holders {
            let bytes = self.objects[object].bytes;
            let own = if groups.len() == 1 { bytes } else { 0 };
            for group in groups {
                let of_group = usage.entry(group).or_default();
                of_group.bytes += bytes;
                of_group.own_bytes += own;
            }
        }
        usage
    }
}

struct Record {
    /// `None` where another version of this program wrote it.
    result: Option<CountedResult>,
    trees: BTreeSet<Digest>,
}

/// A census in the making.
struct Counting<'a> {
    census: &'a mut Census,
    positions: HashMap<Digest, usize>,
    /// What each tree names, read once.
    trees: HashMap<Digest, Vec<usize>>,
}

impl<'a> Counting<'a> {
    fn of(store: &Store, census: &'a mut Census) -> Result<Self, StoreError> {
        for DigestFile { digest, size, changed, .. } in store.digest_files("trees")? {
            let Some(digest) = digest else { continue };
            census.trees.push(CountedTree { digest, bytes: size, changed, names: 0 });
        }
        // One in the store is the one that is read, so it comes last and has the position.
        for DigestFile { digest, changed, path, .. } in store.digest_files(NOTES)? {
            let Some(digest) = digest else { continue };
            let outside_bytes = read_note(&path).map_or(0, |file| file.size());
            census.objects.push(CountedObject { digest, bytes: 0, outside_bytes, path, changed, holders: 0 });
        }
        for DigestFile { digest, size, changed, path } in store.digest_files("objects")? {
            let Some(digest) = digest else { continue };
            census.objects.push(CountedObject { digest, bytes: size, outside_bytes: 0, path, changed, holders: 0 });
        }
        census.objects.sort_by_key(|object| object.digest);
        let positions = census.objects.iter().enumerate().map(|(position, object)| (object.digest, position)).collect();
        Ok(Self { census, positions, trees: HashMap::new() })
    }

    fn count(&mut self, store: &Store, Record { result, trees }: Record) -> Result<(), StoreError> {
        let mut objects = BTreeSet::new();
        for tree in trees {
            if let Ok(found) = self.census.trees.binary_search_by_key(&tree, |counted| counted.digest) {
                self.census.trees[found].names += 1;
                objects.extend(self.objects_of(store, &tree)?.iter().copied());
            }
        }
        for object in &objects {
            self.census.objects[*object].holders += 1;
        }
        if let Some(mut result) = result {
            result.bytes = objects.iter().map(|object| self.census.objects[*object].bytes).sum();
            result.objects = objects.into_iter().collect();
            self.census.results.push(result);
        }
        Ok(())
    }

    fn objects_of(&mut self, store: &Store, tree: &Digest) -> Result<&[usize], StoreError> {
        if !self.trees.contains_key(tree) {
            let named = store.named_by(tree)?;
            let found = named.iter().filter_map(|digest| self.positions.get(digest).copied()).collect();
            self.trees.insert(*tree, found);
        }
        Ok(&self.trees[tree])
    }
}

/// Every digest that stands as a text in a JSON document, whatever its form.
fn digests_in(bytes: &[u8]) -> BTreeSet<Digest> {
    let text = String::from_utf8_lossy(bytes);
    text.split('"').filter_map(|part| part.parse().ok()).collect()
}

/// What is below a folder.
struct Below {
    bytes: u64,
    written: SystemTime,
}

impl Below {
    fn of(folder: &Path) -> Self {
        let written = fs::symlink_metadata(folder).and_then(|metadata| metadata.modified());
        let mut below = Self { bytes: 0, written: written.unwrap_or(SystemTime::UNIX_EPOCH) };
        for (path, metadata) in entries(folder).unwrap_or_default() {
            let inner = match metadata.is_dir() {
                true => Self::of(&path),
                false => Self { bytes: metadata.len(), written: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH) },
            };
            below.bytes += inner.bytes;
            below.written = below.written.max(inner.written);
        }
        below
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{add, put, store};

    #[test]
    fn what_results_share_is_nobodys_own() {
        let (_home, store) = store();
        let tokens = put(&store, "tokens", 3.0, &[("a", "shared"), ("b", "own")]);
        let rows = put(&store, "rows", 1.0, &[("a", "shared"), ("again", "shared")]);
        add(&store, &[("c", "garbage")]);
        fs::write(store.partial(&Digest::of(b"key")).unwrap().join("state"), "12345").unwrap();
        let census = store.census().unwrap();
        assert_eq!(census.results.len(), 2);
        assert_eq!((census.object_bytes(), census.partial_bytes(), census.unheld()), (6 + 3 + 7, 5, (1, 7)));
        assert_eq!(census.trees.iter().filter(|tree| tree.names == 0).count(), 1);
        let usage = census.usage(|result| [result.key].into());
        assert_eq!(usage[&tokens], Usage { results: 1, bytes: 9, own_bytes: 3, seconds: 3.0 });
        assert_eq!(usage[&rows], Usage { results: 1, bytes: 6, own_bytes: 0, seconds: 1.0 });
        let of_all = census.usage(|_| [()].into());
        assert_eq!(of_all[&()], Usage { results: 2, bytes: 9, own_bytes: 9, seconds: 4.0 });
    }

    #[test]
    fn what_another_version_names_is_held() {
        let (_home, store) = store();
        let tree = add(&store, &[("a", "first")]);
        let record = format!(r#"{{"version":9,"stored":[{{"folder":"{tree}"}}]}}"#);
        fs::write(store.record_path(&Digest::of(b"foreign")), record).unwrap();
        let census = store.census().unwrap();
        assert_eq!((census.results.len(), census.unheld()), (0, (0, 0)));
        assert_eq!(census.trees[0].names, 1);
    }
}
