//! The whole way from text to an answer, as a user goes it: every stage kind but `download`, and what is published.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use test_harness::test;

use crate::support::{Project, install};

#[test]
fn the_whole_way_from_text_to_an_answer() {
    let project = Project::with_pipeline("train.yaml");
    let ran = project.run(&["run", "train.yaml"]).ends_with(0).warns("done: 8 ran in");
    let ran = ran.says("[scores]").says("perplexity").says("Where is it that the fox sees the hen?");
    assert!(ran.stdout.find("[scores]") < ran.stdout.find("[samples]"), "reports stand in the plan's order: {ran}");
    assert!(project.path("out/model/model.safetensors").is_file());
    project.run(&["show", "train.yaml", "adapter.metrics"]).ends_with(0).says("learning_rate").says("train   120 ");
    project.run(&["show", "train.yaml", "merged"]).ends_with(0).says("merged_tensors");
    project.run(&["show", "train.yaml", "samples"]).ends_with(0).says("Where is it").says("completion:");
    let none = project.run(&["show", "train.yaml", "samples", "--rows", "0", "--format", "json"]).ends_with(0).json();
    assert_eq!(none["rows"], serde_json::json!([]));
    // A published folder that was changed by hand is left alone, and says so.
    project.write("out/model/config.json", "{}");
    project.run(&["run", "train.yaml"]).ends_with(2).warns("out/model");
    project.run(&["run", "train.yaml", "--overwrite"]).ends_with(0);
    assert_ne!(std::fs::read_to_string(project.path("out/model/config.json")).unwrap(), "{}");
}

#[test]
fn a_program_that_is_replaced_while_it_runs_ends_its_run() {
    let project = Project::with_pipeline("train.yaml");
    let program = project.path("program");
    install(env!("CARGO_BIN_EXE_pipeline"), &program);
    let mut run = Command::new(&program);
    run.args(["run", "train.yaml"]).current_dir(project.path("")).stdout(Stdio::piped()).stderr(Stdio::piped());
    let run = run.env_remove("PIPELINE_HOME").spawn().unwrap();
    let began = Instant::now();
    while project.processes().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(20), "no stage was started");
        sleep(Duration::from_millis(1));
    }
    // As an installation does it: the name leads to another file from now on, here to one that is no program.
    std::fs::remove_file(&program).unwrap();
    std::fs::write(&program, "another build").unwrap();
    let ended = run.wait_with_output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
}
