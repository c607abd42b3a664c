//! What runs again, and what does not.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use test_harness::{Unmet, test};

use crate::support::{Project, Ran, install, needs_root};

/// The stages that a run ran, sorted; all others must have been cached.
#[track_caller]
fn ran(project: &Project, arguments: &[&str]) -> Vec<String> {
    let all: Vec<&str> = ["run", "data.yaml", "--format", "json"].iter().chain(arguments).copied().collect();
    let result = project.run(&all).ends_with(0).json();
    let mut ran = Vec::new();
    for stage in result["stages"].as_array().unwrap() {
        match stage["state"].as_str().unwrap() {
            "done" => ran.push(stage["stage"].as_str().unwrap().to_owned()),
            state => assert_eq!(state, "cached", "{stage}"),
        }
    }
    assert_eq!(result["stages"].as_array().unwrap().len(), 7);
    ran.sort();
    ran
}

const ALL: [&str; 7] = ["fresh", "question_packs", "question_tokens", "questions", "text", "text_packs", "text_tokens"];

#[test]
fn a_second_run_does_nothing_and_says_so() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["run", "data.yaml"]).ends_with(0).warns("done: 7 ran in ");
    project.run(&["run", "data.yaml"]).ends_with(0).warns("nothing to do: all 7 stages are cached (");
    project.run(&["plan", "data.yaml"]).ends_with(0);
}

#[test]
fn a_changed_parameter_reruns_what_is_downstream_of_it_and_nothing_else() {
    let project = Project::with_pipeline("data.yaml");
    assert_eq!(ran(&project, &[]), ALL);
    assert_eq!(ran(&project, &["text_packs.max_seq_len=32"]), ["text_packs"]);
    assert_eq!(ran(&project, &["vars.template=Q: {question} A: "]), ["question_packs", "question_tokens", "questions"]);
    // What was made before is still there.
    assert_eq!(ran(&project, &[]), [""; 0]);
}

#[test]
fn new_weights_do_not_tokenize_again() {
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    assert_eq!(ran(&project, &["fresh.seed=2"]), ["fresh"]);
}

#[test]
fn equal_tokens_rerun_nothing_behind_them() {
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    // Another key, as after an update that changes how a stage works, and the same ids.
    let changed = ["question_tokens.train_on=assistant", "text_tokens.on_no_target=keep"];
    assert_eq!(ran(&project, &changed), ["question_tokens", "text_tokens"]);
}

#[test]
fn names_and_places_are_in_no_key() {
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    fs::create_dir(project.path("data")).unwrap();
    fs::rename(project.path("text.jsonl"), project.path("data/renamed.jsonl")).unwrap();
    project.edit("data.yaml", "./text.jsonl", "./data/renamed.jsonl");
    project.edit("data.yaml", "  text_packs:", "  packs_by_another_name:");
    project.edit("data.yaml", "name: data", "name: other");
    assert_eq!(ran(&project, &[]), [""; 0]);
}

#[test]
fn a_source_counts_by_its_content() {
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    let rows = fs::read_to_string(project.path("questions.jsonl")).unwrap();
    project.write("questions.jsonl", &rows);
    assert_eq!(ran(&project, &[]), [""; 0]);
    project.write("questions.jsonl", &rows.replacen("Where", "Say where", 1));
    assert_eq!(ran(&project, &[]), ["question_packs", "question_tokens", "questions"]);
}

#[test]
fn plan_names_the_field_that_differs_and_its_place() {
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    let line = 1 + fs::read_to_string(project.path("data.yaml"))
        .unwrap()
        .lines()
        .position(|line| line.contains("max_seq_len: 64"))
        .unwrap();
    project.edit("data.yaml", "max_seq_len: 64", "max_seq_len: 32");
    let plan = project.run(&["plan", "data.yaml"]).ends_with(0).says("max_seq_len").says("64").says("32");
    assert!(plan.stdout.contains(&format!("data.yaml:{line}:")), "{plan}");
    let stages = project.run(&["plan", "data.yaml", "--format", "json"]).ends_with(0).json();
    let states: Vec<_> =
        stages["stages"].as_array().unwrap().iter().filter(|stage| stage["status"] != "cached").collect();
    assert_eq!(states.len(), 1, "{states:?}");
    assert_eq!(states[0]["stage"], "text_packs");
}

#[test]
fn a_damaged_object_is_found_and_made_again() {
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    project.run(&["cache", "verify"]).ends_with(0);
    // The tokens are read by the packs alone; damage them and ask for other packs.
    let listing = project.run(&["cache", "ls", "--format", "json"]).ends_with(0).json();
    assert_eq!(listing["results"].as_array().unwrap().len(), 7);
    let damaged = damage_parquet(&project);
    assert!(damaged > 0);
    project.run(&["cache", "verify"]).ends_with(1);
    assert!(ran(&project, &["text_packs.max_seq_len=48"]).contains(&"text_packs".to_owned()));
}

/// Flips a byte in the middle of every stored object that is a Parquet file; how many those are.
fn damage_parquet(project: &Project) -> usize {
    let mut damaged = 0;
    for shard in fs::read_dir(project.path(".pipeline/store/objects")).unwrap() {
        for object in fs::read_dir(shard.unwrap().path()).unwrap() {
            let path = object.unwrap().path();
            let mut bytes = fs::read(&path).unwrap();
            if !bytes.starts_with(b"PAR1") {
                continue;
            }
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            // Objects are read-only; a new file in its place is what a bad disk would look like.
            fs::remove_file(&path).unwrap();
            fs::write(&path, bytes).unwrap();
            damaged += 1;
        }
    }
    damaged
}

#[test]
fn what_is_found_damaged_is_made_again_by_the_next_run_even_where_nothing_reads_it() {
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    damage_parquet(&project);
    let verify = project.run(&["cache", "verify"]).ends_with(1).says("--repair");
    assert!(
        verify.stdout.contains(" of output `packs` of pack ") && verify.stdout.contains("data/text_packs"),
        "{verify}"
    );
    assert_eq!(ran(&project, &[]), [""; 0], "to look changes nothing");
    let repair = project.run(&["cache", "verify", "--repair", "--format", "json"]).ends_with(0).json();
    assert_eq!(repair["repaired"], true);
    project.run(&["cache", "verify"]).ends_with(0);
    assert!(ran(&project, &[]).contains(&"text_packs".to_owned()));
    project.run(&["cache", "verify"]).ends_with(0);

    damage_parquet(&project);
    let shown = ["show", "data.yaml", "text_packs"];
    project.run(&shown).ends_with(1).warns("it does not have digest").warns("`pipeline run data.yaml` rebuilds it");
    assert!(ran(&project, &[]).contains(&"text_packs".to_owned()));
    project.run(&shown).ends_with(0);
    let export = ["export", "data.yaml", "question_packs", "out"];
    project.run(&export).ends_with(1).warns("rebuilds it");
    assert!(ran(&project, &[]).contains(&"question_packs".to_owned()));
    project.run(&export).ends_with(0);
}

/// The first file below a folder.
fn first_file(folder: &Path) -> PathBuf {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let first = entries.min().unwrap();
    if first.is_dir() { first_file(&first) } else { first }
}

/// Another user's store, who may not read some of it: root may read everything.
#[test]
fn what_cannot_be_read_is_told_and_not_removed() -> Result<(), Unmet> {
    /// The id of a user without rights.
    const NOBODY: u32 = 65534;
    needs_root()?;
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    let program = project.path("program");
    install(env!("CARGO_BIN_EXE_pipeline"), &program);
    let owner = format!("{NOBODY}:{NOBODY}");
    assert!(Command::new("chown").args(["-R", &owner]).arg(project.path("")).status().unwrap().success());
    let files = ["objects", "trees", "results"].map(|folder| first_file(&project.path(".pipeline/store").join(folder)));
    let allow = |mode| files.iter().for_each(|file| fs::set_permissions(file, Permissions::from_mode(mode)).unwrap());
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&program);
        command.args(arguments).current_dir(project.path("")).env_remove("PIPELINE_HOME");
        command.env("HOME", project.path("")).uid(NOBODY).gid(NOBODY);
        Ran::of(command, arguments)
    };
    run(&["cache", "verify"]).ends_with(0).says("everything is intact");
    allow(0o000);
    for arguments in [&["cache", "verify"][..], &["cache", "verify", "--repair"]] {
        let told =
            run(arguments).ends_with(1).says("3 files of the store cannot be read").says("nothing else is damaged");
        assert_eq!(told.stdout.matches(" cannot be read: Permission denied").count(), 3, "{told}");
        assert!(files.iter().all(|file| file.exists()), "{told}");
    }
    run(&["cache", "ls"]).ends_with(0).warns("1 record of results cannot be read and not listed").says("6 results");
    // What is damaged beside them is removed.
    allow(0o400);
    let [object, ..] = &files;
    let mut bytes = fs::read(object).unwrap();
    bytes.push(b'x');
    fs::set_permissions(object, Permissions::from_mode(0o600)).unwrap();
    fs::write(object, bytes).unwrap();
    fs::set_permissions(&files[2], Permissions::from_mode(0o000)).unwrap();
    run(&["cache", "verify", "--repair"]).ends_with(1).says("1 file of the store cannot be read").says(", removed;");
    assert!(!object.exists() && files[2].exists());
    Ok(())
}

#[test]
fn room_is_made_and_what_is_needed_again_is_made_again() {
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    ran(&project, &["text_packs.max_seq_len=32"]);
    let used = project.run(&["cache", "du", "--format", "json"]).ends_with(0).json();
    let of_packs = used["groups"].as_array().unwrap().iter().find(|group| group["group"] == "data/text_packs").unwrap();
    assert_eq!(of_packs["results"], 2, "{used:#}");
    assert!(of_packs["own_bytes"].as_u64().unwrap() <= of_packs["bytes"].as_u64().unwrap());
    project.run(&["cache", "du", "--by", "kind"]).ends_with(0).says("tokenize").says(" in all");
    project.run(&["cache", "gc"]).ends_with(0).says("removed 0 results");

    // The last run took everything but the packs of before.
    let gc = ["cache", "gc", "--keep-runs", "1"];
    let dry = project.run(&[&gc[..], &["--dry-run", "--format", "json"]].concat()).ends_with(0).json();
    let real = project.run(&[&gc[..], &["--format", "json"]].concat()).ends_with(0).json();
    assert_eq!((dry["results"].as_array().unwrap().len(), &dry["freed_bytes"]), (1, &real["freed_bytes"]), "{dry:#}");
    assert_eq!(real["results"][0]["stages"][0]["stage"], "text_packs");
    assert_eq!(ran(&project, &["text_packs.max_seq_len=32"]), [""; 0]);
    assert_eq!(ran(&project, &[]), ["text_packs"]);

    // Age removes it all, but not what the newest run took.
    let aged = ["cache", "gc", "--older-than", "0s", "--keep-runs", "1", "--format", "json"];
    let aged = project.run(&aged).ends_with(0).json();
    assert_eq!(aged["results"].as_array().unwrap().len(), 1, "{aged:#}");
    let room = project.run(&["cache", "gc", "--max-size", "0B", "--format", "json"]).ends_with(0).json();
    assert_eq!((room["results"].as_array().unwrap().len(), &room["left_bytes"]), (7, &0.into()), "{room:#}");
    assert_eq!(ran(&project, &[]), ALL);
    project.run(&["cache", "gc", "--max-size", "much"]).ends_with(2);
}

#[test]
fn young_files_of_no_result_stay_and_that_is_told() {
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    let gc = project.run(&["cache", "gc"]).ends_with(0);
    assert!(!gc.stdout.contains("younger"), "{gc}");
    for record in fs::read_dir(project.path(".pipeline/store/results")).unwrap() {
        fs::remove_file(record.unwrap().path()).unwrap();
    }
    project.run(&["cache", "du"]).ends_with(0).says("files of no result that are older than an hour");
    for gc in [&["cache", "gc", "--dry-run"][..], &["cache", "gc"]] {
        let told = project.run(gc).ends_with(0).says(" files of no result (");
        told.says(" KiB) are younger than an hour and stay\n").says("0 results, 0 folders of working state, 0 files");
    }
    let told = project.run(&["cache", "gc", "--format", "json"]).ends_with(0).json();
    assert!(told["kept_young"].as_u64() > Some(0) && told["kept_young_bytes"] == told["left_bytes"], "{told:#}");
    let help = project.run(&["cache", "gc", "--help"]).ends_with(0).stdout;
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("Files of no result that are younger than an hour are kept"), "{help}");
}

#[test]
fn what_is_published_as_links_takes_no_room_and_is_kept() {
    let project = Project::with_pipeline("data.yaml");
    project.edit("data.yaml", "stages:", "publish: { fresh.model: { path: ./out, link: symlink } }\nstages:");
    let publish = |more: &[&str]| project.run(&[&["run", "data.yaml", "--until", "fresh", "-v"], more].concat());
    publish(&[]).ends_with(0).warns("published to");
    let weights = project.path("out/model.safetensors");
    let object = fs::read_link(&weights).unwrap();
    assert!(object.starts_with(project.path(".pipeline/store/objects")), "{}", object.display());
    publish(&[]).ends_with(0).warns("is current in");
    project.run(&["runs", "provenance", "out"]).ends_with(0).says("is what was published");
    // Nothing that removes results takes what the links lead to.
    project.run(&["cache", "gc", "--max-size", "0B"]).ends_with(0);
    publish(&[]).ends_with(0).warns("1 ran, 1 cached");
    project.run(&["cache", "rm", "data/fresh"]).ends_with(0);
    assert!(fs::read(&weights).unwrap().len() > 1000);
    // A store that lost it all the same makes it again, in the same place.
    fs::remove_file(&object).unwrap();
    publish(&[]).ends_with(0);
    assert!(fs::read(&weights).unwrap().len() > 1000);
    // A file in the place of a link is the user's.
    fs::remove_file(&weights).unwrap();
    fs::write(&weights, "mine").unwrap();
    publish(&[]).ends_with(2).warns("was changed since it was published").warns("model.safetensors");
    publish(&["--overwrite"]).ends_with(0);
    assert_eq!(fs::read_link(&weights).unwrap(), object);
    // Links and copies are two things.
    publish(&["publish.fresh.model=./out"]).ends_with(0).warns("published to");
    assert!(fs::symlink_metadata(&weights).unwrap().is_file());
    // Links hold nothing that are gone.
    let room = project.run(&["cache", "gc", "--max-size", "0B", "--format", "json"]).ends_with(0).json();
    assert_eq!(room["left_bytes"], 0, "{room:#}");
    publish(&["publish.fresh.model={ path: ./out, link: hard }"]).ends_with(2).warns("`copy`").warns("`symlink`");
}

#[test]
fn results_are_removed_by_stage_and_by_key() {
    let project = Project::with_pipeline("data.yaml");
    ran(&project, &[]);
    project.run(&["cache", "rm", "text_pack"]).ends_with(2);
    project.run(&["cache", "rm", "data/text_packs", "--dry-run"]).ends_with(0);
    assert_eq!(ran(&project, &[]), [""; 0]);
    project.run(&["cache", "rm", "data/text_packs"]).ends_with(0);
    assert_eq!(ran(&project, &[]), ["text_packs"]);
    let listing = project.run(&["cache", "ls", "--format", "json"]).ends_with(0).json();
    let result = listing["results"].as_array().unwrap().iter().find(|result| result["kind"] == "pack").unwrap();
    let key = &result["key"].as_str().unwrap()[..12];
    let short = project.run(&["cache", "rm", &key[..3]]).ends_with(2).warns("is too short").warns("at least 6 letters");
    assert!(!short.stderr.contains("begins so"), "{short}");
    project.run(&["cache", "rm", key]).ends_with(0);
    assert_eq!(ran(&project, &[]).len(), 1);
}

#[test]
fn two_runs_at_once_share_the_work() {
    let project = Project::with_pipeline("data.yaml");
    let mut children = [(); 2].map(|()| project.start(&["run", "data.yaml"]));
    for child in &mut children {
        assert!(child.wait().unwrap().success());
    }
    let runs = project.run(&["runs", "ls", "--format", "json"]).ends_with(0).json();
    let made: u64 = runs.as_array().unwrap().iter().map(|run| run["counts"]["done"].as_u64().unwrap()).sum();
    assert_eq!(made, 7, "each result is made by one of the two: {runs:#}");
    project.run(&["cache", "verify"]).ends_with(0);
    assert_eq!(ran(&project, &[]), [""; 0]);
}

#[test]
fn a_home_may_lie_elsewhere() {
    let project = Project::with_pipeline("data.yaml");
    project.run(&["run", "data.yaml", "--home", "elsewhere"]).ends_with(0);
    assert!(project.path("elsewhere/store").is_dir() && !project.path(".pipeline").exists());
    project.run(&["run", "data.yaml", "--home", "elsewhere", "--format", "json"]).ends_with(0).made(0);
}
