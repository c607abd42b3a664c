//! Hands stored folders out: as links to read from, and as copies that belong to the user.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use rayon::prelude::*;

use crate::atomic::{flush_folder, parent};
use crate::tree::is_small;
use crate::{Digest, Place, Store, StoreError, Tree, TreeFile, Verify};

impl Store {
    /// Makes `target`, a new folder of links to a tree's objects, wherever they are, under their original names.
    ///
    /// # Errors
    /// Fails with [`StoreError::CorruptObject`] or [`StoreError::MissingObject`] where a file is not what it was, and
    /// where `target` exists or cannot be made.
    pub fn link_folder(&self, tree: &Digest, target: &Path, verify: Verify) -> Result<Tree, StoreError> {
        let tree = self.tree(tree)?;
        self.link_files(&tree, target, verify).map(|()| tree)
    }

    /// As [`Store::link_folder`], for a list of files that is at hand.
    ///
    /// # Errors
    /// As there.
    pub fn link_files(&self, tree: &Tree, target: &Path, verify: Verify) -> Result<(), StoreError> {
        self.check_all(&tree.files().iter().collect::<Vec<_>>(), verify)?;
        make_folders(tree, target)?;
        tree.files().iter().try_for_each(|file| match file.executable {
            // An object has no such permission: what is executed is a copy.
            true => self.copy_executable(file, &target.join(&file.path)),
            false => self.link(file, target),
        })
    }

    fn copy_executable(&self, file: &TreeFile, target: &Path) -> Result<(), StoreError> {
        fs::copy(self.place(&file.digest).path(), target).map_err(StoreError::on("copy", target))?;
        fs::set_permissions(target, fs::Permissions::from_mode(0o555))
            .map_err(StoreError::on("set permissions of", target))
    }

    /// As [`Store::link_files`], for a folder that is read whenever its reader likes: what is outside, and may change,
    /// is copied.
    ///
    /// # Errors
    /// As there.
    pub fn link_files_out(&self, tree: &Tree, target: &Path) -> Result<(), StoreError> {
        let (outside, inside): (Vec<_>, Vec<_>) = tree.files().iter().partition(|file| self.is_outside(file));
        self.check_all(&inside, Verify::Contents)?;
        make_folders(tree, target)?;
        inside.into_iter().try_for_each(|file| self.link(file, target))?;
        outside.into_iter().try_for_each(|file| self.copy_object(file, &target.join(&file.path)))
    }

    /// Makes `target`, a new folder of a tree's files, verified, writable, flushed and independent of the store: blocks
    /// are shared where the file system can, and copied where it cannot.
    ///
    /// # Errors
    /// As [`Store::link_folder`]; what was copied by then is removed.
    pub fn copy_tree_out(&self, tree: &Digest, target: &Path) -> Result<Tree, StoreError> {
        let tree = self.tree(tree)?;
        self.copy_files_out(&tree, target).map(|()| tree)
    }

    /// As [`Store::copy_tree_out`], for a list of files that is at hand.
    ///
    /// # Errors
    /// As there.
    pub fn copy_files_out(&self, tree: &Tree, target: &Path) -> Result<(), StoreError> {
        make_folders(tree, target)?;
        let copied = self.copy_files(tree, target);
        if copied.is_err() {
            // The first error is the one to tell.
            let _ = fs::remove_dir_all(target);
        }
        copied
    }

    /// Takes a tree over from another store, whose objects the caller has compared with their digests: each as a second
    /// name of the file where the file system lends one, else as a copy of its own; one that is outside stays there.
    ///
    /// # Errors
    /// Fails where an object is not what it was, or the disk refuses.
    pub fn take_tree(&self, from: &Store, tree: &Tree) -> Result<(), StoreError> {
        let staging = self.staging()?;
        for (number, file) in tree.files().iter().enumerate() {
            if self.has(file) {
                continue;
            }
            // A name for each: one that is still there is that of a stored file, and nothing may ever be written
            // through it.
            let own = staging.path().join(number.to_string());
            let place = from.place(&file.digest);
            if let Place::Outside(outside) = &place {
                self.note_outside(&file.digest, outside)?;
            } else if fs::hard_link(place.path(), &own).is_ok() {
                self.name_object(&own, file)?;
            } else {
                from.copy_object(file, &own)?;
                self.adopt_object(&own, file)?;
            }
        }
        self.adopt_tree(tree)
    }

    fn check_all(&self, files: &[&TreeFile], verify: Verify) -> Result<(), StoreError> {
        if is_small(files.len(), files.iter().map(|file| file.size).sum()) {
            return files.iter().try_for_each(|file| self.check(file, verify));
        }
        let checks = files.par_iter().map(|file| self.check(file, verify));
        // The first in order, whichever thread is the quickest, so that two runs fail alike.
        checks.find_map_first(Result::err).map_or(Ok(()), Err)
    }

    fn link(&self, file: &TreeFile, target: &Path) -> Result<(), StoreError> {
        let link = target.join(&file.path);
        symlink(self.place(&file.digest).path(), &link).map_err(StoreError::on("link", &link))
    }

    fn copy_files(&self, tree: &Tree, target: &Path) -> Result<(), StoreError> {
        let copies = tree.files().par_iter().map(|file| self.copy_object(file, &target.join(&file.path)));
        copies.find_map_first(Result::err).map_or(Ok(()), Err)?;
        // A folder after those inside it.
        tree.folders().iter().rev().try_for_each(|folder| flush_folder(&target.join(folder)))?;
        flush_folder(target)?;
        flush_folder(parent(target))
    }

    /// Copies an object and checks the copy, which is what the user gets.
    fn copy_object(&self, file: &TreeFile, target: &Path) -> Result<(), StoreError> {
        self.check(file, Verify::None)?;
        let place = self.place(&file.digest);
        let mut source = place.open(&file.digest)?;
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(if file.executable { 0o777 } else { 0o666 });
        let mut copy = options.open(target).map_err(StoreError::on("create", target))?;
        // Between two files this is copy_file_range, which shares blocks on the file systems that can (btrfs, XFS).
        io::copy(&mut source, &mut copy).map_err(StoreError::on("write", target))?;
        let flush = || copy.sync_all().map_err(StoreError::on("flush", target));
        // The disk writes while the copy is hashed.
        let (flushed, hashed) = rayon::join(flush, || Digest::of_file(target));
        flushed?;
        if hashed? != (file.digest, file.size) {
            return Err(place.differs(&file.digest));
        }
        Ok(())
    }
}

/// Makes a tree's folders below a new one.
fn make_folders(tree: &Tree, target: &Path) -> Result<(), StoreError> {
    fs::create_dir_all(parent(target)).map_err(StoreError::on("create folder", parent(target)))?;
    fs::create_dir(target).map_err(StoreError::on("create folder", target))?;
    for folder in tree.folders() {
        let folder = target.join(folder);
        fs::create_dir(&folder).map_err(StoreError::on("create folder", &folder))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;
    use crate::testing::{add, damage, fill, read_all, store};

    const FILES: [(&str, &str); 3] = [("a", "first"), ("sub/c", "third"), ("sub/deep/b", "second")];

    fn owned(files: &[(&str, &str)]) -> Vec<(String, String)> {
        files.iter().map(|(path, content)| (path.to_string(), content.to_string())).collect()
    }

    #[test]
    fn links_and_copies_show_the_folder_as_it_was() {
        let (home, store) = store();
        let tree = add(&store, &FILES);
        let (links, copy) = (home.path().join("new/links"), home.path().join("new/copy"));
        store.link_folder(&tree, &links, Verify::Contents).unwrap();
        assert_eq!(read_all(&links), owned(&FILES));
        assert_eq!(fs::read_link(links.join("sub/c")).unwrap(), store.object_path(&Digest::of(b"third")));
        assert_eq!(store.copy_tree_out(&tree, &copy).unwrap().digest(), tree);
        assert_eq!(read_all(&copy), owned(&FILES));
    }

    #[test]
    fn a_copy_can_be_changed_without_touching_the_store() {
        let (home, store) = store();
        let staging = store.staging().unwrap();
        fill(staging.path(), &[("run.sh", "#!/bin/sh"), ("data", "bytes")]);
        fs::set_permissions(staging.path().join("run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
        let tree = store.add_folder(staging.path()).unwrap();
        let copy = home.path().join("copy");
        store.copy_tree_out(&tree, &copy).unwrap();
        let metadata = |path: &Path| fs::metadata(path).unwrap();
        assert_eq!(metadata(&copy.join("run.sh")).permissions().mode() & 0o700, 0o700);
        assert_eq!(metadata(&copy.join("data")).permissions().mode() & 0o700, 0o600);
        assert_eq!(metadata(&copy.join("data")).nlink(), 1);
        fs::write(copy.join("data"), "other").unwrap();
        store.link_folder(&tree, &home.path().join("links"), Verify::Contents).unwrap();
    }

    #[test]
    fn a_flipped_bit_is_named_and_nothing_is_handed_out() {
        let (home, store) = store();
        let tree = add(&store, &FILES);
        damage(&store, b"second", b"sfcond");
        let target = home.path().join("target");
        for hand_out in [&|| store.link_folder(&tree, &target, Verify::Contents) as Result<Tree, StoreError>, &|| {
            store.copy_tree_out(&tree, &target)
        }] as [&dyn Fn() -> Result<Tree, StoreError>; 2]
        {
            let error = hand_out().unwrap_err();
            assert!(matches!(error, StoreError::CorruptObject { .. }), "{error}");
            assert_eq!(error.object(), Some(Digest::of(b"second")));
            assert!(!target.exists());
        }
        // It has its length, which is all that a check without contents sees.
        store.link_folder(&tree, &target, Verify::None).unwrap();
    }

    #[test]
    fn a_truncated_and_a_missing_object_are_named_without_reading() {
        let (home, store) = store();
        let tree = add(&store, &FILES);
        let link = || store.link_folder(&tree, &home.path().join("target"), Verify::None).unwrap_err();
        damage(&store, b"third", b"thir");
        assert!(matches!(link(), StoreError::CorruptObject { digest, .. } if digest == Digest::of(b"third")));
        store.evict(&Digest::of(b"third")).unwrap();
        assert!(matches!(link(), StoreError::MissingObject { digest, .. } if digest == Digest::of(b"third")));
    }

    #[test]
    fn trees_taken_over_from_another_store_leave_that_store_as_it_is() {
        let (_home, store) = store();
        // What two of them share comes first, and once more in one of them: its second name is there already.
        let trees = [
            add(&store, &[("a", "shared"), ("b", "own of one"), ("c", "shared")]),
            add(&store, &[("a", "shared"), ("b", "own of the other"), ("z", "shared")]),
        ];
        let folder = store.staging().unwrap();
        let scratch = Store::open(folder.path().join("store")).unwrap();
        for tree in &trees {
            scratch.take_tree(&store, &store.tree(tree).unwrap()).unwrap();
        }
        for store in [&store, &scratch] {
            assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
            assert!(trees.iter().all(|tree| store.complete(tree)));
        }
        // A file taken in whose name is that of the same file: the name that it came by is gone.
        let file = store.tree(&trees[0]).unwrap().get("a").unwrap().clone();
        let second = folder.path().join("second");
        fs::hard_link(store.object_path(&file.digest), &second).unwrap();
        scratch.adopt_object(&second, &file).unwrap();
        assert!(!second.exists());
        assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
    }

    #[test]
    fn an_existing_target_is_left_alone() {
        let (home, store) = store();
        let tree = add(&store, &FILES);
        let target = home.path().join("target");
        fill(&target, &[("mine", "precious")]);
        assert!(store.link_folder(&tree, &target, Verify::None).is_err());
        assert!(store.copy_tree_out(&tree, &target).is_err());
        assert_eq!(read_all(&target), owned(&[("mine", "precious")]));
    }
}
