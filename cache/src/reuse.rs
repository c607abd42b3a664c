//! What results of one family hold that a new one can take over piece by piece.
//!
//! A family is everything a stage depends on but the one input that it works through in pieces. Its table says which
//! pieces the newest results were made of, and what a piece became; the stage that asks reads those parts of the stored
//! result instead of making them again. A table is an aid and never the truth: one that is lost costs work, and one
//! that is damaged counts as lost.

use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::entry::{Entry, checked, is_absent, read_entry, remove_entry, with_check};
use crate::{Digest, OutputRecord, Store, StoreError};

/// Results of a family that are remembered.
const KEPT: usize = 4;

/// A stored result and the pieces it was made of.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reusable {
    /// The stored folder.
    pub tree: Digest,
    /// The output that it is. A version that stored its facts among its files did not write it here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<OutputRecord>,
    /// The pieces, in the words of the stage kind that wrote them.
    pub pieces: Value,
}

impl Store {
    /// The remembered results of a family that are whole in the store, the newest first.
    ///
    /// # Errors
    /// Fails where the table exists and cannot be read.
    pub fn reusable(&self, family: &Digest) -> Result<Vec<Reusable>, StoreError> {
        let mut known = self.reuse_table(family)?;
        known.retain(|reusable| self.complete(&reusable.tree));
        Ok(known)
    }

    /// Remembers a result as the newest of its family. Of two processes that do so at once, one may be forgotten.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn offer(&self, family: &Digest, reusable: Reusable) -> Result<(), StoreError> {
        let mut known = self.reusable(family)?;
        known.retain(|other| other.tree != reusable.tree);
        known.insert(0, reusable);
        known.truncate(KEPT);
        let table = serde_json::to_vec(&known).expect("a table is plain data");
        self.publish(&self.reuse_path(family), &with_check(&table))
    }

    /// Removes the tables of which no result is whole any more; their number.
    ///
    /// # Errors
    /// Fails where a table cannot be read or removed.
    pub fn forget_unusable(&self) -> Result<usize, StoreError> {
        let folder = self.folder("reuse");
        let entries = match fs::read_dir(&folder) {
            Err(error) if is_absent(&error) => return Ok(0),
            read => read.map_err(StoreError::on("list", &folder))?,
        };
        let mut removed = 0;
        for entry in entries {
            let path = entry.map_err(StoreError::on("list", &folder))?.path();
            let family = path.file_stem().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
            let usable = family.is_some_and(|family| self.reusable(&family).is_ok_and(|known| !known.is_empty()));
            removed += usize::from(!usable && remove_entry(&path)?);
        }
        Ok(removed)
    }

    /// The table of a family as it is there; a damaged one is empty.
    fn reuse_table(&self, family: &Digest) -> Result<Vec<Reusable>, StoreError> {
        let Entry::File(bytes) = read_entry(&self.reuse_path(family))? else { return Ok(Vec::new()) };
        // A flipped bit in a number would otherwise take over the wrong rows.
        Ok(checked(&bytes).and_then(|table| serde_json::from_slice(table).ok()).unwrap_or_default())
    }

    fn reuse_path(&self, family: &Digest) -> PathBuf {
        self.folder("reuse").join(format!("{family}.json"))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{fill, store};

    fn stored(store: &Store, content: &str) -> Reusable {
        let staging = store.staging().unwrap();
        fill(staging.path(), &[("a", content)]);
        Reusable { tree: store.add_folder(staging.path()).unwrap(), output: None, pieces: json!([content]) }
    }

    #[test]
    fn the_newest_results_that_are_whole_are_remembered() {
        let (_home, store) = store();
        let family = Digest::of(b"family");
        assert_eq!(store.reusable(&family).unwrap(), []);
        let results: Vec<_> = (0..KEPT + 2).map(|number| stored(&store, &number.to_string())).collect();
        for result in &results {
            store.offer(&family, result.clone()).unwrap();
        }
        store.offer(&family, results[KEPT].clone()).unwrap();
        let newest = [KEPT, KEPT + 1, KEPT - 1, KEPT - 2].map(|number| results[number].clone());
        assert_eq!(store.reusable(&family).unwrap(), newest);
        assert_eq!(store.reusable(&Digest::of(b"other")).unwrap(), []);

        store.evict(&Digest::of(KEPT.to_string().as_bytes())).unwrap();
        assert_eq!(store.reusable(&family).unwrap(), newest[1..]);
        assert_eq!(store.forget_unusable().unwrap(), 0);
        for number in 0..KEPT + 2 {
            store.evict(&Digest::of(number.to_string().as_bytes())).unwrap();
        }
        assert_eq!(store.forget_unusable().unwrap(), 1);
        assert_eq!(store.forget_unusable().unwrap(), 0);
    }

    #[test]
    fn a_damaged_table_is_an_empty_one() {
        let (_home, store) = store();
        let family = Digest::of(b"family");
        let result = stored(&store, "content");
        store.offer(&family, result.clone()).unwrap();
        let path = store.reuse_path(&family);
        let sound = fs::read(&path).unwrap();
        for position in 0..sound.len() {
            let mut bytes = sound.clone();
            bytes[position] ^= 1;
            fs::write(&path, &bytes).unwrap();
            assert_eq!(store.reusable(&family).unwrap(), [], "byte {position}");
            fs::write(&path, &sound[..position]).unwrap();
            assert_eq!(store.reusable(&family).unwrap(), [], "length {position}");
        }
        store.offer(&family, result.clone()).unwrap();
        assert_eq!(store.reusable(&family).unwrap(), [result]);
    }
}
