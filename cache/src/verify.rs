//! Checks everything in a store against its digest, and removes what does not stand the check.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::entry::{is_absent, open_entry, remove_entry};
use crate::listing::DigestFile;
use crate::outside::{Difference, OutsideFile, is_whole};
use crate::record::Stored;
use crate::{Digest, Place, Store, StoreError, TreeFile};

/// What a full check found.
#[derive(Debug, Clone, Default)]
pub struct VerifyReport {
    pub objects: u64,
    /// Their length together.
    pub bytes: u64,
    /// Files outside the store that objects are in.
    pub outside: u64,
    /// Their length together.
    pub outside_bytes: u64,
    pub trees: u64,
    pub results: u64,
    /// Everything that is wrong: objects, then trees, then results.
    pub faults: Vec<Fault>,
}

/// One thing that is wrong in a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An object's content does not have the digest in its name, or something else is in its place.
    #[error("object {digest} is damaged; {}", Users(.used_by))]
    CorruptObject {
        /// The digest it should have: [`Store::evict`] takes it.
        digest: Digest,
        /// Where it is.
        path: PathBuf,
        /// The files of results that it is the content of.
        used_by: Vec<UsedBy>,
    },
    /// A file of the user that an object was left in is not what it was. No damage of the store: the stage that left it
    /// runs again.
    #[error("`{}`, which was left outside the store, {how}; {}", .path.display(), Users(.used_by))]
    Outside {
        path: PathBuf,
        how: Difference,
        /// The files of results that it should be the content of.
        used_by: Vec<UsedBy>,
    },
    /// A tree's list does not have the digest in its name.
    #[error("tree {digest} is damaged: {reason}; {}", Users(.used_by))]
    CorruptTree {
        /// The digest it should have.
        digest: Digest,
        /// Where it is.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
        /// The outputs of results that it is.
        used_by: Vec<UsedBy>,
    },
    /// A tree names an object that is not there, or is not of the right length.
    #[error("`{file}` of tree {tree} is missing or cut short: object {digest}; {}", Users(.used_by))]
    MissingObject {
        tree: Digest,
        /// The file's path in the tree.
        file: String,
        /// The object.
        digest: Digest,
        /// The files of results that it should be the content of.
        used_by: Vec<UsedBy>,
    },
    /// A record is not what was written, or does not have the key in its name.
    #[error("record `{}` is damaged", .path.display())]
    CorruptResult {
        /// The key in its name.
        key: Digest,
        /// Where it is.
        path: PathBuf,
    },
    /// A record names a tree that is not there.
    #[error("output `{output}` of result {key} is missing: tree {tree}")]
    MissingTree {
        /// The result.
        key: Digest,
        /// The output's name.
        output: String,
        tree: Digest,
    },
    /// An object or a tree's list that the operating system does not let read, as for a permission. No damage is known:
    /// it may be as it was, and whoever may read it goes on using it.
    #[error("`{}` cannot be read: {reason}; {}", .path.display(), Users(.used_by))]
    Unreadable {
        /// Where it is.
        path: PathBuf,
        /// The operating system's error message.
        reason: String,
        /// The files and outputs of results that it is.
        used_by: Vec<UsedBy>,
    },
    /// The same of a record.
    #[error("record `{}` cannot be read: {reason}", .path.display())]
    UnreadableResult {
        /// The key in its name.
        key: Digest,
        /// Where it is.
        path: PathBuf,
        /// The operating system's error message.
        reason: String,
    },
    /// Something that the store did not put there.
    #[error("`{}` does not belong into the store", .path.display())]
    Stranger {
        /// Where it is.
        path: PathBuf,
    },
}

/// What a stored file or folder is in a result.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UsedBy {
    /// The result's key.
    pub key: Digest,
    /// The kind of stage that made it.
    pub kind: String,
    /// The output's name.
    pub output: String,
    /// The file's path in the output; `None` where it is the whole of it.
    pub file: Option<String>,
}

/// Who uses something, in words.
struct Users<'a>(&'a [UsedBy]);

impl fmt::Display for Users<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((first, others)) = self.0.split_first() else { return f.write_str("no result uses it") };
        let UsedBy { key, kind, output, file } = first;
        match file {
            Some(file) => write!(f, "it is `{file}` of output `{output}` of {kind} {}", key.short())?,
            None => write!(f, "it is output `{output}` of {kind} {}", key.short())?,
        }
        match others.len() {
            0 => Ok(()),
            more => write!(f, ", and used {more} times more"),
        }
    }
}

impl Fault {
    /// Whether it is a fault of the store by which a result is the worse. What only does not belong into the store is
    /// nobody's loss, and neither that nor a file of the user's is ours to remove; nor is what nobody has seen damaged.
    pub fn is_damage(&self) -> bool {
        !matches!(self, Self::Stranger { .. } | Self::Outside { .. }) && !self.is_unreadable()
    }

    /// Whether it is of something that could not be read, of which therefore nothing is known.
    pub fn is_unreadable(&self) -> bool {
        matches!(self, Self::Unreadable { .. } | Self::UnreadableResult { .. })
    }

    /// The results that lack something, or are not what they were.
    pub fn results(&self) -> BTreeSet<Digest> {
        match self {
            Self::CorruptObject { used_by, .. }
            | Self::Outside { used_by, .. }
            | Self::CorruptTree { used_by, .. }
            | Self::Unreadable { used_by, .. }
            | Self::MissingObject { used_by, .. } => used_by.iter().map(|used| used.key).collect(),
            Self::CorruptResult { key, .. } | Self::UnreadableResult { key, .. } | Self::MissingTree { key, .. } => {
                [*key].into()
            }
            Self::Stranger { .. } => BTreeSet::new(),
        }
    }
}

/// How far a full check is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerifyProgress {
    pub bytes: u64,
    pub total_bytes: u64,
}

impl Store {
    /// Reads every object, tree and record, on all threads, and compares it with its name; changes nothing.
    ///
    /// `progress` is called from several threads, after each object.
    ///
    /// # Errors
    /// Fails where a folder of the store cannot be listed; a file that cannot be read is a fault in the report.
    pub fn verify(&self, progress: &(dyn Fn(VerifyProgress) + Sync)) -> Result<VerifyReport, StoreError> {
        let mut report = VerifyReport::default();
        let damaged = self.verify_objects(&mut report, progress)?;
        let trees = self.verify_trees(&mut report, &damaged)?;
        self.verify_results(&mut report, &trees)?;
        // A tree that no result names is garbage, and so is what is left of its objects, and a note that no tree needs.
        let concerns_nobody = |fault: &Fault| match fault {
            Fault::MissingObject { used_by, .. } | Fault::Outside { used_by, .. } => used_by.is_empty(),
            _ => false,
        };
        report.faults.retain(|fault| !concerns_nobody(fault));
        Ok(report)
    }

    /// Removes what a check found damaged, and the results that lack something of it, so that the next run that needs
    /// one rebuilds it. What could not be read stays. Safe beside runs: one that meets a gap fills it.
    ///
    /// # Errors
    /// Fails where something cannot be removed.
    pub fn repair(&self, faults: &[Fault]) -> Result<(), StoreError> {
        // Results first, so that none is left that lacks something.
        for key in faults.iter().filter(|fault| fault.is_damage()).flat_map(Fault::results) {
            self.forget(&key)?;
        }
        for fault in faults {
            match fault {
                Fault::CorruptObject { digest, .. } => self.evict(digest)?,
                Fault::CorruptTree { digest, .. } | Fault::MissingObject { tree: digest, .. } => {
                    remove_entry(&self.tree_path(digest))?;
                }
                Fault::CorruptResult { .. }
                | Fault::MissingTree { .. }
                | Fault::Unreadable { .. }
                | Fault::UnreadableResult { .. }
                | Fault::Outside { .. }
                | Fault::Stranger { .. } => {}
            }
        }
        Ok(())
    }

    /// Checks the objects; gives the damaged ones with the positions of their faults.
    fn verify_objects(
        &self,
        report: &mut VerifyReport,
        progress: &(dyn Fn(VerifyProgress) + Sync),
    ) -> Result<BTreeMap<Digest, usize>, StoreError> {
        let objects = self.digest_files("objects")?;
        let outside = self.outside_files()?;
        report.objects = objects.len() as u64;
        report.bytes = objects.iter().map(|object| object.size).sum();
        report.outside = outside.len() as u64;
        report.outside_bytes = outside.iter().map(|(_, file)| file.size()).sum();
        let total_bytes = report.bytes + report.outside_bytes;
        let read = AtomicU64::new(0);
        let have_read = |size: u64| {
            let bytes = read.fetch_add(size, Ordering::Relaxed) + size;
            progress(VerifyProgress { bytes, total_bytes });
        };
        let of_objects = objects.par_iter().map(|object| {
            let fault = check_object(object);
            have_read(object.size);
            (object.digest, fault)
        });
        let of_outside = outside.par_iter().map(|(digest, file)| {
            let fault = check_outside(digest, file);
            have_read(file.size());
            (Some(*digest), fault)
        });
        let found: Vec<_> = of_objects.chain(of_outside).filter_map(|(digest, fault)| Some((digest, fault?))).collect();
        let damaged = found.iter().enumerate().filter_map(|(position, (digest, _))| Some(((*digest)?, position)));
        let damaged: BTreeMap<_, _> = damaged.collect();
        report.faults = found.into_iter().map(|(_, fault)| fault).collect();
        Ok(damaged)
    }

    /// Checks the trees; gives, for each whose list is there, the faults of its own and the paths of its damaged files.
    fn verify_trees(
        &self,
        report: &mut VerifyReport,
        damaged: &BTreeMap<Digest, usize>,
    ) -> Result<BTreeMap<Digest, Vec<InTree>>, StoreError> {
        let files = self.digest_files("trees")?;
        let read: Vec<_> = files.par_iter().map(|file| Some(self.tree(file.digest.as_ref()?))).collect();
        let mut trees = BTreeMap::new();
        for (DigestFile { path, digest, .. }, read) in files.into_iter().zip(read) {
            let (Some(digest), Some(read)) = (digest, read) else {
                report.faults.push(Fault::Stranger { path });
                continue;
            };
            report.trees += 1;
            let mut inside = Vec::new();
            match read {
                Ok(tree) => {
                    for file in tree.files() {
                        if let Some(fault) = damaged.get(&file.digest) {
                            inside.push(InTree { fault: *fault, file: Some(file.path.clone()) });
                        }
                        // One that is outside has been read.
                        let place = self.place(&file.digest);
                        if matches!(place, Place::Inside(path) if !is_whole(&path, file.size)) {
                            inside.push(InTree { fault: report.faults.len(), file: Some(file.path.clone()) });
                            report.faults.push(missing_object(digest, file));
                        }
                    }
                }
                // Removed by another process meanwhile: whoever needs it is reported with the results.
                Err(StoreError::MissingTree { .. }) => continue,
                Err(error) => {
                    inside.push(InTree { fault: report.faults.len(), file: None });
                    let used_by = Vec::new();
                    report.faults.push(match error {
                        StoreError::CorruptTree { reason, .. } => Fault::CorruptTree { digest, path, reason, used_by },
                        error => Fault::Unreadable { path, reason: error.into_io().to_string(), used_by },
                    });
                }
            }
            trees.insert(digest, inside);
        }
        Ok(trees)
    }

    fn verify_results(
        &self,
        report: &mut VerifyReport,
        trees: &BTreeMap<Digest, Vec<InTree>>,
    ) -> Result<(), StoreError> {
        for (path, key) in self.record_files()? {
            let Some(key) = key else {
                report.faults.push(Fault::Stranger { path });
                continue;
            };
            report.results += 1;
            let record = match Stored::at(&path, &key) {
                Ok(Some(Stored::Sound(record))) => record,
                Ok(None | Some(Stored::Foreign)) => continue,
                Ok(Some(Stored::Damaged)) => {
                    report.faults.push(Fault::CorruptResult { key, path });
                    continue;
                }
                Err(error) => {
                    report.faults.push(Fault::UnreadableResult { key, path, reason: error.into_io().to_string() });
                    continue;
                }
            };
            for (output, stored) in record.outputs {
                let Some(inside) = trees.get(&stored.tree) else {
                    report.faults.push(Fault::MissingTree { key, output, tree: stored.tree });
                    continue;
                };
                for InTree { fault, file } in inside {
                    let used = UsedBy { key, kind: record.kind.clone(), output: output.clone(), file: file.clone() };
                    report.faults[*fault].add_user(used);
                }
            }
        }
        Ok(())
    }
}

/// A fault that concerns a tree: its own, or that of one of its files.
struct InTree {
    /// Its position in the report.
    fault: usize,
    file: Option<String>,
}

impl Fault {
    fn add_user(&mut self, used: UsedBy) {
        match self {
            Self::CorruptObject { used_by, .. }
            | Self::Outside { used_by, .. }
            | Self::CorruptTree { used_by, .. }
            | Self::Unreadable { used_by, .. }
            | Self::MissingObject { used_by, .. } => {
                used_by.push(used);
            }
            Self::CorruptResult { .. }
            | Self::UnreadableResult { .. }
            | Self::MissingTree { .. }
            | Self::Stranger { .. } => {}
        }
    }
}

fn missing_object(tree: Digest, file: &TreeFile) -> Fault {
    Fault::MissingObject { tree, file: file.path.clone(), digest: file.digest, used_by: Vec::new() }
}

fn check_outside(digest: &Digest, file: &OutsideFile) -> Option<Fault> {
    let how = OutsideFile::read(&file.path, (*digest, file.size())).err()?;
    Some(Fault::Outside { path: file.path.clone(), how, used_by: Vec::new() })
}

fn check_object(object: &DigestFile) -> Option<Fault> {
    let path = object.path.clone();
    let Some(digest) = object.digest else { return Some(Fault::Stranger { path }) };
    let found = match open_entry(&path) {
        Ok(Ok(mut file)) => Digest::of_open_file(&mut file).map(|(found, _)| found == digest),
        // It is no file.
        Ok(Err(_)) => Ok(false),
        // Evicted by another process meanwhile: whoever needs it is reported with the trees.
        Err(error) if is_absent(&error) => return None,
        Err(error) => Err(error),
    };
    match found {
        Ok(true) => None,
        Ok(false) => Some(Fault::CorruptObject { digest, path, used_by: Vec::new() }),
        Err(error) => Some(Fault::Unreadable { path, reason: error.to_string(), used_by: Vec::new() }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Mutex;

    use super::*;
    use crate::testing::{add, damage, put, store};
    use crate::{KeyDocument, OutputRecord, ResultRecord};

    #[test]
    fn a_sound_store_has_no_faults_and_progress_reaches_the_end() {
        let (_home, store) = store();
        add(&store, &[("a", "first"), ("b", "second")]);
        let seen = Mutex::new(Vec::new());
        let report = store.verify(&|progress| seen.lock().unwrap().push(progress)).unwrap();
        assert_eq!((report.objects, report.bytes, report.trees, report.results), (2, 11, 1, 0));
        assert_eq!(report.faults, []);
        let last = seen.into_inner().unwrap().into_iter().max_by_key(|progress| progress.bytes);
        assert_eq!(last, Some(VerifyProgress { bytes: 11, total_bytes: 11 }));
    }

    #[test]
    fn every_kind_of_fault_is_named() {
        let (_home, store) = store();
        let user = put(&store, "user", 1.0, &[("a", "first"), ("b", "second"), ("c", "third")]);
        let tree = store.result(&user).unwrap().unwrap().outputs["out"].tree;
        add(&store, &[("c", "third"), ("of", "a tree that no result names")]);
        let broken = add(&store, &[("d", "fourth")]);
        let absent = Digest::of(b"absent");
        let facts = serde_json::Map::new();
        let output = OutputRecord { kind: "rows".to_owned(), tree: absent, identity: absent, facts };
        let outputs = [("out".to_owned(), output)].into();
        let record = ResultRecord::new(KeyDocument::default(), "kind", outputs, serde_json::Map::new());
        let key = record.key.result_key();
        store.record(&key, &record).unwrap();

        damage(&store, b"first", b"fjrst");
        damage(&store, b"second", b"sec");
        store.evict(&Digest::of(b"third")).unwrap();
        let tree_path = |digest: &Digest| {
            let name = digest.to_string();
            store.folder("trees").join(&name[..2]).join(&name[2..])
        };
        fs::write(tree_path(&broken), "{").unwrap();
        let stranger = store.folder("objects").join("notes.txt");
        fs::write(&stranger, "").unwrap();
        let damaged = store.folder("results").join(format!("{absent}.json"));
        fs::write(&damaged, "{").unwrap();

        let faults = store.verify(&|_| {}).unwrap().faults;
        let object = |content: &[u8]| (Digest::of(content), store.object_path(&Digest::of(content)));
        let used_by = |file: &str| {
            let (kind, output, file) = ("user".to_owned(), "out".to_owned(), Some(file.to_owned()));
            vec![UsedBy { key: user, kind, output, file }]
        };
        for (file, content) in [("a", &b"first"[..]), ("b", b"second")] {
            let (digest, path) = object(content);
            assert!(faults.contains(&Fault::CorruptObject { digest, path, used_by: used_by(file) }));
        }
        for (file, content) in [("b", &b"second"[..]), ("c", b"third")] {
            let (digest, used_by) = (Digest::of(content), used_by(file));
            let file = file.to_owned();
            assert!(faults.contains(&Fault::MissingObject { tree, file, digest, used_by }));
        }
        assert!(faults.iter().any(|fault| matches!(fault, Fault::CorruptTree { digest, .. } if *digest == broken)));
        assert!(faults.contains(&Fault::MissingTree { key, output: "out".to_owned(), tree: absent }));
        assert!(faults.contains(&Fault::CorruptResult { key: absent, path: damaged }));
        assert!(faults.contains(&Fault::Stranger { path: stranger }));
        assert_eq!(faults.len(), 8);
    }
    #[test]
    fn who_uses_what_is_damaged_is_named_and_repair_leaves_a_sound_store() {
        let (_home, store) = store();
        let rows = put(&store, "rows", 1.0, &[("a", "first"), ("b", "second")]);
        let tokens = put(&store, "tokens", 1.0, &[("c", "first"), ("d", "third")]);
        let sound = put(&store, "sound", 1.0, &[("e", "fifth")]);
        damage(&store, b"first", b"fjrst");
        let tree = store.result(&tokens).unwrap().unwrap().outputs["out"].tree;
        let faults = store.verify(&|_| {}).unwrap().faults;
        let Fault::CorruptObject { used_by, .. } = &faults[0] else { panic!("{faults:?}") };
        let used = |key, kind: &str, file: &str| {
            let (kind, output, file) = (kind.to_owned(), "out".to_owned(), Some(file.to_owned()));
            UsedBy { key, kind, output, file }
        };
        let mut expected = [used(rows, "rows", "a"), used(tokens, "tokens", "c")];
        expected.sort();
        assert_eq!((faults.len(), used_by.as_slice()), (1, &expected[..]));
        assert!(faults[0].to_string().contains(" of output `out` of "), "{}", faults[0]);

        store.evict(&Digest::of(b"third")).unwrap();
        fs::write(store.record_path(&rows), "{").unwrap();
        let faults = store.verify(&|_| {}).unwrap().faults;
        assert_eq!(faults.iter().flat_map(Fault::results).collect::<BTreeSet<_>>(), [rows, tokens].into());
        store.repair(&faults).unwrap();
        assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
        assert!(!store.complete(&tree) && store.take(&sound).unwrap().is_some());
        assert_eq!((store.result(&rows).unwrap(), store.result(&tokens).unwrap()), (None, None));
    }
}
