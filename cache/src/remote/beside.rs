//! What a store keeps of shared ones: records of results that lie there, and results that are still to be sent.
//!
//! ```text
//! known/<key>.json   a result whose files are in a remote and not here
//! outbox/<key>       the address of the remote that the result is to be sent to
//! ```
//!
//! Both are conveniences: without them a remote is asked again, and a push that was cut off is not taken up.

use std::fs;

use crate::atomic::{ensure_folder, write_atomically};
use crate::entry::{Entry, is_absent, read_entry, remove_entry};
use crate::record::{self, Stored};
use crate::{Digest, ResultRecord, Store, StoreError};

impl Store {
    /// Keeps the record of a result whose files are elsewhere: enough to name what depends on it.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn remember(&self, record: &ResultRecord) -> Result<(), StoreError> {
        let folder = self.folder("known");
        ensure_folder(&folder)?;
        write_atomically(&folder.join(format!("{}.json", record.key.result_key())), &record::to_bytes(record))
    }

    /// A record kept by [`Store::remember`].
    pub fn remembered(&self, key: &Digest) -> Option<ResultRecord> {
        match Stored::at(&self.folder("known").join(format!("{key}.json")), key).ok()?? {
            Stored::Sound(record) => Some(record),
            Stored::Foreign | Stored::Damaged => None,
        }
    }

    /// Forgets a record kept by [`Store::remember`]: it turned out that the files are not there.
    ///
    /// # Errors
    /// Fails where the file cannot be removed.
    pub fn unremember(&self, key: &Digest) -> Result<(), StoreError> {
        remove_entry(&self.folder("known").join(format!("{key}.json"))).map(drop)
    }

    /// Notes that a result is to be sent to a remote.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn to_send(&self, key: &Digest, remote: &str) -> Result<(), StoreError> {
        let folder = self.folder("outbox");
        ensure_folder(&folder)?;
        write_atomically(&folder.join(key.to_string()), remote.as_bytes())
    }

    /// Notes that a result has been sent, or is gone.
    ///
    /// # Errors
    /// Fails where the file cannot be removed.
    pub fn sent(&self, key: &Digest) -> Result<(), StoreError> {
        remove_entry(&self.folder("outbox").join(key.to_string())).map(drop)
    }

    /// The results that are still to be sent to a remote, sorted.
    ///
    /// # Errors
    /// Fails where the folder cannot be listed.
    pub fn outbox(&self, remote: &str) -> Result<Vec<Digest>, StoreError> {
        let folder = self.folder("outbox");
        let entries = match fs::read_dir(&folder) {
            Err(error) if is_absent(&error) => return Ok(Vec::new()),
            entries => entries.map_err(StoreError::on("list", &folder))?,
        };
        let mut keys = Vec::new();
        for entry in entries {
            let entry = entry.map_err(StoreError::on("list", &folder))?;
            let Some(key) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // One that cannot be read has just been sent by another process.
            if matches!(read_entry(&entry.path()), Ok(Entry::File(to)) if to == remote.as_bytes()) {
                keys.push(key);
            }
        }
        keys.sort();
        Ok(keys)
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::store;
    use crate::{Class, Digest, KeyDocument, ResultRecord};

    #[test]
    fn what_lies_elsewhere_is_remembered_and_forgotten() {
        let (_home, store) = store();
        let mut key = KeyDocument::default();
        key.push("stage", "train", Class::Semantic);
        let record = ResultRecord::new(key.clone(), "train", [].into(), serde_json::Map::new());
        assert_eq!(store.remembered(&key.result_key()), None);
        store.remember(&record).unwrap();
        assert_eq!(store.remembered(&key.result_key()), Some(record));
        assert_eq!(store.result(&key.result_key()).unwrap(), None);
        assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
        store.unremember(&key.result_key()).unwrap();
        assert_eq!(store.remembered(&key.result_key()), None);
    }

    #[test]
    fn the_outbox_is_one_for_each_remote() {
        let (_home, store) = store();
        let (one, two) = (Digest::of(b"1"), Digest::of(b"2"));
        assert_eq!(store.outbox("s3://a").unwrap(), []);
        store.to_send(&one, "s3://a").unwrap();
        store.to_send(&two, "s3://b").unwrap();
        assert_eq!(store.outbox("s3://a").unwrap(), [one]);
        store.sent(&one).unwrap();
        store.sent(&one).unwrap();
        assert_eq!(store.outbox("s3://a").unwrap(), []);
        assert_eq!(store.outbox("s3://b").unwrap(), [two]);
    }
}
