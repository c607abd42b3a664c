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
        assert!(began.elapsed() < Duration::from_secs(10), "still alive: {:?}", project.processes());
        sleep(Duration::from_millis(20));
    }
}

/// Waits for a stage process of the project to appear.
#[track_caller]
fn a_stage_process(project: &Project) -> Pid {
    let began = Instant::now();
    loop {
        if let Some((pid, _)) = project.processes().iter().find(|(_, line)| line.contains("__stage")) {
            return Pid::from_raw(*pid);
        }
        assert!(began.elapsed() < Duration::from_secs(20), "no stage was started");
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
    let project = Project::with_pipeline("data.yaml");
    let engine = project.start(&["run", "data.yaml"]);
    // A stage may end between being found and being killed; then the next one is taken.
    while kill(a_stage_process(&project), Signal::SIGKILL).is_err() {}
    let ended = engine.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("SIGKILL"), "{said}");
    nothing_is_left_alive(&project);
    project.run(&["run", "data.yaml"]).ends_with(0);
}

#[test]
fn an_interrupt_ends_the_run_with_130_and_the_next_run_goes_on() {
    let project = Project::with_pipeline("data.yaml");
    let mut engine = project.start(&["run", "data.yaml"]);
    a_stage_process(&project);
    kill(Pid::from_raw(engine.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(engine.wait().unwrap().code(), Some(130));
    nothing_is_left_alive(&project);
    project.run(&["run", "data.yaml"]).ends_with(0);
}
