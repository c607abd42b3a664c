//! Folders outside the store whose files are links to its objects: what they lead to is kept for as long as they do.
//!
//! The store has a note of each such folder, by its path. A folder that is gone, was replaced or whose links lead
//! elsewhere keeps nothing, and its note goes with the next garbage collection.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::atomic::write_atomically;
use crate::entry::{Entry, read_entry};
use crate::gc::Removal;
use crate::{Digest, Store, StoreError, Tree, TreeFile};

/// The folder of the notes.
const NOTES: &str = "linked";

/// A note.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Linked {
    /// Absolute.
    folder: PathBuf,
    tree: Digest,
}

impl Store {
    /// Notes that the files of `folder`, whose path is absolute, are links to the objects of a tree, or will be before
    /// this process is no user of the store any more, so that garbage collection leaves them.
    ///
    /// # Errors
    /// Fails where the disk refuses.
    pub fn note_linked(&self, folder: &Path, tree: &Digest) -> Result<(), StoreError> {
        let notes = self.folder(NOTES);
        fs::create_dir_all(&notes).map_err(StoreError::on("create folder", &notes))?;
        let note = Linked { folder: folder.to_owned(), tree: *tree };
        let name = Digest::of(folder.as_os_str().as_encoded_bytes());
        let text = serde_json::to_vec(&note).expect("a note is plain data");
        write_atomically(&notes.join(format!("{name}.json")), &text)
    }

    /// The trees that folders outside lead to, or are about to. Notes of folders that lead here no more are removed in
    /// a removal that is meant.
    pub(crate) fn linked_trees(&self, removal: Removal) -> Result<BTreeSet<Digest>, StoreError> {
        let mut trees = BTreeSet::new();
        let Ok(notes) = fs::read_dir(self.folder(NOTES)) else { return Ok(trees) };
        for path in notes.filter_map(|note| Some(note.ok()?.path())) {
            let Entry::File(text) = read_entry(&path)? else { continue };
            let Ok(Linked { folder, tree }) = serde_json::from_slice::<Linked>(&text) else { continue };
            // The links are looked at last: whoever has left by now has made them.
            if self.may_be_linking(&path)? || self.tree(&tree).is_ok_and(|files| self.leads_here(&folder, &files)) {
                trees.insert(tree);
            } else if removal == Removal::Real {
                // What stays is looked at again the next time.
                let _ = fs::remove_file(&path);
            }
        }
        Ok(trees)
    }

    /// Whether who wrote a note may still be about to make the links: it is as young as a process that uses the store.
    fn may_be_linking(&self, note: &Path) -> Result<bool, StoreError> {
        let Some(since) = self.in_use_since()? else { return Ok(false) };
        let written = fs::symlink_metadata(note).and_then(|note| note.modified());
        Ok(written.is_ok_and(|written| written >= since))
    }

    /// Whether a file of a folder is a link to the object that a tree has in its place.
    fn leads_here(&self, folder: &Path, tree: &Tree) -> bool {
        let leads = |file: &TreeFile| {
            fs::read_link(folder.join(&file.path)).is_ok_and(|target| target == self.object_path(&file.digest))
        };
        tree.files().iter().any(leads)
    }
}
