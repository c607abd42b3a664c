//! The shared store: over a real S3 server in this process, and over a folder.

#![allow(clippy::unwrap_used, reason = "tests")]

mod s3;

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use cache::remote::{Check, Pulled, Pushed, PushedAs, Pushing, Remote, RemoteError, RemotePlace};
use cache::{Class, Digest, KeyDocument, OutputRecord, ResultRecord, Store};
use s3::{ACCOUNT, S3};

/// A file that is sent and fetched in parts.
const LARGE: usize = (9 << 20) + 123;

struct Home {
    _folder: tempfile::TempDir,
    store: Store,
}

fn home() -> Home {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("store")).unwrap();
    Home { _folder: folder, store }
}

/// Stores a result whose outputs hold these files.
fn result(store: &Store, name: &str, files: &[(&str, Vec<u8>)]) -> ResultRecord {
    let staging = store.staging().unwrap();
    for (path, content) in files {
        let place = staging.path().join(path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        fs::write(place, content).unwrap();
    }
    let tree = store.add_folder(staging.path()).unwrap();
    let mut key = KeyDocument::default();
    key.push("stage", name, Class::Semantic);
    let output = OutputRecord { kind: "files".to_owned(), tree, identity: tree, facts: serde_json::Map::new() };
    let record = ResultRecord::new(key.clone(), name, [("out".to_owned(), output)].into(), serde_json::Map::new());
    store.record(&key.result_key(), &record).unwrap();
    record
}

fn some_files() -> Vec<(&'static str, Vec<u8>)> {
    let large = (0..LARGE).map(|i| (i % 251) as u8 ^ (i >> 12) as u8).collect();
    vec![
        ("config.json", b"{}".to_vec()),
        ("sub/empty", Vec::new()),
        ("sub/copy.json", b"{}".to_vec()),
        ("model.safetensors", large),
    ]
}

fn connect(server: &S3) -> Remote {
    let place = RemotePlace::parse("s3://bucket/team/cache", Path::new("/")).unwrap();
    let place = place.with_endpoint(&server.endpoint()).unwrap();
    let account = ACCOUNT.map(|(name, value)| (name.to_owned(), value.to_owned()));
    Remote::open_with(&place, account).unwrap()
}

fn in_folder(folder: &Path) -> Remote {
    Remote::open_with(&RemotePlace::parse(folder.to_str().unwrap(), Path::new("/")).unwrap(), []).unwrap()
}

fn push(remote: &Remote, store: &Store, record: &ResultRecord) -> Result<Pushed, RemoteError> {
    remote.push(store, record, Pushing::Send, Check::Length, |_| {})
}

fn look_up(remote: &Remote, record: &ResultRecord) -> Option<ResultRecord> {
    let mut found = remote.look_up(&[record.key.result_key()]).unwrap();
    found.remove(0).unwrap()
}

fn pull(remote: &Remote, store: &Store, record: &ResultRecord) -> Result<Pulled, RemoteError> {
    remote.pull(store, record, |_| {})
}

/// How many files without a name lie in the private folders of a store's staging.
fn unnamed(store: &Store) -> usize {
    let staging = fs::read_dir(store.root().join("staging")).unwrap().map(|entry| entry.unwrap().path());
    staging.filter(|path| path.is_dir()).map(|folder| fs::read_dir(folder).unwrap().count()).sum()
}

/// The object's name in the bucket.
fn object_name(content: &[u8]) -> String {
    let digest = Digest::of(content).to_string();
    format!("team/cache/objects/{}/{}", &digest[..2], &digest[2..])
}

/// The name in the bucket of the list of an output's files.
fn tree_name(record: &ResultRecord, output: &str) -> String {
    let tree = record.outputs[output].tree.to_string();
    format!("team/cache/trees/{}/{}", &tree[..2], &tree[2..])
}

/// Flips a bit in the middle of what has a name in the bucket.
fn flip(server: &S3, name: &str) {
    let place = server.file(name);
    let mut content = fs::read(&place).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 1;
    fs::write(place, content).unwrap();
}

#[test]
fn a_result_reaches_another_store_by_way_of_a_bucket_and_of_a_folder() {
    let server = S3::start();
    let folder = tempfile::tempdir().unwrap();
    for remote in [connect(&server), in_folder(folder.path())] {
        let (here, there) = (home(), home());
        let record = result(&here.store, "train", &some_files());
        assert_eq!(look_up(&remote, &record), None);

        let sent = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&sent);
        let observe = move |progress: cache::remote::TransferProgress| {
            assert_eq!(progress.total, LARGE as u64 + 2);
            seen.fetch_max(progress.done, Ordering::SeqCst);
        };
        let pushed = remote.push(&here.store, &record, Pushing::Send, Check::Length, observe).unwrap();
        assert_eq!(pushed, Pushed { result: PushedAs::New, files: 3, bytes: LARGE as u64 + 2 });
        assert_eq!(sent.load(Ordering::SeqCst), LARGE as u64 + 2);

        let found = look_up(&remote, &record).unwrap();
        assert_eq!(found, record);
        assert_eq!(remote.missing_here(&there.store, &found).unwrap().files, 3);
        assert_eq!(pull(&remote, &there.store, &found).unwrap(), Pulled { files: 3, bytes: LARGE as u64 + 2 });
        assert_eq!(there.store.result(&record.key.result_key()).unwrap().as_ref(), Some(&record));
        assert!(there.store.complete(&record.outputs["out"].tree));
        assert_eq!(there.store.verify(&|_| {}).unwrap().faults, []);
        assert_eq!(unnamed(&there.store), 0);
        assert_eq!(pull(&remote, &there.store, &found).unwrap(), Pulled::default());
    }
}

#[test]
fn what_is_there_is_not_sent_again() {
    let server = S3::start();
    let remote = connect(&server);
    let here = home();
    let record = result(&here.store, "train", &some_files());
    let dry = remote.push(&here.store, &record, Pushing::DryRun, Check::Length, |_| {}).unwrap();
    assert_eq!((dry.files, server.names().len()), (3, 0));
    push(&remote, &here.store, &record).unwrap();
    let writes = server.writes();
    assert_eq!(push(&remote, &here.store, &record).unwrap(), Pushed { result: PushedAs::Same, files: 0, bytes: 0 });
    assert_eq!(server.writes(), writes);

    // What an interrupted push leaves: objects without a record, and one that is cut short.
    fs::remove_dir_all(server.file("team/cache/results")).unwrap();
    fs::write(server.file(&object_name(b"{}")), "{").unwrap();
    let again = push(&remote, &here.store, &record).unwrap();
    assert_eq!(again, Pushed { result: PushedAs::New, files: 1, bytes: 2 });
    pull(&remote, &home().store, &record).unwrap();
}

#[test]
fn what_is_not_what_its_name_says_is_refused_and_put_right_by_who_has_it() {
    let server = S3::start();
    let here = home();
    let files = some_files();
    let record = result(&here.store, "train", &files);
    push(&connect(&server), &here.store, &record).unwrap();
    let large = &files[3].1;
    let mut flipped = large.clone();
    flipped[LARGE / 2] ^= 1;
    let poisons: [(&str, &[u8], &[u8]); 5] = [
        ("flipped", large, &flipped),
        ("cut short", large, &large[..LARGE - 1]),
        ("cut to a part", large, &large[..8 << 20]),
        ("longer", b"{}", b"{} "),
        ("emptied", b"{}", b""),
    ];
    for (what, sound, poison) in poisons {
        let place = server.file(&object_name(sound));
        fs::write(&place, poison).unwrap();
        let (remote, there) = (connect(&server), home());
        let error = pull(&remote, &there.store, &record).unwrap_err();
        assert!(matches!(&error, RemoteError::Refused { name, .. } if *name == object_name(sound)), "{what}: {error}");
        assert_eq!(there.store.result(&record.key.result_key()).unwrap(), None, "{what}");
        assert!(!there.store.place(&Digest::of(sound)).path().exists(), "{what}");
        assert_eq!(there.store.verify(&|_| {}).unwrap().faults, [], "{what}");
        assert_eq!(fs::read_dir(there.store.root().join("staging")).unwrap().count(), 0, "{what}");
        // The length alone would not show it; who met it sends it anew, and with it all others, which may be damaged
        // too.
        let sent = push(&remote, &here.store, &record).unwrap().files;
        let all: std::collections::BTreeSet<_> = files.iter().map(|(_, content)| Digest::of(content)).collect();
        assert_eq!(sent, all.len() as u64, "{what}");
        pull(&remote, &there.store, &record).unwrap();
    }
}

#[test]
fn what_is_damaged_is_found_and_put_right_where_contents_are_compared() {
    let server = S3::start();
    let here = home();
    let files = some_files();
    let record = result(&here.store, "train", &files);
    push(&connect(&server), &here.store, &record).unwrap();
    flip(&server, &object_name(&files[3].1));
    flip(&server, &tree_name(&record, "out"));
    let sent = |how, check| connect(&server).push(&here.store, &record, how, check, |_| {}).unwrap();
    assert_eq!(sent(Pushing::Send, Check::Length).files, 0);
    assert_eq!(sent(Pushing::DryRun, Check::Content).files, 1);
    let repaired = sent(Pushing::Send, Check::Content);
    assert_eq!((repaired.files, repaired.bytes, repaired.result), (1, LARGE as u64, PushedAs::Same));
    assert_eq!(sent(Pushing::Send, Check::Content).files, 0);
    let there = home();
    pull(&connect(&server), &there.store, &record).unwrap();
    assert_eq!(there.store.verify(&|_| {}).unwrap().faults, []);
}

#[test]
fn once_anything_of_a_result_is_refused_all_of_it_is_sent_anew() {
    let server = S3::start();
    let here = home();
    let mut record = result(&here.store, "train", &[("a", b"first".to_vec())]);
    let other = result(&here.store, "other", &[("b", b"second".to_vec())]);
    record.outputs.insert("second".to_owned(), other.outputs["out"].clone());
    let key = record.key.result_key();
    here.store.record(&key, &record).unwrap();
    push(&connect(&server), &here.store, &record).unwrap();
    let trees = [tree_name(&record, "out"), tree_name(&record, "second")];
    // Who fetches meets the first alone, and what is behind it is no better.
    let damages = [
        [trees[0].clone(), trees[1].clone()],
        [trees[0].clone(), object_name(b"second")],
        [object_name(b"first"), trees[1].clone()],
    ];
    for damaged in damages {
        damaged.iter().for_each(|name| flip(&server, name));
        let (remote, there) = (connect(&server), home());
        let error = pull(&remote, &there.store, &record).unwrap_err();
        assert!(matches!(error, RemoteError::Refused { .. }), "{damaged:?}: {error}");
        assert_eq!(push(&remote, &here.store, &record).unwrap().files, 2, "{damaged:?}");
        pull(&connect(&server), &there.store, &record).unwrap();
        // Nothing is refused any more.
        assert_eq!(push(&remote, &here.store, &record).unwrap().files, 0, "{damaged:?}");
    }
}

#[test]
fn what_two_results_share_is_put_right_with_one_and_the_other_is_sent_anew_too() {
    let server = S3::start();
    let here = home();
    let shared = result(&here.store, "shared", &[("a", b"shared".to_vec())]);
    let records = ["first", "second"].map(|name| {
        let mut record = result(&here.store, name, &[("b", name.as_bytes().to_vec())]);
        // The list of its files is the first thing that is fetched.
        record.outputs.insert("before".to_owned(), shared.outputs["out"].clone());
        here.store.record(&record.key.result_key(), &record).unwrap();
        record
    });
    for record in &records {
        push(&connect(&server), &here.store, record).unwrap();
    }
    for damaged in [tree_name(&shared, "out"), object_name(b"first"), object_name(b"second")] {
        flip(&server, &damaged);
    }
    let (remote, there) = (connect(&server), home());
    for record in &records {
        let error = pull(&remote, &there.store, record).unwrap_err();
        assert!(matches!(&error, RemoteError::Refused { name, .. } if *name == tree_name(&shared, "out")), "{error}");
    }
    for record in &records {
        assert_eq!(push(&remote, &here.store, record).unwrap().files, 2);
        pull(&connect(&server), &there.store, record).unwrap();
        assert_eq!(push(&remote, &here.store, record).unwrap().files, 0);
    }
}

#[test]
fn a_foreign_tree_or_record_is_refused() {
    let server = S3::start();
    let remote = connect(&server);
    let here = home();
    let record = result(&here.store, "train", &[("a", b"a".to_vec())]);
    let other = result(&here.store, "other", &[("b", b"b".to_vec())]);
    push(&remote, &here.store, &record).unwrap();
    push(&remote, &here.store, &other).unwrap();
    let names = server.names();
    let of = |folder: &str| -> Vec<_> { names.iter().filter(|name| name.contains(folder)).cloned().collect() };
    let [trees, results] = [of("/trees/"), of("/results/")];

    let key = record.key.result_key();
    let (ours, theirs): (Vec<_>, Vec<_>) = results.iter().partition(|name| name.contains(&key.to_string()));
    let sound = fs::read(server.file(ours[0])).unwrap();
    fs::copy(server.file(theirs[0]), server.file(ours[0])).unwrap();
    let found = connect(&server).look_up(&[key]).unwrap().remove(0);
    assert!(matches!(found, Err(RemoteError::Refused { .. })), "{found:?}");
    assert_eq!(push(&remote, &here.store, &record).unwrap().result, PushedAs::Repaired);
    assert_eq!(fs::read(server.file(ours[0])).unwrap(), sound);

    // A path that climbs, in a tree that is otherwise well formed.
    let tree = record.outputs["out"].tree.to_string();
    let place = trees.iter().find(|name| name.ends_with(&tree[2..])).unwrap();
    let text = fs::read_to_string(server.file(place)).unwrap();
    for poison in [text.replace("\"a\"", "\"../a\""), text.replace("\"a\"", "\"b\""), "{".to_owned()] {
        fs::write(server.file(place), poison).unwrap();
        let error = pull(&connect(&server), &home().store, &record).unwrap_err();
        assert!(matches!(error, RemoteError::Refused { .. }), "{error}");
    }
    fs::remove_file(server.file(place)).unwrap();
    let error = pull(&connect(&server), &home().store, &record).unwrap_err();
    assert!(matches!(error, RemoteError::Missing { .. }), "{error}");
}

#[test]
fn a_flipped_bit_of_a_record_is_refused_and_put_right() {
    let folder = tempfile::tempdir().unwrap();
    let remote = in_folder(folder.path());
    let here = home();
    let mut record = result(&here.store, "train", &[("a", b"a".to_vec())]);
    record.outputs.get_mut("out").unwrap().facts.insert("loss".to_owned(), 0.5.into());
    let key = record.key.result_key();
    here.store.record(&key, &record).unwrap();
    push(&remote, &here.store, &record).unwrap();
    let place = folder.path().join(format!("results/{key}.json"));
    let sound = fs::read(&place).unwrap();
    assert_eq!(sound, fs::read(here.store.root().join(format!("results/{key}.json"))).unwrap());

    let with_another_loss = |text: Vec<u8>| String::from_utf8(text).unwrap().replace("0.5", "0.7");
    fs::write(&place, with_another_loss(sound.clone())).unwrap();
    let found = remote.look_up(&[key]).unwrap().remove(0);
    assert!(matches!(found, Err(RemoteError::Refused { .. })), "{found:?}");
    assert_eq!(push(&remote, &here.store, &record).unwrap().result, PushedAs::Repaired);
    assert_eq!(fs::read(&place).unwrap(), sound);

    // Of a record of before there was a check nothing is known; one who compares contents gives it one.
    let unchecked = serde_json::to_vec_pretty(&record).unwrap();
    for unchecked in [unchecked.clone(), with_another_loss(unchecked).into_bytes()] {
        fs::write(&place, &unchecked).unwrap();
        assert!(look_up(&remote, &record).is_some());
        let push = |how, check| remote.push(&here.store, &record, how, check, |_| {}).unwrap().result;
        push(Pushing::Send, Check::Length);
        assert_eq!(fs::read(&place).unwrap(), unchecked);
        assert_eq!(push(Pushing::DryRun, Check::Content), PushedAs::Repaired);
        assert_eq!(push(Pushing::Send, Check::Content), PushedAs::Repaired);
        assert_eq!(fs::read(&place).unwrap(), sound);
        assert_eq!(push(Pushing::Send, Check::Content), PushedAs::Same);
    }
}

#[test]
fn a_damaged_object_of_our_own_is_not_sent() {
    let server = S3::start();
    let remote = connect(&server);
    let here = home();
    let files = some_files();
    let record = result(&here.store, "train", &files);
    for content in [&files[0].1, &files[3].1] {
        let place = here.store.place(&Digest::of(content)).path().to_owned();
        let sound = fs::read(&place).unwrap();
        let mut damaged = sound.clone();
        damaged[0] ^= 1;
        fs::remove_file(&place).unwrap();
        fs::write(&place, damaged).unwrap();
        let error = push(&remote, &here.store, &record).unwrap_err();
        assert!(matches!(error, RemoteError::Store(_)), "{error}");
        assert_eq!(look_up(&remote, &record), None);
        assert!(!server.file(&object_name(content)).exists());
        fs::write(&place, sound).unwrap();
    }
    push(&remote, &here.store, &record).unwrap();
}

#[test]
fn eight_pushers_of_the_same_results_all_succeed() {
    let server = S3::start();
    let here = home();
    let files: Vec<(String, Vec<u8>)> = (0..6).map(|i| (format!("{i}"), vec![i; 1000])).collect();
    let files: Vec<(&str, Vec<u8>)> = files.iter().map(|(name, content)| (name.as_str(), content.clone())).collect();
    let records: Vec<_> = (0..3).map(|i| result(&here.store, &format!("stage {i}"), &files)).collect();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let remote = connect(&server);
                records.iter().for_each(|record| assert!(push(&remote, &here.store, record).is_ok()));
            });
        }
    });
    let (there, remote) = (home(), connect(&server));
    records.iter().for_each(|record| assert!(pull(&remote, &there.store, record).is_ok()));
    assert_eq!(there.store.verify(&|_| {}).unwrap().faults, []);
}

#[test]
fn another_result_of_the_same_key_stays_while_it_is_whole() {
    let server = S3::start();
    let (here, there) = (home(), home());
    let ours = result(&here.store, "train", &[("a", b"ours".to_vec())]);
    let theirs = result(&there.store, "train", &[("a", b"theirs".to_vec())]);
    let remote = connect(&server);
    push(&remote, &here.store, &ours).unwrap();
    assert_eq!(push(&remote, &there.store, &theirs).unwrap().result, PushedAs::OtherKept);
    assert_eq!(look_up(&remote, &ours).unwrap(), ours);
    fs::remove_file(server.file(&object_name(b"ours"))).unwrap();
    assert_eq!(push(&remote, &there.store, &theirs).unwrap().result, PushedAs::New);
    assert_eq!(look_up(&remote, &ours).unwrap(), theirs);
}

#[test]
fn a_busy_server_is_asked_again_and_one_that_is_gone_is_named() {
    let server = S3::start();
    let remote = connect(&server);
    let here = home();
    let record = result(&here.store, "train", &[("a", b"a".to_vec())]);
    server.be_busy(3);
    push(&remote, &here.store, &record).unwrap();
    server.be_busy(2);
    assert!(look_up(&remote, &record).is_some());

    let place = RemotePlace::parse("s3://bucket/x", Path::new("/")).unwrap();
    let place = place.with_endpoint("http://127.0.0.1:9").unwrap();
    let account = ACCOUNT.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let error = Remote::open_with(&place, account).unwrap().look_up(&[record.key.result_key()]).unwrap_err();
    assert!(matches!(error, RemoteError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("s3://bucket/x") && error.to_string().contains("refused"), "{error}");
}

#[test]
fn wrong_keys_a_missing_bucket_and_another_version_are_told_apart() {
    let server = S3::start();
    let key = Digest::of(b"key");
    let at = |address: &str, secret: &str| {
        let place = RemotePlace::parse(address, Path::new("/")).unwrap().with_endpoint(&server.endpoint()).unwrap();
        let account = [("AWS_ACCESS_KEY_ID", "AKID"), ("AWS_SECRET_ACCESS_KEY", secret), ("AWS_REGION", "us-east-1")];
        let account = account.map(|(name, value)| (name.to_owned(), value.to_owned()));
        Remote::open_with(&place, account).unwrap().look_up(&[key]).map(|mut found| found.remove(0).unwrap())
    };
    let error = at("s3://bucket/x", "hunter2").unwrap_err();
    assert!(matches!(error, RemoteError::Denied { .. }), "{error:?}");
    assert!(!format!("{error:?} {error}").contains("hunter2"));
    let error = at("s3://nowhere/x", "SECRET").unwrap_err();
    assert!(matches!(error, RemoteError::NoBucket { .. }), "{error:?}");
    assert_eq!(at("s3://bucket/x", "SECRET").unwrap(), None);

    fs::create_dir_all(server.file("x")).unwrap();
    for marker in [r#"{"version":2,"digest":"blake3"}"#, "<html>"] {
        fs::write(server.file("x/pipeline-cache.json"), marker).unwrap();
        let error = at("s3://bucket/x", "SECRET").unwrap_err();
        assert!(matches!(error, RemoteError::Version { .. }), "{error:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    let absent = RemotePlace::parse(folder.path().join("absent").to_str().unwrap(), Path::new("/")).unwrap();
    assert!(matches!(Remote::open_with(&absent, []), Err(RemoteError::NoBucket { .. })));
}

#[test]
fn a_call_that_is_under_way_can_be_stopped() {
    let server = S3::start();
    let remote = connect(&server);
    let here = home();
    let record = result(&here.store, "train", &[("a", b"a".to_vec())]);
    server.be_slow(60_000);
    thread::scope(|scope| {
        let pushing = scope.spawn(|| push(&remote, &here.store, &record));
        while server.requests() == 0 {
            thread::yield_now();
        }
        remote.stop();
        assert!(matches!(pushing.join().unwrap(), Err(RemoteError::Stopped)));
    });
}
