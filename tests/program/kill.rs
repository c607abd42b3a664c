//! `kill -9` at any moment: nothing stays alive, and the next plain run succeeds.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_harness::test;

use crate::support::{Project, Ran};

/// Waits until no process of the project is left.
#[track_caller]
fn nothing_is_left_alive(project: &Project) {
    let began = Instant::now();
    while !project.processes().is_empty() {
        assert!(began.elapsed() < Duration::from_secs(60), "still alive: {:?}", project.processes());
        sleep(Duration::from_millis(20));
    }
}

/// A run whose training takes long enough to be met in the middle.
const LONG_RUN: [&str; 3] = ["run", "train.yaml", "adapter.epochs=80"];

/// Waits for the process of the training to appear.
#[track_caller]
fn the_training(project: &Project) -> Pid {
    let began = Instant::now();
    loop {
        let is_training = |line: &str| line.contains("__stage") && line.contains("/adapter/");
        if let Some((pid, _)) = project.processes().iter().find(|(_, line)| is_training(line)) {
            return Pid::from_raw(*pid);
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the training was not started");
        sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_killed_engine_leaves_nothing_alive_and_nothing_to_repair() {
    for milliseconds in [0, 15, 40, 80, 150, 250, 400, 700] {
        let project = Project::with_pipeline("data.yaml");
        let mut engine = project.start(&["run", "data.yaml"]);
        sleep(Duration::from_millis(milliseconds));
        engine.kill().unwrap();
        engine.wait().unwrap();
        nothing_is_left_alive(&project);
        project.run(&["run", "data.yaml"]).ends_with(0);
        project.run(&["run", "data.yaml", "--format", "json"]).ends_with(0).made(0);
        project.run(&["cache", "verify"]).ends_with(0);
    }
}

#[test]
fn a_killed_stage_fails_alone_and_the_next_run_succeeds() {
    let project = Project::with_pipeline("train.yaml");
    let engine = project.start(&LONG_RUN);
    kill(the_training(&project), Signal::SIGKILL).unwrap();
    let ended = engine.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("SIGKILL") && said.contains("stage `adapter` failed"), "{said}");
    nothing_is_left_alive(&project);
    project.run(&LONG_RUN).ends_with(0);
}

#[test]
fn an_interrupt_ends_the_run_with_130_and_the_next_run_goes_on() {
    let project = Project::with_pipeline("train.yaml");
    let mut engine = project.start(&LONG_RUN);
    the_training(&project);
    kill(Pid::from_raw(engine.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(engine.wait().unwrap().code(), Some(130));
    nothing_is_left_alive(&project);
    project.run(&LONG_RUN).ends_with(0);
}

/// Whether a process is writing the weights of a model, or was when it was killed.
fn is_writing_weights(project: &Project) -> bool {
    let staging = fs::read_dir(project.path(".pipeline/store/staging")).into_iter().flatten().flatten();
    let drafts = staging.filter_map(|entry| fs::read_dir(entry.path().join("outputs/model")).ok());
    let mut names = drafts.flatten().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.any(|name| name.ends_with(".safetensors.partial"))
}

/// A model of which the weights take a while to be written, in several files.
const MERGE: [&str; 7] = [
    "train.yaml",
    "fresh.hidden_size=512",
    "fresh.intermediate_size=2048",
    "fresh.num_hidden_layers=6",
    "adapter.epochs=1",
    "adapter.max_steps=8",
    "merged.max_shard_size=16MB",
];

fn run_until(stage: &str, project: &Project) -> Ran {
    project.run(&[["run", "--until", stage].as_slice(), &MERGE].concat())
}

fn export_merged(project: &Project) -> Ran {
    let [file, overrides @ ..] = MERGE;
    project.run(&[["export", file, "merged", "exported"].as_slice(), &overrides].concat())
}

/// The merged model's files, by name.
fn merged(project: &Project) -> Vec<(String, Vec<u8>)> {
    export_merged(project).ends_with(0);
    let entries = fs::read_dir(project.path("exported")).unwrap().map(|entry| entry.unwrap());
    let file =
        |entry: fs::DirEntry| (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).unwrap());
    let mut files: Vec<_> = entries.map(file).collect();
    files.sort();
    files
}

/// Starts a merge and kills its process, or the engine with it, while the weights are being written; whether it was met
/// in that.
fn kill_while_writing(project: &Project, engine_too: bool) -> bool {
    run_until("adapter", project).ends_with(0);
    let mut engine = project.start(&[["run", "--until", "merged"].as_slice(), &MERGE].concat());
    while !is_writing_weights(project) {
        if engine.try_wait().unwrap().is_some() {
            return false;
        }
        sleep(Duration::from_micros(100));
    }
    let merging = project.processes().into_iter().find(|(_, line)| line.contains("__stage"));
    let mut met = false;
    if let Some((pid, _)) = merging {
        // Held, so that it does not go on between the look and the kill.
        let _ = kill(Pid::from_raw(pid), Signal::SIGSTOP);
        met = is_writing_weights(project);
        if engine_too {
            engine.kill().unwrap();
        }
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    engine.wait().unwrap();
    nothing_is_left_alive(project);
    met
}

#[test]
fn a_merge_killed_while_it_writes_leaves_nothing_that_is_taken_for_whole() {
    let whole = Project::with_pipeline("train.yaml");
    run_until("merged", &whole).ends_with(0);
    let expected = merged(&whole);
    assert!(expected.iter().filter(|(name, _)| name.ends_with(".safetensors")).count() > 3);
    for engine_too in [false, true] {
        let killed = (0..5).find_map(|_| {
            let project = Project::with_pipeline("train.yaml");
            kill_while_writing(&project, engine_too).then_some(project)
        });
        let project = killed.expect("no kill met a merge that was writing");
        let exported = export_merged(&project);
        assert_ne!(exported.code, Some(0), "{exported}");
        project.run(&["cache", "verify"]).ends_with(0);
        run_until("merged", &project).ends_with(0).warns("done: 1 ran, ");
        assert!(!is_writing_weights(&project), "the next run leaves nothing of it");
        project.run(&["cache", "verify"]).ends_with(0);
        assert!(merged(&project) == expected, "the model is another than that of an undisturbed merge");
    }
}
