//! Damage in the store: met, removed, made again.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use engine::history::{Recorded, Words};
use engine::run::RunEvent;
use test_harness::test;

use crate::project::{Project, Ran};

const CHAIN: &str = "
stages:
  a: { uses: constant, with: { value: 4 } }
  b: { uses: sum, with: { of: [a], plus: 1 } }
  c: { uses: half, with: { of: b } }
";

fn object(project: &Project, ran: &Ran, stage: &str, file: &str) -> std::path::PathBuf {
    let outcome = ran.outcome.stages.iter().find(|outcome| outcome.stage == stage).unwrap();
    let store = project.store();
    let tree = store.tree(&outcome.outputs["number"].tree).unwrap();
    store.place(&tree.get(file).unwrap().digest).path().to_owned()
}

/// Other bytes, the same length and times: what a failing disk does.
fn damage(path: &Path) {
    let metadata = fs::metadata(path).unwrap();
    let length = metadata.len();
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(path, vec![b'9'; usize::try_from(length).unwrap()]).unwrap();
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(metadata.modified().unwrap()).unwrap();
}

#[test]
fn a_damaged_object_is_made_again() {
    let project = Project::new(CHAIN);
    let first = project.run().succeeded();
    damage(&object(&project, &first, "b", "number.txt"));
    project.write(&format!("{CHAIN}  d: {{ uses: sum, with: {{ of: [b, c] }} }}\n"));
    let ran = project.run().succeeded();
    assert_eq!(ran.states(), "a cached, b done, c cached, d done");
    assert_eq!(ran.number("d"), 7);
    let healed = ran.events.iter().any(
        |event| matches!(event, RunEvent::StageRebuilding { stage, producers, .. } if stage == "d" && producers == &["b"]),
    );
    assert!(healed, "{:#?}", ran.events);
    assert_eq!(fs::read_to_string(object(&project, &ran, "b", "number.txt")).unwrap(), "5");
}

#[test]
fn a_missing_object_reruns_its_producer_alone() {
    let project = Project::new(CHAIN);
    let first = project.run().succeeded();
    fs::remove_file(object(&project, &first, "b", "number.txt")).unwrap();
    assert_eq!(project.reasons("b"), ["its result is no longer whole in the store"]);
    assert_eq!(project.run().succeeded().states(), "a cached, b done, c cached");
    fs::remove_dir_all(project.home().store().join("results")).unwrap();
    assert_eq!(project.reasons("a"), ["its result is no longer in the store"]);
}

#[test]
fn a_lost_tree_is_made_again() {
    let project = Project::new(CHAIN);
    project.run().succeeded();
    fs::remove_dir_all(project.home().store().join("trees")).unwrap();
    assert_eq!(project.run().succeeded().states(), "a done, b done, c done");
}

/// Readers that run side by side, and a copy out of the store: each meets the damage by itself.
#[test]
fn damage_that_several_meet_is_made_good_once() {
    let mut project = Project::new(CHAIN);
    project.options.threads = Some(8);
    let first = project.run().succeeded();
    damage(&object(&project, &first, "b", "number.txt"));
    let readers: String =
        (0..4).map(|reader| format!("  d{reader}: {{ uses: sum, with: {{ of: [b], plus: {reader} }} }}\n")).collect();
    project.write(&format!("{CHAIN}{readers}publish: {{ b: ./out }}\n"));
    let ran = project.run().succeeded();
    assert_eq!(ran.states(), "a cached, b done, c cached, d0 done, d1 done, d2 done, d3 done");
    assert_eq!((ran.number("d0"), ran.number("d3")), (5, 8));
    assert_eq!(fs::read_to_string(project.path("out/number.txt")).unwrap(), "5");
}

#[test]
fn what_is_published_again_is_told_once() {
    let project = Project::new(&format!("{CHAIN}publish: {{ b: ./out }}\n"));
    let first = project.run().succeeded();
    damage(&object(&project, &first, "b", "number.txt"));
    // The first folder is current, and the second cannot be copied until `b` is made again: then both are published.
    project.write(&format!("{CHAIN}publish: {{ b: ./out, b.number: ./other }}\n"));
    let ran = project.run().succeeded();
    let recorded = Recorded::read(&ran.outcome.folder, Words::Skip).unwrap();
    let mut paths: Vec<_> = recorded.published.iter().map(|copy| copy.path.file_name().unwrap().to_owned()).collect();
    paths.sort();
    assert_eq!(paths, ["other", "out"]);
}
