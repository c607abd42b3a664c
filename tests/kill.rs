//! `kill -9` at any moment: nothing stays alive, and the next plain run succeeds.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use support::Project;

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
        project.run(&["run", "data.yaml"]).ends_with(0).warns("nothing to do");
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
