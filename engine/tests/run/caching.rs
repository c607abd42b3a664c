//! What is cached, and what runs again.

use std::fs;
use std::time::{Duration, Instant};

use engine::run::RunEvent;
use test_harness::test;

use crate::kinds::commit;
use crate::project::{GRACE, Project};

/// a and b feed c, which feeds d; e is alone.
const DIAMOND: &str = "
stages:
  a: { uses: constant, with: { value: 7 } }
  b: { uses: constant, with: { value: 1 } }
  c: { uses: sum, with: { of: [a, b] } }
  d: { uses: half, with: { of: c } }
  e: { uses: constant, with: { value: 5 } }
";

#[test]
fn a_second_run_does_nothing() {
    let project = Project::new(DIAMOND);
    let first = project.run().succeeded();
    assert_eq!(first.states(), "a done, b done, c done, d done, e done");
    assert_eq!((first.number("c"), first.number("d")), (8, 4));
    let second = project.run().succeeded();
    assert_eq!(second.states(), "a cached, b cached, c cached, d cached, e cached");
    assert_eq!(second.number("d"), 4);
    assert!(!second.events.iter().any(|event| matches!(event, RunEvent::StageStarted { .. })));
}

#[test]
fn a_finished_pipeline_is_checked_fast() {
    let mut stages = String::from("\nstages:\n  s0: { uses: constant, with: { value: 1 } }\n");
    for stage in 1..10 {
        stages += &format!("  s{stage}: {{ uses: sum, with: {{ of: [s{}], plus: {stage} }} }}\n", stage - 1);
    }
    let project = Project::new(&stages);
    project.run().succeeded();
    let fastest = (0..10).map(|_| {
        let started = Instant::now();
        assert_eq!(project.run().succeeded().outcome.counts.cached, 10);
        started.elapsed()
    });
    let fastest = fastest.min().unwrap();
    println!("    ten finished stages: {fastest:?}");
    assert!(fastest < Duration::from_millis(50), "{fastest:?}");
}

#[test]
fn a_parameter_reruns_exactly_what_is_downstream() {
    let project = Project::new(DIAMOND);
    project.run().succeeded();
    project.write(&DIAMOND.replace("value: 1 ", "value: 3 "));
    let ran = project.run().succeeded();
    assert_eq!(ran.states(), "a cached, b done, c done, d done, e cached");
    assert_eq!(ran.number("d"), 5);
    assert_eq!(ran.why("b"), [format!("value 1 → 3 ({}:6:39)", project.file().display())]);
    assert_eq!(ran.why("c"), ["input b changed (number.txt)"]);
    // And back: the old results are still there.
    project.write(DIAMOND);
    assert_eq!(project.run().succeeded().outcome.counts.cached, 5);
}

#[test]
fn an_equal_result_cuts_the_rerun_off() {
    let stages = "
stages:
  a: { uses: constant, with: { value: 6 } }
  b: { uses: half, with: { of: a } }
  c: { uses: sum, with: { of: [b], plus: 1 } }
";
    let project = Project::new(stages);
    project.run().succeeded();
    project.write(&stages.replace("value: 6", "value: 7"));
    assert_eq!(project.run().succeeded().states(), "a done, b done, c cached");
}

#[test]
fn cosmetic_parameters_and_names_rerun_nothing() {
    let project = Project::new(DIAMOND);
    project.run().succeeded();
    let renamed = DIAMOND.replace("value: 7", "value: 7, note: seven").replace("  d:", "  renamed:");
    project.write(&renamed);
    assert_eq!(project.run().succeeded().outcome.counts.cached, 5);
}

#[test]
fn source_files_count_by_content() {
    let project = Project::new("\nstages:\n  a: { uses: read_number, with: { source: data/*.txt } }\n");
    fs::create_dir(project.path("data")).unwrap();
    fs::write(project.path("data/one.txt"), "1").unwrap();
    fs::write(project.path("data/two.txt"), "2").unwrap();
    assert_eq!(project.run().succeeded().number("a"), 3);
    // Written again with the same content: hashed again, and found equal.
    fs::write(project.path("data/two.txt"), "2").unwrap();
    assert_eq!(project.run().succeeded().states(), "a cached");
    fs::write(project.path("data/two.txt"), "5").unwrap();
    let ran = project.run().succeeded();
    assert_eq!((ran.states().as_str(), ran.number("a")), ("a done", 6));
    assert_eq!(ran.why("a"), [format!("source file changed: two.txt ({}:5:43)", project.file().display())]);
    // The folder's name is in no key.
    fs::rename(project.path("data"), project.path("moved")).unwrap();
    project.write("\nstages:\n  a: { uses: read_number, with: { source: moved/*.txt } }\n");
    assert_eq!(project.run().succeeded().states(), "a cached");
}

#[test]
fn pins_are_made_once_and_kept() {
    let mut project = Project::new("\nstages:\n  a: { uses: constant, with: { pinned: three } }\n");
    assert_eq!(project.reasons("a"), ["never ran", "number:three@now is not pinned yet"]);
    project.options.pinning = engine::lock_file::Pinning::Locked;
    let error = project.try_run().err().unwrap().to_string();
    assert!(error.contains("`number:three@now`") && error.contains("--locked"), "{error}");
    project.options.pinning = engine::lock_file::Pinning::Resolve;
    assert_eq!(project.run().succeeded().number("a"), 5);
    let text = fs::read_to_string(project.path("pipeline.lock")).unwrap();
    let body = text.split_once('\n').unwrap().1;
    let (five, six) = (commit(5), commit(6));
    assert_eq!(body, format!("version: 2\npins:\n  \"number:three@now\":\n    commit: \"{five}\"\n"));
    fs::write(project.path("pipeline.lock"), text.replace(&five, &six)).unwrap();
    let ran = project.run().succeeded();
    assert_eq!((ran.number("a"), ran.why("a")), (6, vec![format!("pin number:three@now {five} → {six}")]));
}

#[test]
fn what_another_run_pins_meanwhile_is_kept() {
    let project = Project::new("");
    let lock_file = project.path("pipeline.lock");
    let name = lock_file.display();
    project.write(&format!("\nstages:\n  a: {{ uses: constant, with: {{ pinned: {name} }} }}\n"));
    assert_eq!(project.run().succeeded().number("a"), 1);
    let text = fs::read_to_string(&lock_file).unwrap();
    assert!(text.contains(&format!("\"number:other@now\":\n    commit: \"{}\"", commit(9))), "{text}");
    assert!(text.contains(&format!("pipeline.lock@now\":\n    commit: \"{}\"", commit(1))), "{text}");
}

#[test]
fn two_runs_at_once_make_each_result_once() {
    let project = Project::new(
        "
stages:
  a: { uses: slow, with: { steps: 6, milliseconds: 50 } }
  b: { uses: slow, with: { after: a, steps: 6, milliseconds: 51 } }
  c: { uses: sum, with: { of: [a, b] } }
",
    );
    let mut other = project.spawn_engine(GRACE);
    let ran = project.run().succeeded();
    assert!(other.wait().unwrap().success());
    // Each result has one producer in the records of all runs.
    let history = engine::history::History::open(&project.home()).unwrap();
    let runs = history.runs().unwrap();
    assert_eq!(runs.len(), 2);
    assert_eq!(runs.iter().map(|run| run.counts.done).sum::<usize>(), 3, "{runs:#?}");
    assert_eq!(runs.iter().map(|run| run.counts.cached).sum::<usize>(), 3, "{runs:#?}");
    assert_eq!(ran.number("c"), 2);
}

#[test]
fn raising_a_resumable_parameter_goes_on() {
    let stages = "\nstages:\n  a: { uses: slow, with: { steps: 2, milliseconds: 1 } }\n";
    let project = Project::new(stages);
    assert_eq!(project.run().succeeded().checkpoints(), 2);
    project.write(&stages.replace("steps: 2", "steps: 5"));
    assert_eq!(project.reasons("a")[1], "continues from step 2 of 5");
    let ran = project.run().succeeded();
    assert_eq!((ran.checkpoints(), ran.number("a")), (3, 2));
}
