//! Each cause of a failure, by a real process that has it; what becomes of it; and tries with less memory.

use std::fs;

use engine::error::Cause;
use engine::memory::Memory;
use engine::run::{Conclusion, RunEvent};
use test_harness::test;

use crate::kinds::BATCH_BYTES;
use crate::project::{Project, Ran};

/// `(how a stage fails, its cause, how often it is started with two retries)`.
const CAUSES: [(&str, Cause, usize); 11] = [
    ("data", Cause::BadData, 1),
    ("parameters", Cause::BadParameters, 1),
    ("numeric", Cause::Numeric, 1),
    ("panic", Cause::Internal, 1),
    ("stopped", Cause::Cancelled, 1),
    ("disk", Cause::DiskFull, 1),
    ("network", Cause::Network, 3),
    ("abort", Cause::Crashed, 3),
    ("killed", Cause::Crashed, 3),
    ("device", Cause::DeviceLost, 3),
    ("device_memory", Cause::DeviceOutOfMemory, 3),
];

fn starts(ran: &Ran) -> usize {
    ran.events.iter().filter(|event| matches!(event, RunEvent::StageStarted { .. })).count()
}

fn unlucky(how: &str, retries: &str) -> String {
    format!("\nstages:\n  a: {{ uses: unlucky, with: {{ how: {how} }}, retries: {retries} }}\n")
}

#[test]
fn each_cause_is_known_and_tried_again_by_the_table() {
    for (how, cause, expected) in CAUSES {
        let project = Project::new(&unlucky(how, "{ max: 2, delay: 1ms }"));
        let ran = project.run();
        assert_eq!((ran.failure("a").cause, starts(&ran)), (cause, expected), "{how}");
        // The record says the same.
        let events = fs::read_to_string(ran.outcome.folder.join("events.jsonl")).unwrap();
        let last = events.lines().rfind(|line| line.contains("stage_failed")).unwrap();
        assert!(last.contains(&format!("\"cause\":\"{}\"", cause.name())), "{last}");
    }
}

#[test]
fn a_kill_where_memory_is_full_is_a_lack_of_memory() {
    let mut project = Project::new(&unlucky("killed", "0"));
    // A machine that has less than any process holds.
    fs::write(project.path("meminfo"), "MemTotal: 100 kB\nMemAvailable: 100 kB\n").unwrap();
    project.options.memory = Memory::at(project.folder.path(), project.folder.path());
    let ran = project.run();
    let failure = ran.failure("a");
    assert_eq!(failure.cause, Cause::OutOfMemory);
    assert!(
        failure.messages[0].starts_with("the stage's process was killed since memory ran out: it held"),
        "{failure:?}"
    );
}

const HUNGRY: &str = "\nstages:\n  a: { uses: hungry, with: { batch: 8, accumulation: 2, fits: 2 } }\n";

#[test]
fn a_batch_is_halved_until_it_fits_and_the_key_stays() {
    let project = Project::new(HUNGRY);
    let key = project.explain()[0].key;
    let ran = project.run().succeeded();
    assert_eq!((ran.number("a"), ran.outcome.stages[0].key), (2, key));
    let with: Vec<_> = ran
        .events
        .iter()
        .filter_map(|event| match event {
            RunEvent::StageFailed { failure, retry_with, .. } if failure.cause == Cause::OutOfMemory => {
                Some((failure.messages.clone(), retry_with.clone()))
            }
            _ => None,
        })
        .collect();
    let aborted = |batch: usize| {
        let bytes = batch * BATCH_BYTES;
        vec!["the stage's process died of SIGABRT".to_owned(), format!("memory allocation of {bytes} bytes failed")]
    };
    let expected = [(aborted(8), Some("batch 8 → 4".to_owned())), (aborted(4), Some("batch 4 → 2".to_owned()))];
    assert_eq!(with, expected);
    let record = project.store().result(&key.unwrap()).unwrap().unwrap();
    assert_eq!(record.how["less_memory"], serde_json::json!(["batch 8 → 4", "batch 4 → 2"]));
    // The split is in no key: whoever writes the one that fits finds the result made.
    project.write(&HUNGRY.replace("batch: 8, accumulation: 2", "batch: 2, accumulation: 8"));
    assert_eq!(project.run().succeeded().states(), "a cached");
}

#[test]
fn what_cannot_do_with_less_fails_with_advice() {
    let project = Project::new(&HUNGRY.replace("fits: 2", "fits: 0"));
    let ran = project.run();
    assert_eq!((ran.outcome.conclusion, starts(&ran)), (Conclusion::Failed, 4));
    let failure = ran.failure("a");
    assert_eq!((failure.cause, failure.help.as_deref()), (Cause::OutOfMemory, Some("find a machine with more")));
    // Where it is switched off, the first failure says what could have been done.
    project.write(&HUNGRY.replace("fits: 2 }", "fits: 2 }, retries: { on: [] }"));
    let ran = project.run();
    assert_eq!(starts(&ran), 1);
    assert_eq!(ran.failure("a").help.as_deref(), Some("try it with less memory: batch 8 → 4"));
}

#[test]
fn a_list_of_causes_decides_what_is_tried_again() {
    for (how, expected) in [("disk", 3), ("network", 1)] {
        let project = Project::new(&unlucky(how, "{ max: 2, delay: 1ms, on: [disk_full] }"));
        assert_eq!(starts(&project.run()), expected, "{how}");
    }
}
