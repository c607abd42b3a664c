//! Training that is cut off goes on, to the same bytes.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::thread::sleep;
use std::time::{Duration, Instant};

use support::Project;

/// The stored adapter's digest, as a run of nothing tells it.
fn adapter(project: &Project) -> String {
    let run = project.run(&["run", "train.yaml", "--format", "json"]).ends_with(0).json();
    let stage = run["stages"].as_array().unwrap().iter().find(|stage| stage["stage"] == "adapter").unwrap();
    stage["outputs"]["adapter"]["tree"].as_str().unwrap().to_owned()
}

/// Waits until the training has saved working state at a step of its own.
#[track_caller]
fn saved_state(project: &Project) -> bool {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(60) {
        let partial = std::fs::read_dir(project.path(".pipeline/store/partial")).into_iter().flatten();
        let states = partial.filter_map(|key| std::fs::read_dir(key.unwrap().path()).ok()).flatten();
        if states.filter_map(Result::ok).any(|state| state.file_name().to_string_lossy().starts_with("step-")) {
            return true;
        }
        sleep(Duration::from_millis(2));
    }
    false
}

/// A project whose engine was killed when its training had saved state and not ended. On a busy machine the training may
/// win the race; then another one is started.
fn killed_while_training() -> Project {
    for _ in 0..10 {
        let project = Project::with_pipeline("train.yaml");
        let mut engine = project.start(&["run", "train.yaml"]);
        assert!(saved_state(&project), "no working state was saved");
        engine.kill().unwrap();
        engine.wait().unwrap();
        if project.run(&["plan", "train.yaml"]).ends_with(0).stdout.contains("goes on from saved working state") {
            return project;
        }
    }
    panic!("the training ended every time before it could be killed");
}

#[test]
fn a_training_that_was_killed_goes_on_to_the_same_bytes() {
    let whole = Project::with_pipeline("train.yaml");
    whole.run(&["run", "train.yaml"]).ends_with(0).warns("adapter: done in");
    let expected = adapter(&whole);

    let cut = killed_while_training();
    cut.run(&["run", "train.yaml"]).ends_with(0);
    assert_eq!(adapter(&cut), expected);
}

#[test]
fn the_whole_way_from_text_to_an_answer() {
    let project = Project::with_pipeline("train.yaml");
    let ran = project.run(&["run", "train.yaml"]).ends_with(0).warns("done: 8 ran in");
    let ran = ran.says("[scores]").says("perplexity").says("Where is it that the fox sees the hen?");
    assert!(ran.stdout.find("[scores]") < ran.stdout.find("[samples]"), "reports stand in the plan's order: {ran}");
    assert!(project.path("out/model/model.safetensors").is_file());
    project.run(&["show", "train.yaml", "adapter.metrics"]).ends_with(0).says("learning_rate").says("\n 120 ");
    project.run(&["show", "train.yaml", "merged"]).ends_with(0).says("merged_tensors");
    project.run(&["show", "train.yaml", "samples"]).ends_with(0).says("Where is it");
    // A published folder that was changed by hand is left alone, and says so.
    project.write("out/model/config.json", "{}");
    project.run(&["run", "train.yaml"]).ends_with(1).warns("out/model");
    project.run(&["run", "train.yaml", "--overwrite"]).ends_with(0);
    assert_ne!(std::fs::read_to_string(project.path("out/model/config.json")).unwrap(), "{}");
}

#[test]
fn how_the_work_is_split_is_in_no_key() {
    let project = Project::with_pipeline("train.yaml");
    project.run(&["run", "train.yaml"]).ends_with(0);
    let other_split = ["adapter.micro_batch_size=4", "adapter.gradient_accumulation_steps=1", "adapter.save_every=50"];
    let arguments: Vec<&str> = ["run", "train.yaml"].into_iter().chain(other_split).collect();
    project.run(&arguments).ends_with(0).warns("nothing to do");
    project.run(&["plan", "train.yaml", "adapter.lora.rank=2"]).ends_with(0).says("lora.rank 4 → 2 (command line:1:");
}
