//! Many at once on one home: runs of one file, and a collector that removes all it may.

use std::fs;
use std::process::Child;
use std::time::{Duration, SystemTime};

use test_harness::test;

use crate::support::Project;

const STAGES: u64 = 7;

fn start(project: &Project, count: usize) -> Vec<Child> {
    (0..count).map(|_| project.start(&["run", "data.yaml", "-q"])).collect()
}

/// Waits for runs that have to succeed.
#[track_caller]
fn succeed(runs: Vec<Child>) {
    for run in runs {
        let ended = run.wait_with_output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    }
}

#[test]
fn eight_runs_at_once_make_each_result_once() {
    let project = Project::with_pipeline("data.yaml");
    succeed(start(&project, 8));
    let runs = project.run(&["runs", "ls", "--format", "json"]).ends_with(0).json();
    let runs = runs.as_array().unwrap();
    let sum = |count: &str| runs.iter().map(|run| run["counts"][count].as_u64().unwrap()).sum::<u64>();
    assert_eq!((runs.len(), sum("done"), sum("cached")), (8, STAGES, 7 * STAGES), "{runs:#?}");
    project.run(&["cache", "verify"]).ends_with(0);
}

/// Before each round everything is as if nobody had used it for a day, so that collectors and runs race for every
/// result.
#[test]
fn a_collector_in_a_loop_fails_no_run_and_takes_nothing_in_use() {
    const GC: [&str; 6] = ["cache", "gc", "--older-than", "1h", "--format", "json"];
    let project = Project::with_pipeline("data.yaml");
    project.run(&["run", "data.yaml"]).ends_with(0);
    let mut removed = 0;
    for round in 0..4 {
        for entry in fs::read_dir(project.path(".pipeline/store/results")).unwrap() {
            let record = fs::File::options().write(true).open(entry.unwrap().path()).unwrap();
            record.set_modified(SystemTime::now() - Duration::from_secs(24 * 3600)).unwrap();
        }
        // In every second round the collector is through before a run comes.
        let mut first = project.start(&GC);
        if round % 2 == 0 {
            first.wait().unwrap();
        }
        let mut runs = start(&project, 3);
        while runs.iter_mut().any(|run| run.try_wait().unwrap().is_none()) {
            removed += count(&project.run(&GC).ends_with(0).stdout);
        }
        let first = first.wait_with_output().unwrap();
        assert!(first.status.success(), "{}", String::from_utf8_lossy(&first.stderr));
        removed += count(&String::from_utf8(first.stdout).unwrap());
        succeed(runs);
        project.run(&["run", "data.yaml", "--format", "json"]).ends_with(0).made(0);
        project.run(&["cache", "verify"]).ends_with(0);
    }
    println!("{removed} results were removed");
    assert!(removed >= STAGES as usize, "the collector removed nothing");
    for entry in fs::read_dir(project.path(".pipeline/runs")).unwrap() {
        let events = fs::read_to_string(entry.unwrap().path().join("events.jsonl")).unwrap();
        assert!(!events.contains("stage_healing"), "a run lost something that it used: {events}");
    }
}

/// How many results a collector says that it removed.
fn count(told: &str) -> usize {
    let told: serde_json::Value = serde_json::from_str(told).unwrap();
    told["results"].as_array().unwrap().len()
}
