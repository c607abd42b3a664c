//! Copies out of the store, on the file systems that can be had here: shared blocks where there are such, plain copies
//! elsewhere, and across file systems.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use cache::{Digest, Store};
use nix::sys::statvfs::statvfs;
use test_harness::{Requirement, Unmet, test};

test_harness::main!();

const BYTES: usize = 24 << 20;

/// A file system in a file.
struct Disk {
    folder: tempfile::TempDir,
    _image: tempfile::NamedTempFile,
}

impl Disk {
    /// Makes and mounts one. Fails where that is not possible.
    fn mount(kind: &str) -> Result<Self, Unmet> {
        let (folder, image) = (tempfile::tempdir().unwrap(), tempfile::NamedTempFile::new().unwrap());
        image.as_file().set_len(400 << 20).unwrap();
        let make = Command::new(format!("mkfs.{kind}")).arg("-q").arg(image.path()).output();
        let made = make.map_err(|error| format!("mkfs.{kind}: {error}")).and_then(succeeded);
        let mount = made.and_then(|()| {
            let mount = Command::new("mount").args(["-o", "loop"]).arg(image.path()).arg(folder.path()).output();
            mount.map_err(|error| error.to_string()).and_then(succeeded)
        });
        mount.map_err(|reason| Requirement::Mount.unmet(reason.trim()))?;
        Ok(Self { folder, _image: image })
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.folder.path()).status();
    }
}

fn succeeded(output: std::process::Output) -> Result<(), String> {
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

fn used(folder: &Path) -> u64 {
    File::open(folder).unwrap().sync_all().unwrap();
    nix::unistd::syncfs(File::open(folder).unwrap()).unwrap();
    let status = statvfs(folder).unwrap();
    (status.blocks() - status.blocks_free()) * status.fragment_size()
}

/// Stores a file of random bytes, copies it to `target`, and says how much that took on its file system.
fn copy(store: &Path, target: &Path) -> u64 {
    let store = Store::open(store).unwrap();
    let staging = store.staging().unwrap();
    let bytes: Vec<u8> =
        (0..BYTES as u64 / 32).flat_map(|number| *Digest::of(&number.to_le_bytes()).as_bytes()).collect();
    fs::write(staging.path().join("weights"), &bytes).unwrap();
    let tree = store.add_folder(staging.path()).unwrap();
    let before = used(target.parent().unwrap());
    store.copy_tree_out(&tree, target).unwrap();
    let took = used(target.parent().unwrap()).saturating_sub(before);
    let copied = target.join("weights");
    assert_eq!(fs::read(&copied).unwrap(), bytes);
    assert_eq!(fs::metadata(&copied).unwrap().nlink(), 1);
    // It is the user's own: what is done to it does not reach the store.
    fs::write(&copied, "changed").unwrap();
    assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
    took
}

/// What a copy takes on a file system of a kind.
fn taken_on(kind: &str) -> Result<u64, Unmet> {
    let disk = Disk::mount(kind)?;
    Ok(copy(&disk.path().join("store"), &disk.path().join("copy")))
}

#[test(each = ["btrfs", "xfs"])]
fn a_copy_shares_its_blocks_where_the_file_system_can(kind: &str) -> Result<(), Unmet> {
    let took = taken_on(kind)?;
    assert!(took < BYTES as u64 / 4, "{took}");
    Ok(())
}

#[test(each = ["ext4"])]
fn a_copy_has_blocks_of_its_own_elsewhere(kind: &str) -> Result<(), Unmet> {
    let took = taken_on(kind)?;
    assert!(took >= BYTES as u64, "{took}");
    Ok(())
}

#[test]
fn a_copy_crosses_file_systems() -> Result<(), Unmet> {
    let here = tempfile::tempdir().unwrap();
    let memory = tempfile::tempdir_in("/dev/shm").map_err(|error| Requirement::SharedMemory.unmet(error))?;
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    if device(here.path()) == device(memory.path()) {
        return Err(Requirement::SharedMemory.unmet("/dev/shm is on the file system of temporary files"));
    }
    copy(&here.path().join("store"), &memory.path().join("copy"));
    copy(&memory.path().join("store"), &here.path().join("copy"));
    Ok(())
}
