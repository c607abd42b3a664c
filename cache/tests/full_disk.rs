//! A full disk: an error of its own, and nothing half-written.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use cache::atomic::write_atomically;
use cache::{KeyDocument, ResultRecord, Store, StoreError, Tree};
use test_harness::{Requirement, Unmet, test};

test_harness::main!();

/// A small file system of its own, unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// Mounts one; fails where the user may not.
    fn mount(options: &str) -> Result<Self, Unmet> {
        let folder = tempfile::tempdir().unwrap();
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(folder.path()).output();
        match mount {
            Ok(output) if output.status.success() => Ok(Self(folder)),
            refused => Err(Requirement::Mount.unmet(format!("{refused:?}"))),
        }
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Fills what is left of it.
    fn fill(&self) {
        fs::write(self.path().join("filler"), vec![0; 2 << 20]).unwrap_err();
    }

    /// Removes the filler. Its room is free once no process has it open: one that another test is about to start may,
    /// until it has begun.
    fn empty(&self) {
        let filler = self.path().join("filler");
        fs::remove_file(&filler).unwrap();
        let end = Instant::now() + Duration::from_secs(30);
        while let Err(error) = fs::write(&filler, vec![0; 512 << 10]) {
            assert!(Instant::now() < end, "{error}");
            thread::sleep(Duration::from_millis(10));
        }
        fs::remove_file(&filler).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).status();
    }
}

fn count(folder: &Path) -> usize {
    fs::read_dir(folder).unwrap().count()
}

#[test]
fn a_record_is_there_whole_or_not_at_all() -> Result<(), Unmet> {
    let disk = SmallDisk::mount("size=1m")?;
    let store = Store::open(disk.path().join("store")).unwrap();
    let record = ResultRecord::new(KeyDocument::default(), "kind", [].into(), serde_json::Map::new());
    let key = record.key.result_key();
    disk.fill();
    let error = store.record(&key, &record).unwrap_err();
    assert!(matches!(error, StoreError::DiskFull { .. }), "{error:?}");
    assert_eq!(count(&store.root().join("results")), 0);
    let private = fs::read_dir(store.root().join("staging")).unwrap().map(|entry| entry.unwrap().path());
    assert_eq!(private.filter(|path| path.is_dir()).map(|folder| count(&folder)).sum::<usize>(), 0);
    disk.empty();
    store.record(&key, &record).unwrap();
    assert_eq!(store.result(&key).unwrap(), Some(record));
    Ok(())
}

#[test]
fn a_file_keeps_its_old_content() -> Result<(), Unmet> {
    let disk = SmallDisk::mount("size=1m")?;
    let path = disk.path().join("file");
    write_atomically(&path, b"old").unwrap();
    disk.fill();
    let error = write_atomically(&path, b"new").unwrap_err();
    assert!(matches!(error, StoreError::DiskFull { .. }), "{error:?}");
    assert_eq!(fs::read(&path).unwrap(), b"old");
    assert_eq!(count(disk.path()), 2);
    Ok(())
}

#[test]
fn a_copy_that_does_not_fit_is_removed() -> Result<(), Unmet> {
    let disk = SmallDisk::mount("size=1m")?;
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path()).unwrap();
    let staging = store.staging().unwrap();
    fs::write(staging.path().join("small"), "bytes").unwrap();
    fs::write(staging.path().join("weights"), vec![1; 2 << 20]).unwrap();
    let tree = store.add_folder(staging.path()).unwrap();
    let error = store.copy_tree_out(&tree, &disk.path().join("copy")).unwrap_err();
    assert!(matches!(error, StoreError::DiskFull { .. }), "{error:?}");
    assert_eq!(count(disk.path()), 0);
    Ok(())
}

#[test]
fn a_folder_that_does_not_fit_leaves_no_tree() -> Result<(), Unmet> {
    // Room for the files, and not for the folders that the objects go to.
    let disk = SmallDisk::mount("size=4m,nr_inodes=40")?;
    let store = Store::open(disk.path().join("store")).unwrap();
    let staging = store.staging().unwrap();
    (0..18).for_each(|i| fs::write(staging.path().join(format!("{i}")), format!("content {i}")).unwrap());
    let tree = Tree::of_folder(staging.path()).unwrap();
    let error = store.add_tree(staging.path(), &tree).unwrap_err();
    assert!(matches!(error, StoreError::DiskFull { .. }), "{error:?}");
    assert!(matches!(store.tree(&tree.digest()), Err(StoreError::MissingTree { .. })));
    assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
    Ok(())
}
