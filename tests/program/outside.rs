//! `download: { path, copy: false }`: large files stay where the user has them. The same results under the same keys; a
//! file that changes, moves or goes is told and costs no more than a rerun; nothing of the user's is written or
//! removed.

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use serde_json::Value;
use test_harness::{Unmet, test};

use crate::support::{Project, Ran, install, needs_root};

/// The id of a user without rights.
const NOBODY: u32 = 65534;

/// A folder of a large and a small file, what reads it, and both published. MEANWHILE is a script outside.
const PIPELINE: &str = r#"
version: 1
name: outside
stages:
  base: { uses: download, with: { path: ./model, as: files, copy: false } }
  read: { uses: command, with: { run: 'cat "$INPUT_i"/* | wc -c >"$OUTPUT_o/bytes"; sh MEANWHILE', inputs: { i: base }, outputs: { o: files } } }
publish: { base: ./out/base, read: ./out/read }
"#;

const LARGE: usize = 200_000;

/// A file that was left alone for a while.
fn write_large(path: &Path, byte: u8) {
    fs::write(path, [byte; LARGE]).unwrap();
    let before = SystemTime::now() - Duration::from_secs(600);
    File::options().write(true).open(path).unwrap().set_times(FileTimes::new().set_modified(before)).unwrap();
}

fn write_model(folder: &Path) {
    fs::create_dir(folder).unwrap();
    write_large(&folder.join("large.bin"), b'a');
    fs::write(folder.join("small.json"), "{}").unwrap();
}

fn project() -> Project {
    let project = Project::new();
    project.write("p.yaml", &PIPELINE.replace("MEANWHILE", &project.path("meanwhile").to_string_lossy()));
    project.write("meanwhile", "");
    write_model(&project.path("model"));
    project
}

fn run(project: &Project, arguments: &[&str]) -> Ran {
    project.run(&[&["run", "p.yaml", "--format", "json"], arguments].concat())
}

/// The key and outputs of each stage of a run.
fn results(ran: &Ran) -> BTreeMap<String, (Value, Value)> {
    let stages = ran.json()["stages"].as_array().unwrap().clone();
    stages
        .into_iter()
        .map(|s| (s["stage"].as_str().unwrap().to_owned(), (s["key"].clone(), s["outputs"].clone())))
        .collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// The length of the objects of a home's store.
fn stored(project: &Project, home: &str) -> u64 {
    files(&project.path(home).join("store/objects")).iter().map(|path| fs::metadata(path).unwrap().len()).sum()
}

fn content(path: &Path) -> u8 {
    fs::read(path).unwrap()[0]
}

#[test]
fn the_results_and_their_keys_are_those_of_a_copy() {
    let project = project();
    let left = run(&project, &[]).ends_with(0).made(2);
    let copied = run(&project, &["--home", "other", "base.copy=true"]).ends_with(0).made(2);
    assert_eq!(results(&left), results(&copied));
    assert!(stored(&project, ".pipeline") < 100 && stored(&project, "other") > LARGE as u64);
    run(&project, &[]).ends_with(0).made(0);
    project.run(&["cache", "ls"]).ends_with(0).says("1 file outside the store, 195.3 KiB").says("complete");
    project.run(&["cache", "du"]).ends_with(0).says("1 file (195.3 KiB) of results outside the store");
    project.run(&["cache", "verify"]).ends_with(0).says("1 file (195.3 KiB) outside the store read, 0 not as it was");
    project.run(&["runs", "verify", "latest", "base", "read", "--format", "json"]).ends_with(0).found_equal(2);
    project.run(&["plan", "p.yaml", "--home", "third"]).ends_with(0).says("no: files of 64 KiB and more stay");
}

#[test]
fn a_file_that_asks_for_the_other_form_gets_what_it_needs() {
    let project = project();
    run(&project, &[]).ends_with(0).made(2);
    // A copy is asked for, and there is none.
    project.run(&["plan", "p.yaml", "base.copy=true"]).ends_with(0).says("its result is no longer whole in the store");
    run(&project, &["base.copy=true"]).ends_with(0).made(1);
    assert!(stored(&project, ".pipeline") > LARGE as u64);
    run(&project, &["base.copy=true"]).ends_with(0).made(0);
    // A copy is there, and does no harm.
    run(&project, &[]).ends_with(0).made(0);
    project.run(&["cache", "ls"]).ends_with(0);
    // It goes with its result.
    project.run(&["cache", "rm", "base"]).ends_with(0);
    run(&project, &[]).ends_with(0).made(1);
    assert!(stored(&project, ".pipeline") < 100);
}

#[test]
fn a_changed_file_is_a_changed_source_and_a_touched_one_is_looked_at_again() {
    let project = project();
    let first = run(&project, &[]).ends_with(0).made(2);
    File::options().write(true).open(project.path("model/large.bin")).unwrap().set_modified(SystemTime::now()).unwrap();
    let touched = run(&project, &[]).ends_with(0).made(1);
    assert_eq!(results(&first), results(&touched));
    write_large(&project.path("model/large.bin"), b'b');
    project.run(&["plan", "p.yaml"]).ends_with(0).says("large.bin");
    let changed = run(&project, &[]).ends_with(0).made(2);
    assert_ne!(results(&first)["base"].0, results(&changed)["base"].0);
    assert_eq!(content(&project.path("out/base/large.bin")), b'b');
    run(&project, &[]).ends_with(0).made(0);
}

#[test]
fn a_file_that_changes_under_a_stage_fails_it() {
    let project = project();
    let large = project.path("model/large.bin");
    for (meanwhile, told) in [
        (format!("printf x >>'{}'", large.display()), "has another content now"),
        (format!("rm '{}'", large.display()), "is not there any more"),
    ] {
        write_large(&large, b'a');
        project.write("meanwhile", &meanwhile);
        let ran = run(&project, &[]).ends_with(1).warns("a file of an input changed while the pipeline was running");
        let ran = ran.warns(&format!("large.bin`, which was left outside the store, {told}"));
        let read = ran.json()["stages"][1].clone();
        assert_eq!(
            (&read["stage"], &read["failure"]["cause"]),
            (&"read".into(), &"changed_while_running".into()),
            "{ran}"
        );
    }
    write_large(&large, b'a');
    project.write("meanwhile", "");
    run(&project, &[]).ends_with(0);
    assert_eq!(fs::read_to_string(project.path("out/read/bytes")).unwrap().trim(), (LARGE + 2).to_string());
}

#[test]
fn a_file_that_is_gone_is_told_and_breaks_nothing_else() {
    let project = project();
    run(&project, &[]).ends_with(0).made(2);
    fs::rename(project.path("model"), project.path("moved")).unwrap();
    let verified = project
        .run(&["cache", "verify"])
        .ends_with(0)
        .says("1 file (195.3 KiB) outside the store read, 1 not as it was");
    verified
        .says(
            "large.bin`, which was left outside the store, is not there any more; it is `large.bin` of output `files`",
        )
        .says("everything in the store is intact");
    project.run(&["cache", "verify", "--repair"]).ends_with(0);
    project.run(&["cache", "ls"]).ends_with(0).says("incomplete");
    project.run(&["cache", "gc"]).ends_with(0);
    // What was made of it is there, and so is it itself from where it was moved to.
    project.run(&["runs", "verify", "latest", "read"]).says("left outside the store, is not there any more");
    run(&project, &["base.path=./moved"]).ends_with(0).made(1);
    project.run(&["cache", "verify"]).ends_with(0).says("0 not as it was");
    fs::rename(project.path("moved"), project.path("model")).unwrap();
    run(&project, &[]).ends_with(0).made(1);
}

#[test]
fn garbage_collection_leaves_the_files_of_the_user() {
    let project = project();
    run(&project, &[]).ends_with(0).made(2);
    write_large(&project.path("model/large.bin"), b'b');
    run(&project, &[]).ends_with(0).made(2);
    let notes = || files(&project.path(".pipeline/store/outside")).len();
    assert_eq!(notes(), 2);
    project.run(&["cache", "gc", "--keep-runs", "1"]).ends_with(0);
    assert_eq!(notes(), 1);
    run(&project, &[]).ends_with(0).made(0);
    project.run(&["cache", "rm", "base", "read"]).ends_with(0);
    assert_eq!(notes(), 0);
    assert_eq!(content(&project.path("model/large.bin")), b'b');
}

#[test]
fn what_is_published_is_a_copy_also_where_links_are_asked_for() {
    let project = project();
    project.edit("p.yaml", "base: ./out/base,", "base: { path: ./out/base, link: symlink },");
    run(&project, &[]).ends_with(0).made(2);
    let (large, small) = (project.path("out/base/large.bin"), project.path("out/base/small.json"));
    let is_link = |path: &Path| fs::symlink_metadata(path).unwrap().is_symlink();
    assert!(!is_link(&large) && is_link(&small));
    assert_eq!(fs::metadata(project.path("model/large.bin")).unwrap().nlink(), 1);
    let inode = fs::metadata(&large).unwrap().ino();
    run(&project, &[]).ends_with(0).made(0);
    assert_eq!(fs::metadata(&large).unwrap().ino(), inode);
    fs::write(&large, "mine").unwrap();
    run(&project, &[]).ends_with(2).warns("was changed since it was published");
    assert_eq!(content(&project.path("model/large.bin")), b'a');
    run(&project, &["--overwrite"]).ends_with(0);
    // What is in the store by now is linked.
    run(&project, &["base.copy=true"]).ends_with(0).made(1);
    assert!(is_link(&large));
}

#[test]
fn stages_that_share_a_file_need_one_of_its_places() {
    let project = project();
    write_model(&project.path("second"));
    let second =
        "  again: { uses: download, needs: [base], with: { path: ./second, as: files, copy: false } }\npublish:";
    project.edit("p.yaml", "publish:", second);
    run(&project, &[]).ends_with(0).made(2);
    fs::remove_dir_all(project.path("model")).unwrap();
    run(&project, &["base.path=./second"]).ends_with(0).made(1);
    project.run(&["cache", "verify"]).ends_with(0).says("0 not as it was");
}

#[test]
fn links_of_the_user_are_followed_to_the_file_itself() {
    let project = project();
    let [large, blob] = ["model/large.bin", "blob"].map(|path| project.path(path));
    fs::rename(&large, &blob).unwrap();
    symlink("../blob", &large).unwrap();
    let first = run(&project, &[]).ends_with(0).made(2);
    // Another content under the link is a changed source; the old result still has its file.
    write_large(&project.path("other"), b'b');
    fs::remove_file(&large).unwrap();
    symlink("../other", &large).unwrap();
    run(&project, &[]).ends_with(0).made(2);
    project.run(&["cache", "verify"]).ends_with(0).says("2 files (390.6 KiB) outside the store read, 0 not as it was");
    fs::remove_file(&large).unwrap();
    symlink("../blob", &large).unwrap();
    let again = run(&project, &[]).ends_with(0).made(0);
    assert_eq!(results(&first), results(&again));
}

#[test]
fn a_shared_cache_gets_the_bytes() {
    let project = project();
    fs::create_dir(project.path("shared")).unwrap();
    let first = run(&project, &["--remote", "./shared", "--push"]).ends_with(0).made(2);
    let other = run(&project, &["--home", "other", "--remote", "./shared"]).ends_with(0).made(0);
    assert_eq!(results(&first)["read"], results(&other)["read"]);
    assert_eq!(content(&project.path("out/base/large.bin")), b'a');
}

/// The folder is another user's, who lets read it.
#[test]
fn a_folder_that_may_only_be_read_is_enough() -> Result<(), Unmet> {
    needs_root()?;
    let project = project();
    let program = project.path("program");
    install(env!("CARGO_BIN_EXE_pipeline"), &program);
    for path in [project.path(""), project.path("p.yaml")] {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    fs::set_permissions(project.path("model"), fs::Permissions::from_mode(0o555)).unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.args(arguments).current_dir(project.path("")).env_remove("PIPELINE_HOME");
        command.env("HOME", project.path("")).uid(NOBODY).gid(NOBODY);
        Ran::of(command, arguments)
    };
    run(&["run", "p.yaml", "--format", "json"]).ends_with(0).made(2);
    run(&["run", "p.yaml", "--format", "json"]).ends_with(0).made(0);
    run(&["cache", "verify"]).ends_with(0).says("0 not as it was");
    fs::set_permissions(project.path("model/large.bin"), fs::Permissions::from_mode(0o600)).unwrap();
    run(&["cache", "verify"]).ends_with(0).says("cannot be read: Permission denied");
    Ok(())
}

#[test]
fn a_repository_has_no_place_to_stay_at() {
    let project = project();
    project.edit("p.yaml", "path: ./model, as: files", "repo: owner/name, as: files");
    let told = project.run(&["validate", "p.yaml"]).ends_with(2).reports("bad-source");
    told.warns("`copy: false` belongs to `path`").warns("give that as `path:`");
}
