//! A writer killed at any moment leaves a sound store, and nothing that the next process has to be told about.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::env;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use cache::{Class, KeyDocument, OutputRecord, ResultRecord, Store};
use test_harness::{child, test};

test_harness::main!();

/// Names the store to the process that is going to be killed.
const STORE: &str = "CACHE_TEST_STORE";

#[test]
fn a_killed_writer_leaves_a_sound_store() {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("store");
    let mut done = 0;
    for round in 0..20 {
        let mut writer = child("write_until_killed").env(STORE, &root).spawn().unwrap();
        // At a moment of its second folder or a later one, a different moment in each round.
        await_results(&root.join("results"), done + 1);
        thread::sleep(Duration::from_micros(round * 700));
        writer.kill().unwrap();
        writer.wait().unwrap();

        let store = Store::open(&root).unwrap();
        assert_eq!(store.verify(&|_| {}).unwrap().faults, []);
        assert_eq!(fs::read_dir(root.join("staging")).unwrap().count(), 0);
        let results = store.results().unwrap();
        done = results.len();
        for (key, record) in results {
            assert!(record.outputs.values().all(|output| store.complete(&output.tree)), "{key}");
        }
        assert!(store.try_lock("writer").unwrap().is_some());
    }
}

fn await_results(folder: &Path, count: usize) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while fs::read_dir(folder).map_or(0, |entries| entries.count()) < count {
        assert!(Instant::now() < deadline, "the writer gets nowhere");
        thread::sleep(Duration::from_millis(1));
    }
}

#[child]
fn write_until_killed() {
    let store = Store::open(env::var_os(STORE).unwrap()).unwrap();
    let _lock = store.lock("writer").unwrap();
    for number in store.results().unwrap().len().. {
        let staging = store.staging().unwrap();
        for file in 0..8 {
            let content = format!("{number} {file}").repeat(2000);
            fs::write(staging.path().join(format!("{file}")), content).unwrap();
        }
        let tree = store.add_folder(staging.path()).unwrap();
        let mut key = KeyDocument::default();
        key.push("number", number.to_string(), Class::Semantic);
        let facts = serde_json::Map::new();
        let output = OutputRecord { kind: "files".to_owned(), tree, identity: tree, facts };
        let outputs = [("out".to_owned(), output)].into();
        let record = ResultRecord::new(key.clone(), "files", outputs, serde_json::Map::new());
        store.record(&key.result_key(), &record).unwrap();
    }
    unreachable!("the numbers do not end")
}
