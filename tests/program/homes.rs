//! Homes that earlier versions left are read by this one: `tests/homes` holds one for each form that was changed since.
//!
//! Each was made by the version that it is named after, from the pipeline in it, and is opened in a folder of its own.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use flate2::read::GzDecoder;
use serde_json::Value;
use test_harness::test;

use crate::support::Project;

/// The project with the home that a version left.
fn project(name: &str) -> Project {
    let project = Project::new();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/homes").join(name);
    let mut archive = tar::Archive::new(GzDecoder::new(fs::File::open(path).unwrap()));
    archive.set_preserve_mtime(true);
    archive.unpack(project.path("")).unwrap();
    project
}

/// The state and the key of each stage of a run.
fn stages(ran: &Value) -> BTreeMap<String, (String, Value)> {
    let stages = ran["stages"].as_array().unwrap().iter();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    stages.map(|stage| (text(&stage["stage"]), (text(&stage["state"]), stage["key"].clone()))).collect()
}

/// A home, and what this version makes anew of it.
struct Left {
    archive: &'static str,
    /// Stages that are made anew: their kinds had a lower `VERSION` then, so that equal inputs give another output
    /// now; and `text`, whose columns say what its rows are, since there are more things that they can say.
    raised: &'static [&'static str],
    /// Where the training was cut off.
    step: &'static str,
    /// The run that made the tokens, and the one that made the notes.
    runs: [&'static str; 2],
}

/// Version 0.1.0 as long as it stored the description of an artefact as `artifact.json` among its files, also in
/// published folders.
const AMONG_FILES: Left = Left {
    archive: "0.1.0-records-among-files.tar.gz",
    raised: &["questions", "text", "tokens", "merged", "scores", "samples", "notes"],
    step: "step 65 of 240",
    runs: ["latest~4", "latest~2"],
};

/// Version 0.1.0 with descriptions beside the files.
const BESIDE_FILES: Left = Left {
    archive: "0.1.0-records-beside-files.tar.gz",
    raised: &["questions", "text", "tokens", "merged", "scores", "samples", "notes"],
    step: "step 40 of 240",
    runs: ["latest~4", "latest~2"],
};

const ALL: [Left; 2] = [AMONG_FILES, BESIDE_FILES];

/// The stages whose results are in these homes; of `longer` there is a training that was cut off.
const MADE: [&str; 10] =
    ["questions", "text", "fresh", "tokens", "packs", "adapter", "merged", "scores", "samples", "notes"];

#[test]
fn results_are_taken_published_folders_are_current_and_a_training_goes_on() {
    for left in ALL {
        results_are_taken(&left);
    }
}

fn results_are_taken(left: &Left) {
    let project = project(left.archive);
    let published = fs::read(project.path("out/adapter/.pipeline-published.json")).unwrap();
    // Of the cut off training a plan knows when what it reads is there.
    let planned = self::project(left.archive);
    for stage in left.raised {
        planned.run(&["run", "project.yaml", "--until", stage]).ends_with(0);
    }
    planned.run(&["plan", "project.yaml"]).ends_with(0).says(&format!("continues from {}", left.step));
    let ran = project.run(&["run", "project.yaml", "--format", "json"]).ends_with(0);
    assert!(ran.stderr.contains(&format!("resuming from {}", left.step)), "{ran}");
    let stages = stages(&ran.json());
    for stage in MADE {
        // What is made anew is the same artefact: nothing behind it runs again.
        let expected = if left.raised.contains(&stage) { "done" } else { "cached" };
        assert_eq!(stages[stage].0, expected, "{stage} of {}", left.archive);
    }
    assert_eq!((stages["longer"].0.as_str(), stages.len()), ("done", MADE.len() + 1));
    // Nothing was published anew.
    assert_eq!(fs::read(project.path("out/adapter/.pipeline-published.json")).unwrap(), published);
    project.run(&["run", "project.yaml", "--format", "json"]).ends_with(0).made(0);
}

#[test]
fn what_is_stored_is_shown_exported_and_traced() {
    for left in ALL {
        is_shown(&left);
    }
}

fn is_shown(left: &Left) {
    let project = project(left.archive);
    // Where a result lies that stands behind one that is made anew is known when that is there.
    project.run(&["run", "project.yaml"]).ends_with(0);
    for (output, said) in [
        ("questions", "row 1"),
        ("tokens", "trained"),
        ("packs", "document 1"),
        ("scores", "perplexity"),
        ("samples", "completion"),
        ("merged", "model.safetensors"),
        ("fresh.tokenizer", "tokenizer.json"),
        ("adapter.adapter", "adapter_model.safetensors"),
        ("notes", "below/second.txt"),
    ] {
        let shown = project.run(&["show", "project.yaml", output]).ends_with(0).says(said);
        assert!(!shown.stdout.contains("artifact.json"), "{shown}");
    }
    project.run(&["export", "project.yaml", "notes", "exported"]).ends_with(0);
    let mut names: Vec<_> =
        fs::read_dir(project.path("exported")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["below", "first.txt"]);
    for path in ["out/adapter", "out/notes"] {
        project.run(&["runs", "provenance", path]).ends_with(0).says("is what was published");
    }
    project.run(&["runs", "provenance", "exported"]).ends_with(0).says("is equal to what it holds");
    project.run(&["runs", "ls"]).ends_with(0).says("cut off");
    project.run(&["runs", "show", "latest"]).ends_with(0).says("longer");
    project.run(&["cache", "ls"]).ends_with(0).says("adapter");
}

#[test]
fn the_store_is_verified_collected_and_its_stages_are_done_again() {
    for left in ALL {
        is_verified(&left);
    }
}

fn is_verified(left: &Left) {
    let project = project(left.archive);
    project.run(&["cache", "verify"]).ends_with(0);
    project.run(&["cache", "gc"]).ends_with(0);
    // What is trained differs between CPUs in its last bits; tokens do not.
    for (run, stage) in left.runs.into_iter().zip(["tokens", "notes"]) {
        let verified = project.run(&["runs", "verify", run, stage]);
        if !left.raised.contains(&stage) {
            verified.ends_with(0).says("1 of 1 stage came out the same");
        }
    }
    // What is made now and what was stored then are one artefact: nothing behind it runs again.
    let ran = project.run(&["run", "project.yaml", "--until", "merged", "--force", "tokens", "--format", "json"]);
    let stages = stages(&ran.ends_with(0).json());
    assert_eq!((stages["tokens"].0.as_str(), stages["adapter"].0.as_str()), ("done", "cached"));
}

#[test]
fn a_folder_that_was_published_then_is_taken_in_replaced_and_told_changed() {
    for left in ALL {
        is_taken_in(&left);
    }
}

fn is_taken_in(left: &Left) {
    let project = project(left.archive);
    project.write(
        "again.yaml",
        "version: 1\nname: again\nstages:\n  adapter: { uses: download, with: { path: ./out/adapter, as: adapter } }\n  \
         notes: { uses: download, with: { path: ./out/notes, as: files } }\n",
    );
    let ran = project.run(&["run", "again.yaml", "--format", "json"]).ends_with(0).json();
    let then = project.run(&["run", "project.yaml", "--until", "adapter", "--format", "json"]).ends_with(0).json();
    let identity = |ran: &Value, stage: &str| {
        let stages = ran["stages"].as_array().unwrap().iter();
        stages.filter(|of| of["stage"] == stage).map(|of| of["outputs"][stage]["identity"].clone()).next().unwrap()
    };
    // The program's own file is no part of it, then as now.
    assert_eq!(identity(&ran, "adapter"), identity(&then, "adapter"));
    assert_eq!(engine::publish::description(&project.path("out/adapter")).unwrap().kind, "adapter");
    fs::write(project.path("out/notes/first.txt"), "fIrst\n").unwrap();
    project.run(&["runs", "provenance", "out/notes"]).ends_with(0).says("is no longer what was published: `first.txt`");
    project.run(&["run", "project.yaml", "--until", "notes"]).ends_with(2).warns("target-taken");
    project.run(&["run", "project.yaml", "--until", "notes", "--overwrite"]).ends_with(0);
    let names = fs::read_dir(project.path("out/notes")).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.collect();
    names.sort();
    assert_eq!(names, [".pipeline-published.json", "below", "first.txt"]);
    project.run(&["run", "project.yaml", "--until", "notes", "--format", "json"]).ends_with(0).made(0);
}
