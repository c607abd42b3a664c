//! What runs at the same time, what waits for room, and what is started first.

use std::fs;

use engine::error::Cause;
use engine::memory::Memory;
use engine::protocol::WorkerEvent;
use engine::run::{RunError, RunEvent, WaitsFor};
use test_harness::test;

use crate::project::{Project, Ran};

const THREE: &str = "
slots: { license: 2 }
stages:
  a: { uses: slow, with: { steps: 2, label: a }, resources: { slots: { license: 1 }, memory: 60MB } }
  b: { uses: slow, with: { steps: 2, label: b }, resources: { slots: { license: 1 }, memory: 60MB } }
  c: { uses: slow, with: { steps: 2, label: c }, resources: { slots: { license: 2 }, memory: 60MB } }
";

/// The most stages that ran at once.
fn most_at_once(ran: &Ran) -> i32 {
    let mut running = 0;
    let changes = ran.events.iter().map(|event| {
        running += match event {
            RunEvent::StageStarted { .. } => 1,
            RunEvent::StageDone { .. } => -1,
            _ => 0,
        };
        running
    });
    changes.max().unwrap()
}

/// What each stage waited for, in the order in which it was said.
fn waits(ran: &Ran) -> Vec<(String, WaitsFor)> {
    let waits = ran.events.iter().filter_map(|event| match event {
        RunEvent::StageWaiting { stage, waits_for } => Some((stage.clone(), waits_for.clone())),
        _ => None,
    });
    waits.collect()
}

/// A project on a machine with many cores and this much memory, none of which anybody holds.
fn project(stages: &str, total_kb: u64) -> Project {
    let mut project = Project::new(stages);
    project.options.threads = Some(8);
    let meminfo = format!("MemTotal: {total_kb} kB\nMemAvailable: {total_kb} kB\n");
    fs::write(project.path("meminfo"), meminfo).unwrap();
    project.options.memory = Memory::at(project.folder.path(), project.folder.path());
    project
}

#[test]
fn no_more_stages_run_than_there_are_jobs() {
    let mut project = project(THREE, 1 << 20);
    project.options.jobs = Some(1);
    let ran = project.run().succeeded();
    assert_eq!(most_at_once(&ran), 1);
    let jobs = |stage: &str| (stage.to_owned(), WaitsFor::Jobs { most: 1 });
    assert_eq!(waits(&ran), [jobs("b"), jobs("c")]);
}

#[test]
fn slots_are_taken_while_a_stage_runs() {
    let ran = project(THREE, 1 << 20).run().succeeded();
    assert_eq!(most_at_once(&ran), 2);
    assert_eq!(waits(&ran), [("c".to_owned(), WaitsFor::Slots { name: "license".to_owned(), wanted: 2, free: 0 })]);
}

#[test]
fn memory_is_promised_to_one_stage_at_a_time() {
    // Room for one of 60 MB, and not for two, though the first does not hold what it was promised.
    let ran = project(THREE, 100_000).run().succeeded();
    assert_eq!(most_at_once(&ran), 1);
    let free_bytes = 102_400_000 - 60_000_000;
    assert_eq!(
        waits(&ran)[0],
        ("b".to_owned(), WaitsFor::Memory { wanted_bytes: 60_000_000, free_bytes, estimated: false })
    );
}

#[test]
fn estimated_memory_is_promised_too() {
    let stages = "
stages:
  a: { uses: slow, with: { steps: 2, label: a, estimate: 60MB } }
  b: { uses: slow, with: { steps: 2, label: b, estimate: 60MB } }
";
    let ran = project(stages, 100_000).run().succeeded();
    assert_eq!(most_at_once(&ran), 1);
    let free_bytes = 102_400_000 - 60_000_000;
    let waits_for = WaitsFor::Memory { wanted_bytes: 60_000_000, free_bytes, estimated: true };
    assert_eq!(waits(&ran)[0], ("b".to_owned(), waits_for));
}

#[test]
fn an_estimate_is_believed_as_far_as_it_is_sure() {
    let stages = "
stages:
  a: { uses: slow, with: { steps: 1, estimate: 110MB } }
";
    // Of 110 MB, which may be 93.5, there are 102.4: it is tried.
    let ran = project(stages, 100_000).run().succeeded();
    assert_eq!(waits(&ran), []);
    let warned = ran.events.iter().find_map(|event| match event {
        RunEvent::Worker { said: WorkerEvent::Warning { message }, .. } => Some(message.as_str()),
        _ => None,
    });
    let expected = "it is estimated to take 105 MiB ± 15 % of memory, and 98 MiB are free: it may not fit";
    assert_eq!(warned, Some(expected));

    let larger = project(&stages.replace("110MB", "130MB"), 100_000);
    let ran = larger.run();
    let failure = ran.failure("a");
    assert_eq!(failure.cause, Cause::OutOfMemory);
    assert_eq!(failure.messages[0], "it is estimated to take 124 MiB ± 15 % of memory, and this machine has 98 MiB");
    // Who knows better says so.
    larger.write(&stages.replace("110MB } }", "130MB }, resources: { memory: 20MB } }"));
    assert_eq!(waits(&larger.run().succeeded()), []);
}

#[test]
fn what_can_never_fit_is_refused_before_anything_runs() {
    let too_small = project(THREE, 50_000);
    let Err(RunError::Memory(missing)) = too_small.try_run() else { panic!("it must not run") };
    assert_eq!(missing.len(), 3);
    let message = "stage `a` requests 57 MiB of memory, and this machine has 49 MiB";
    assert_eq!(missing[0].to_string(), message);
    assert_eq!(fs::read_dir(too_small.home().runs()).unwrap().count(), 0);
    // A result that was made on a larger machine serves here.
    let meminfo = too_small.path("meminfo");
    let small = fs::read_to_string(&meminfo).unwrap();
    fs::write(&meminfo, small.replace("50000", "500000")).unwrap();
    too_small.run().succeeded();
    fs::write(&meminfo, small).unwrap();
    assert_eq!(too_small.run().succeeded().outcome.counts.cached, 3);
}

#[test]
fn the_longest_chain_is_started_first() {
    let mut project = Project::new(
        "
stages:
  alone: { uses: constant, with: { value: 1 } }
  first: { uses: constant, with: { value: 2 } }
  second: { uses: sum, with: { of: [first] } }
  third: { uses: sum, with: { of: [second], plus: 1 } }
  other: { uses: sum, with: { of: [alone], plus: 2 } }
",
    );
    project.options.jobs = Some(1);
    let ran = project.run().succeeded();
    let started = ran.events.iter().filter_map(|event| match event {
        RunEvent::StageStarted { stage, .. } => Some(stage.as_str()),
        _ => None,
    });
    assert_eq!(started.collect::<Vec<_>>(), ["first", "alone", "second", "third", "other"]);
}
