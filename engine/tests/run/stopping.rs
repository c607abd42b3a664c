//! Runs that are stopped or killed, and the runs after them.

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use engine::history::{History, References, RunLookup, RunState};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use test_harness::test;

use crate::project::{GRACE, Project, wait_for};

const LONG: &str = "
stages:
  a: { uses: slow, with: { steps: 40, milliseconds: 50, child: true } }
  b: { uses: sum, with: { of: [a] } }
";

/// Far more than anything here takes, even where two cores run all tests of a machine at once.
const LIMIT: Duration = Duration::from_secs(60);

/// Starts an engine and waits until a stage runs and something was saved, by it or by one before.
fn started(project: &Project) -> (Child, Vec<i32>) {
    started_with_grace(project, GRACE)
}

fn started_with_grace(project: &Project, grace: Duration) -> (Child, Vec<i32>) {
    let engine = project.spawn_engine(grace);
    let partial = project.home().store().join("partial");
    wait_for("working state", LIMIT, || {
        fs::read_dir(&partial)
            .is_ok_and(|mut keys| keys.any(|key| key.is_ok_and(|key| key.path().join("state").exists())))
    });
    wait_for("the stage", LIMIT, || !project.stage_processes().is_empty());
    (engine, project.stage_processes())
}

fn send(process: i32, signal: Signal) {
    kill(Pid::from_raw(process), signal).unwrap();
}

#[test]
fn a_killed_engine_takes_its_stages_with_it() {
    let project = Project::new(LONG);
    for _ in 0..3 {
        let (mut engine, groups) = started(&project);
        assert!(Project::alive_in_groups(&groups) > 0);
        engine.kill().unwrap();
        engine.wait().unwrap();
        let killed = Instant::now();
        wait_for("the end of every child", LIMIT, || Project::alive_in_groups(&groups) == 0);
        println!("    children gone after {:?}", killed.elapsed());
    }
    let history = History::open(&project.home()).unwrap();
    assert!(history.runs().unwrap().iter().all(|run| run.state == RunState::CutOff));
    let ran = project.run().succeeded();
    assert_eq!(ran.states(), "a done, b done");
    assert!(ran.why("a")[0].starts_with("continues from step "), "{:?}", ran.why("a"));
    assert!(ran.checkpoints() < 40, "it went on from where it was cut off");
}

#[test]
fn killed_at_any_moment_the_next_run_succeeds() {
    let stages = "
stages:
  a: { uses: constant, with: { value: 1 } }
  b: { uses: sum, with: { of: [a], plus: 1 } }
  c: { uses: sum, with: { of: [b], plus: 1 } }
  d: { uses: sum, with: { of: [c], plus: 1 } }
publish: { d: ./out }
";
    for milliseconds in (0..120).step_by(8) {
        let project = Project::new(stages);
        let mut engine = project.spawn_engine(GRACE);
        std::thread::sleep(Duration::from_millis(milliseconds));
        engine.kill().unwrap();
        engine.wait().unwrap();
        let ran = project.run().succeeded();
        assert_eq!(fs::read_to_string(project.path("out/number.txt")).unwrap(), "4");
        assert_eq!(ran.number("d"), 4);
        assert_eq!(project.store().verify(&|_| {}).unwrap().faults, []);
    }
}

#[test]
fn ctrl_c_lets_stages_save() {
    let project = Project::new(LONG);
    let (mut engine, groups) = started(&project);
    send(engine.id().cast_signed(), Signal::SIGINT);
    assert_eq!(engine.wait().unwrap().code(), Some(130));
    assert_eq!(Project::alive_in_groups(&groups), 0, "what the stage had started is gone too");
    let history = History::open(&project.home()).unwrap();
    assert_eq!(history.runs().unwrap()[0].state, RunState::Interrupted);
    assert!(project.run().succeeded().checkpoints() < 40);
}

#[test]
fn a_second_ctrl_c_kills() {
    let project = Project::new(&LONG.replace("steps: 40", "steps: 4000, stubborn: true"));
    let (mut engine, groups) = started_with_grace(&project, Duration::from_secs(120));
    send(engine.id().cast_signed(), Signal::SIGINT);
    std::thread::sleep(Duration::from_millis(300));
    assert!(engine.try_wait().unwrap().is_none(), "a stubborn stage is given time");
    let second = Instant::now();
    send(engine.id().cast_signed(), Signal::SIGINT);
    assert_eq!(engine.wait().unwrap().code(), Some(130));
    assert!(second.elapsed() < Duration::from_secs(60), "it did not wait for the grace: {:?}", second.elapsed());
    assert_eq!(Project::alive_in_groups(&groups), 0);
}

#[test]
fn ctrl_c_before_the_first_stage_leaves_no_run() {
    let project = Project::new("\nstages:\n  a: { uses: constant, with: { pinned: slow } }\n");
    let mut engine = project.spawn_engine(GRACE);
    // The store is opened before the server is asked, which here does not answer.
    let store = project.path(".pipeline/store/locks");
    wait_for("the store", LIMIT, || store.exists());
    std::thread::sleep(Duration::from_millis(100));
    let asked = Instant::now();
    send(engine.id().cast_signed(), Signal::SIGINT);
    assert_eq!(engine.wait().unwrap().code(), Some(130));
    assert!(asked.elapsed() < Duration::from_secs(30), "it did not wait for the server: {:?}", asked.elapsed());
    assert_eq!(History::open(&project.home()).unwrap().runs().unwrap(), []);
    assert!(!project.path("pipeline.lock").exists());
}

#[test]
fn a_killed_stage_is_a_crash() {
    let project = Project::new("\nstages:\n  a: { uses: slow, with: { steps: 100 } }\n");
    let ran = std::thread::scope(|scope| {
        let run = scope.spawn(|| project.run());
        wait_for("the stage", LIMIT, || !project.stage_processes().is_empty());
        project.stage_processes().into_iter().for_each(|process| send(process, Signal::SIGKILL));
        run.join().unwrap()
    });
    let failure = ran.failure("a");
    assert_eq!(failure.cause, engine::error::Cause::Crashed);
    assert_eq!(failure.messages, ["the stage's process was killed (SIGKILL)"]);
    assert!(failure.help.as_deref().unwrap().contains("there is no sign that memory ran out"));
}

#[test]
fn the_index_is_made_again() {
    let project = Project::new("\nstages:\n  a: { uses: constant, with: { value: 1 } }\n");
    project.run().succeeded();
    project.run().succeeded();
    let before = History::open(&project.home()).unwrap().runs().unwrap();
    assert_eq!(before.len(), 2);
    let index = project.home().index();
    let sound = fs::read(&index).unwrap();
    let damages: [&dyn Fn(); 4] = [
        &|| fs::remove_file(&index).unwrap(),
        &|| fs::write(&index, "this is no database, and long enough to be taken for one".repeat(40)).unwrap(),
        // The first page alone: it opens, and fails when it is read.
        &|| fs::write(&index, [&sound[..4096], &[7; 4096 * 4][..]].concat()).unwrap(),
        &|| fs::write(&index, &sound[..sound.len() / 2]).unwrap(),
    ];
    for (number, damage) in damages.into_iter().enumerate() {
        damage();
        assert_eq!(History::open(&project.home()).unwrap().runs().unwrap(), before, "damage {number}");
    }
    let stages = History::open(&project.home()).unwrap().stages(&before[1].run).unwrap();
    assert_eq!((stages[0].stage.as_str(), stages[0].status.as_str()), ("a", "done"));
    assert!(stages[0].peak_memory_bytes.unwrap() > 1 << 20);
}

#[test]
fn the_newest_run_is_the_one_recorded_last_also_where_the_clock_was_set_back() {
    let project = Project::new("");
    let run = |value: u8| {
        project.write(&format!("\nstages:\n  a: {{ uses: constant, with: {{ value: {value} }} }}\n"));
        project.run().succeeded().outcome
    };
    let first = run(1);
    // As it is recorded while the clock is years ahead.
    let ahead = "20990101-000000-000-0000";
    let plan = fs::read_to_string(first.folder.join("run.json")).unwrap();
    fs::write(first.folder.join("run.json"), plan.replace(&first.run, ahead)).unwrap();
    fs::rename(&first.folder, project.home().run(ahead)).unwrap();
    let (second, last) = (run(2), run(3));
    let history = History::open(&project.home()).unwrap();
    assert_eq!(history.ids().unwrap(), [ahead, &second.run, &last.run]);
    let Ok(RunLookup::Run(latest)) = history.find("latest") else { panic!("there are runs") };
    assert_eq!(latest.run, last.run);
    assert!(latest.started.as_str() < "2099", "its time is that of the clock: {}", latest.started);
    // What a clean-up keeps that is to keep one run.
    let kept = References::read(&history).unwrap().of_newest_runs(1);
    assert_eq!(kept.into_iter().collect::<Vec<_>>(), [last.stages[0].key.unwrap()]);
}

#[test]
fn runs_may_be_removed() {
    let project = Project::new("\nstages:\n  a: { uses: constant, with: { value: 1 } }\n");
    project.run().succeeded();
    fs::remove_dir_all(project.home().runs()).unwrap();
    assert_eq!(History::open(&project.home()).unwrap().runs().unwrap(), []);
    assert_eq!(project.run().succeeded().states(), "a cached");
}
