//! What the tests of several modules need: stores and folders with known content.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::census::SECONDS;
use crate::{Class, Digest, KeyDocument, OutputRecord, ResultRecord, Store};

/// A store in a temporary folder.
pub(crate) fn store() -> (tempfile::TempDir, Store) {
    let home = tempfile::tempdir().unwrap();
    let store = Store::open(home.path().join("store")).unwrap();
    (home, store)
}

/// Writes files below a folder.
pub(crate) fn fill(folder: &Path, files: &[(&str, &str)]) {
    for (path, content) in files {
        let place = folder.join(path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::write(place, content).unwrap();
    }
}

/// Stores a folder of files.
pub(crate) fn add(store: &Store, files: &[(&str, &str)]) -> Digest {
    let staging = store.staging().unwrap();
    fill(staging.path(), files);
    store.add_folder(staging.path()).unwrap()
}

/// Stores a folder of files as the result of a key that holds `name`, which took some seconds to make.
pub(crate) fn put(store: &Store, name: &str, seconds: f64, files: &[(&str, &str)]) -> Digest {
    let tree = add(store, files);
    let output = OutputRecord { kind: "rows".to_owned(), tree, identity: tree, facts: serde_json::Map::new() };
    let mut record = record_of(name, [("out".to_owned(), output)].into());
    record.how.insert(SECONDS.to_owned(), seconds.into());
    let key = record.key.result_key();
    store.record(&key, &record).unwrap();
    key
}

/// The record of a key that holds `name`.
pub(crate) fn record_of(name: &str, outputs: BTreeMap<String, OutputRecord>) -> ResultRecord {
    let mut key = KeyDocument::default();
    key.push("name", name, Class::Semantic);
    ResultRecord::new(key, name, outputs, serde_json::Map::new())
}

/// Overwrites an object, which is read-only, in place.
pub(crate) fn damage(store: &Store, object: &[u8], content: &[u8]) {
    let path = store.object_path(&Digest::of(object));
    fs::remove_file(&path).unwrap();
    fs::write(&path, content).unwrap();
}

/// What may be in the place of a file, each as a function that makes it there.
pub(crate) fn instead() -> [fn(&Path); 6] {
    [
        |place| fs::create_dir(place).unwrap(),
        |place| fill(place, &[("a", "content"), ("sub/b", "content")]),
        |place| std::os::unix::fs::symlink("nowhere", place).unwrap(),
        |place| std::os::unix::fs::symlink("/dev/null", place).unwrap(),
        |place| nix::unistd::mkfifo(place, nix::sys::stat::Mode::S_IRWXU).unwrap(),
        |place| drop(std::os::unix::net::UnixListener::bind(place).unwrap()),
    ]
}

/// The paths and contents below a folder, through links, sorted by path.
pub(crate) fn read_all(folder: &Path) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut waiting = vec![folder.to_owned()];
    while let Some(next) = waiting.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                waiting.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
                found.push((name, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    found
}
