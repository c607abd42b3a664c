//! Entries of the store, whatever is in their place by now: a folder, a link to nowhere, a named pipe.
//!
//! Nothing here follows a link or waits for a pipe. What is not a regular file is damage like any other, and can be
//! removed like any other.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;

use crate::atomic::{flush_folder, parent, rename};
use crate::digest::describe;
use crate::{Digest, StoreError};

/// What is under a name of the store.
#[derive(Debug)]
pub(crate) enum Entry {
    /// Nothing.
    None,
    /// A file with this content.
    File(Vec<u8>),
    /// Something else, in words.
    Other(&'static str),
}

/// Room behind the content of an entry for the read that finds its end.
const ROOM: usize = 64;

/// Reads the file of an entry.
pub(crate) fn read_entry(path: &Path) -> Result<Entry, StoreError> {
    read_with_metadata(path).map(|(entry, _)| entry)
}

/// As [`read_entry`], with what the file's metadata were before it was read.
pub(crate) fn read_with_metadata(path: &Path) -> Result<(Entry, Option<Metadata>), StoreError> {
    let (file, metadata) = match open_with_metadata(path) {
        Ok(Ok(opened)) => opened,
        Ok(Err(found)) => return Ok((Entry::Other(found), None)),
        Err(error) if is_absent(&error) => return Ok((Entry::None, None)),
        Err(error) => return Err(StoreError::io("read", path, error)),
    };
    // A run with nothing to do does little else: the length is not asked for again, as a `File` would, and the last
    // read, which finds the end, has room.
    let mut bytes = Vec::with_capacity(usize::try_from(metadata.len()).unwrap_or(0) + ROOM);
    file.take(u64::MAX).read_to_end(&mut bytes).map_err(StoreError::on("read", path))?;
    Ok((Entry::File(bytes), Some(metadata)))
}

/// Opens the file of an entry to read it; what else is there, in words.
pub(crate) fn open_entry(path: &Path) -> io::Result<Result<File, &'static str>> {
    Ok(open_with_metadata(path)?.map(|(file, _)| file))
}

/// As [`open_entry`], with the file's metadata.
fn open_with_metadata(path: &Path) -> io::Result<Result<(File, Metadata), &'static str>> {
    let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags.bits()).open(path) {
        Ok(file) => file,
        Err(error) => {
            let found = fs::symlink_metadata(path).ok().filter(|metadata| !metadata.is_file());
            // A link or a socket cannot be opened, a device or a pipe perhaps not either.
            return found.map(|metadata| Err(describe(metadata.file_type()))).ok_or(error);
        }
    };
    let metadata = file.metadata()?;
    Ok(if metadata.is_file() { Ok((file, metadata)) } else { Err(describe(metadata.file_type())) })
}

/// The form of a document that nothing else vouches for: a line with the digest of the rest, and the rest.
pub(crate) fn with_check(json: &[u8]) -> Vec<u8> {
    [Digest::of(json).to_string().as_bytes(), b"\n", json].concat()
}

/// A document in the form of [`with_check`]; `None` where it is damaged.
pub(crate) fn checked(bytes: &[u8]) -> Option<&[u8]> {
    let (digest, json) = bytes.split_at_checked(bytes.iter().position(|byte| *byte == b'\n')?)?;
    let digest: Digest = std::str::from_utf8(digest).ok()?.parse().ok()?;
    let json = &json[1..];
    (digest == Digest::of(json)).then_some(json)
}

/// Whether an error says that there is nothing under a name: also where a folder on the way to it is a file.
pub(crate) fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Removes what is under a name of the store, folders with all that is in them; whether there was anything.
pub(crate) fn remove_entry(path: &Path) -> Result<bool, StoreError> {
    let removed = match fs::remove_file(path) {
        Err(_) if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir()) => fs::remove_dir_all(path),
        removed => removed,
    };
    match removed {
        Ok(()) => Ok(true),
        Err(error) if is_absent(&error) => Ok(false),
        Err(source) => Err(StoreError::io("remove", path, source)),
    }
}

/// Gives a file of this process its name in the store, over whatever is there.
pub(crate) fn put_entry(source: &Path, place: &Path) -> Result<(), StoreError> {
    if let Err(error) = rename(source, place) {
        // A file takes the place of a file alone.
        if !fs::symlink_metadata(place).is_ok_and(|metadata| metadata.is_dir()) {
            return Err(error);
        }
        remove_entry(place)?;
        rename(source, place)?;
    }
    // Where both were names of one file, the rename has done nothing, and the next file would be written over this one.
    match fs::remove_file(source) {
        Err(error) if !is_absent(&error) => Err(StoreError::io("remove", source, error)),
        _ => Ok(()),
    }
}

/// Makes a folder of the store in an existing one and flushes the latter, in the place of whatever is there and is
/// none.
pub(crate) fn ensure_own_folder(folder: &Path) -> Result<(), StoreError> {
    if make_own_folder(folder)? { flush_folder(parent(folder)) } else { Ok(()) }
}

/// [`ensure_own_folder`] without a flush; whether the folder is new.
pub(crate) fn make_own_folder(folder: &Path) -> Result<bool, StoreError> {
    for last in [false, true] {
        match fs::create_dir(folder) {
            Ok(()) => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if folder.is_dir() {
                    return Ok(false);
                }
                if last {
                    return Err(StoreError::io("create folder", folder, error));
                }
                remove_entry(folder)?;
            }
            Err(source) => return Err(StoreError::io("create folder", folder, source)),
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode;

    use super::*;
    use crate::gc::{Policy, Removal};
    use crate::testing::{add, fill, instead, put, read_all, store};
    use crate::{Examined, Store, Verify};

    #[test]
    fn whatever_stands_in_the_place_of_a_file_is_told_replaced_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("entry");
        assert!(matches!(read_entry(&place).unwrap(), Entry::None));
        assert!(matches!(read_entry(&place.join("below")).unwrap(), Entry::None));
        assert!(!remove_entry(&place).unwrap());
        for make in instead() {
            make(&place);
            assert!(matches!(read_entry(&place).unwrap(), Entry::Other(_)));
            let new = folder.path().join("new");
            fs::write(&new, "content").unwrap();
            put_entry(&new, &place).unwrap();
            assert!(matches!(read_entry(&place).unwrap(), Entry::File(bytes) if bytes == b"content"));
            assert!(matches!(read_entry(&place.join("below")).unwrap(), Entry::None));
            fs::remove_file(&place).unwrap();
            make(&place);
            assert!(remove_entry(&place).unwrap());
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_second_name_of_the_same_file_is_gone_when_the_file_has_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let [place, source] = ["place", "source"].map(|name| folder.path().join(name));
        fs::write(&place, "content").unwrap();
        fs::hard_link(&place, &source).unwrap();
        put_entry(&source, &place).unwrap();
        assert!(!source.exists());
        assert_eq!(fs::read_to_string(&place).unwrap(), "content");
    }

    #[test]
    fn a_folder_is_made_where_something_else_stands_and_a_link_to_one_is_one() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("ab");
        nix::unistd::mkfifo(&folder, Mode::S_IRWXU).unwrap();
        ensure_own_folder(&folder).unwrap();
        fs::write(folder.join("file"), "").unwrap();
        ensure_own_folder(&folder).unwrap();
        let link = root.path().join("link");
        symlink(&folder, &link).unwrap();
        ensure_own_folder(&link).unwrap();
        assert!(link.join("file").exists());
    }
    /// The names in a store that a result with one file depends on.
    fn entries(store: &Store, key: &Digest) -> [std::path::PathBuf; 6] {
        let tree = store.result(key).unwrap().unwrap().outputs["out"].tree;
        let (object, list) = (store.object_path(&Digest::of(b"first")), store.tree_path(&tree));
        let shards = [object.parent().unwrap().to_owned(), list.parent().unwrap().to_owned()];
        let [objects, trees] = shards;
        [object, list, objects, trees, store.record_path(key), store.folder("locks").join("gate")]
    }

    fn clear(path: &Path) {
        remove_entry(path).unwrap();
    }

    #[test]
    fn whatever_stands_in_the_place_of_an_entry_is_damage_that_storing_again_heals() {
        for make in instead() {
            for entry in 0..6 {
                let (home, store) = store();
                let key = put(&store, "name", 1.0, &[("a", "first")]);
                let place = entries(&store, &key)[entry].clone();
                clear(&place);
                make(&place);
                // Another process, which has nothing open.
                let store = Store::open(home.path().join("store")).unwrap();
                let is_lock = entry == 5;
                if !is_lock {
                    assert_eq!(store.take(&key).unwrap(), None, "entry {entry}");
                }
                assert_eq!(put(&store, "name", 1.0, &[("a", "first")]), key);
                let record = store.take(&key).unwrap().unwrap();
                let folder = home.path().join("folder");
                store.link_folder(&record.outputs["out"].tree, &folder, Verify::Contents).unwrap();
                assert_eq!(read_all(&folder), [("a".to_owned(), "first".to_owned())]);
                // In a shard other files do no harm.
                let faults = store.verify(&|_| {}).unwrap().faults;
                assert!(!faults.iter().any(crate::verify::Fault::is_damage), "{entry}: {faults:?}");
            }
        }
    }

    #[test]
    fn whatever_stands_in_the_place_of_an_entry_is_told_repaired_and_collected() {
        let everything = Policy { grace: std::time::Duration::ZERO, ..Policy::default() };
        for make in instead() {
            for entry in 0..5 {
                let (_home, store) = store();
                let key = put(&store, "name", 1.0, &[("a", "first")]);
                let other = put(&store, "other", 1.0, &[("b", "second")]);
                add(&store, &[("c", "garbage")]);
                let place = entries(&store, &key)[entry].clone();
                clear(&place);
                make(&place);
                store.results().unwrap();
                store.list().unwrap();
                if entry == 4 {
                    assert_eq!(store.examine(&key).unwrap(), Examined::Damaged);
                }
                store.collect_garbage(&everything, Removal::DryRun).unwrap();
                let faults = store.verify(&|_| {}).unwrap().faults;
                let results: Vec<_> = faults.iter().flat_map(crate::verify::Fault::results).collect();
                assert!(results.iter().all(|result| *result == key) && !results.is_empty(), "{entry}: {faults:?}");
                store.repair(&faults).unwrap();
                store.collect_garbage(&everything, Removal::Real).unwrap();
                let left = store.verify(&|_| {}).unwrap().faults;
                assert!(!left.iter().any(crate::verify::Fault::is_damage), "{entry}: {left:?}");
                assert_eq!(store.take(&key).unwrap(), None);
                assert!(store.take(&other).unwrap().is_some());
            }
        }
    }

    #[test]
    fn a_store_without_some_of_its_folders_is_looked_at_collected_and_filled_again() {
        for gone in ["objects", "trees", "results", "partial", "staging"] {
            let (_home, store) = store();
            let key = put(&store, "name", 1.0, &[("a", "first")]);
            fs::remove_dir_all(store.folder(gone)).unwrap();
            store.list().unwrap();
            let faults = store.verify(&|_| {}).unwrap().faults;
            assert_eq!(faults.is_empty(), ["results", "partial", "staging"].contains(&gone), "{gone}: {faults:?}");
            store.repair(&faults).unwrap();
            store.collect_garbage(&Policy::default(), Removal::Real).unwrap();
            assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
            assert_eq!(put(&store, "name", 1.0, &[("a", "first")]), key);
            assert!(store.take(&key).unwrap().is_some());
        }
    }

    #[test]
    fn objects_can_be_read_by_whom_the_umask_lets_read_and_written_by_nobody() {
        use std::os::unix::fs::PermissionsExt;
        let home = tempfile::tempdir().unwrap();
        let root = home.path().join("store");
        let store = Store::open(&root).unwrap();
        fill(&home.path().join("outside"), &[("a", "first")]);
        let let_through = fs::metadata(home.path().join("outside/a")).unwrap().permissions().mode() & 0o444;
        let tree = store.tree(&add(&store, &[("a", "first")])).unwrap();
        let object = store.object_path(&tree.files()[0].digest);
        assert_eq!(fs::metadata(&object).unwrap().permissions().mode() & 0o777, let_through);
        // Saying that it is in use leaves the mode as it is.
        fs::set_permissions(&object, fs::Permissions::from_mode(0o400)).unwrap();
        assert!(store.hold_object(&tree.files()[0]).unwrap());
        assert_eq!(fs::metadata(&object).unwrap().permissions().mode() & 0o777, 0o400);
    }
}
