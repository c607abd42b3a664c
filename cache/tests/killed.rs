//! A writer killed at any moment leaves a sound store, and nothing that the next process has to be told about.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::env;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cache::{Class, KeyDocument, OutputRecord, ResultRecord, Store};

/// Names the store to the process that is going to be killed, which is this test again.
const STORE: &str = "CACHE_TEST_STORE";

#[test]
fn a_killed_writer_leaves_a_sound_store() {
    if let Some(root) = env::var_os(STORE) {
        write_until_killed(Path::new(&root));
    }
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("store");
    let mut done = 0;
    for round in 0..20 {
        let mut writer = Command::new(env::current_exe().unwrap())
            .args(["--exact", "a_killed_writer_leaves_a_sound_store"])
            .env(STORE, &root)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
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

fn write_until_killed(root: &Path) -> ! {
    let store = Store::open(root).unwrap();
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
