//! Checks everything in a store against its digest.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use crate::listing::DigestFile;
use crate::record::Stored;
use crate::{Digest, Store, StoreError, Tree};

/// What a full check found.
#[derive(Debug, Clone, Default)]
pub struct VerifyReport {
    /// Objects read.
    pub objects: u64,
    /// Their length together.
    pub bytes: u64,
    /// Trees read.
    pub trees: u64,
    /// Results read.
    pub results: u64,
    /// Everything that is wrong: objects, then trees, then results.
    pub faults: Vec<Fault>,
}

/// One thing that is wrong in a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// An object cannot be read, or its content does not have the digest in its name.
    #[error("object {digest} is damaged")]
    CorruptObject {
        /// The digest it should have: [`Store::evict`] takes it.
        digest: Digest,
        /// Where it lies.
        path: PathBuf,
    },
    /// A tree's list is unreadable or does not have the digest in its name.
    #[error("tree {digest} is damaged: {reason}")]
    CorruptTree {
        /// The digest it should have.
        digest: Digest,
        /// Where it lies.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A tree names an object that is not there, or is not of the right length.
    #[error("`{file}` of tree {tree} is missing or cut short: object {digest}")]
    MissingObject {
        /// The tree.
        tree: Digest,
        /// The file's path in the tree.
        file: String,
        /// The object.
        digest: Digest,
    },
    /// A record cannot be read, or does not have the key in its name.
    #[error("record `{}` is damaged", .path.display())]
    CorruptResult {
        /// Where it lies.
        path: PathBuf,
    },
    /// A record names a tree that is not there.
    #[error("output `{output}` of result {key} is missing: tree {tree}")]
    MissingTree {
        /// The result.
        key: Digest,
        /// The output's name.
        output: String,
        /// The tree.
        tree: Digest,
    },
    /// Something that the store did not put there.
    #[error("`{}` does not belong into the store", .path.display())]
    Stranger {
        /// Where it lies.
        path: PathBuf,
    },
}

/// How far a full check is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Bytes read.
    pub bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
}

impl Store {
    /// Reads every object, tree and record and compares it with its name; changes nothing.
    ///
    /// `progress` is called from several threads, after each object.
    ///
    /// # Errors
    /// Fails where a folder of the store cannot be listed; a file that cannot be read is a fault in the report.
    pub fn verify(&self, progress: &(dyn Fn(VerifyProgress) + Sync)) -> Result<VerifyReport, StoreError> {
        let mut report = VerifyReport::default();
        let objects = self.digest_files("objects")?;
        let total_bytes = objects.iter().map(|object| object.size).sum();
        let read = AtomicU64::new(0);
        let check = |object: &DigestFile| {
            let fault = check_object(object);
            let bytes = read.fetch_add(object.size, Ordering::Relaxed) + object.size;
            progress(VerifyProgress { bytes, total_bytes });
            fault
        };
        report.objects = objects.len() as u64;
        report.bytes = total_bytes;
        report.faults = objects.par_iter().filter_map(check).collect();
        let trees = self.verify_trees(&mut report)?;
        self.verify_results(&trees, &mut report)?;
        Ok(report)
    }

    /// Checks the trees; gives the digests of those whose list is there, sound or not.
    fn verify_trees(&self, report: &mut VerifyReport) -> Result<Vec<Digest>, StoreError> {
        let mut found = Vec::new();
        for DigestFile { path, digest, .. } in self.digest_files("trees")? {
            let Some(digest) = digest else {
                report.faults.push(Fault::Stranger { path });
                continue;
            };
            report.trees += 1;
            found.push(digest);
            match self.tree(&digest) {
                Ok(tree) => report.faults.extend(self.missing_objects(digest, &tree)),
                Err(StoreError::CorruptTree { reason, .. }) => {
                    report.faults.push(Fault::CorruptTree { digest, path, reason });
                }
                Err(StoreError::MissingTree { .. }) => {}
                Err(error) => report.faults.push(Fault::CorruptTree { digest, path, reason: error.to_string() }),
            }
        }
        Ok(found)
    }

    fn missing_objects(&self, tree: Digest, list: &Tree) -> impl Iterator<Item = Fault> {
        let missing = list.files().iter().filter(|file| !self.has(file));
        missing.map(move |file| Fault::MissingObject { tree, file: file.path.clone(), digest: file.digest })
    }

    fn verify_results(&self, trees: &[Digest], report: &mut VerifyReport) -> Result<(), StoreError> {
        for (path, key) in self.record_files()? {
            let Some(key) = key else {
                report.faults.push(Fault::Stranger { path });
                continue;
            };
            report.results += 1;
            let record = match fs::read(&path).map(|bytes| Stored::read(&bytes, &key)) {
                Ok(Stored::Sound(record)) => record,
                Ok(Stored::Foreign) => continue,
                Ok(Stored::Damaged) | Err(_) => {
                    report.faults.push(Fault::CorruptResult { path });
                    continue;
                }
            };
            let missing = record.outputs.into_iter().filter(|(_, output)| trees.binary_search(&output.tree).is_err());
            let fault =
                |(output, record): (String, crate::OutputRecord)| Fault::MissingTree { key, output, tree: record.tree };
            report.faults.extend(missing.map(fault));
        }
        Ok(())
    }
}

fn check_object(object: &DigestFile) -> Option<Fault> {
    let path = object.path.clone();
    let Some(digest) = object.digest else { return Some(Fault::Stranger { path }) };
    match Digest::of_file(&path) {
        Ok((found, _)) if found == digest => None,
        // Evicted by another process meanwhile: whoever needs it is reported with the trees.
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Ok(_) | Err(_) => Some(Fault::CorruptObject { digest, path }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::sync::Mutex;

    use super::*;
    use crate::testing::{add, damage, store};
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
        let tree = add(&store, &[("a", "first"), ("b", "second"), ("c", "third")]);
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
        for content in [&b"first"[..], b"second"] {
            let (digest, path) = object(content);
            assert!(faults.contains(&Fault::CorruptObject { digest, path }));
        }
        for (file, content) in [("b", &b"second"[..]), ("c", b"third")] {
            let digest = Digest::of(content);
            assert!(faults.contains(&Fault::MissingObject { tree, file: file.to_owned(), digest }));
        }
        assert!(faults.iter().any(|fault| matches!(fault, Fault::CorruptTree { digest, .. } if *digest == broken)));
        assert!(faults.contains(&Fault::MissingTree { key, output: "out".to_owned(), tree: absent }));
        assert!(faults.contains(&Fault::CorruptResult { path: damaged }));
        assert!(faults.contains(&Fault::Stranger { path: stranger }));
        assert_eq!(faults.len(), 8);
    }
}
