//! Stages that fail, and what becomes of the others.

use std::fs;
use std::time::{Duration, Instant};

use engine::error::Cause;
use engine::run::{Conclusion, OnFailure, RunEvent};
use test_harness::test;

use crate::project::Project;

const BRANCHES: &str = "
stages:
  bad: { uses: unlucky, with: { how: data } }
  after_bad: { uses: sum, with: { of: [bad] } }
  good: { uses: slow, with: { steps: 2 } }
  after_good: { uses: sum, with: { of: [good] } }
";

#[test]
fn a_failure_stops_what_has_not_begun() {
    let mut project = Project::new(BRANCHES);
    project.options.threads = Some(2);
    let ran = project.run();
    assert_eq!(ran.outcome.conclusion, Conclusion::Failed);
    // `good` had begun and goes on to its end; nothing else is started.
    assert_eq!(ran.states(), "bad failed, after_bad skipped, good done, after_good skipped");
    let failure = ran.failure("bad");
    assert_eq!((failure.cause, failure.messages.as_slice()), (Cause::BadData, &["the data is bad".to_owned()][..]));
    assert_eq!(failure.help.as_deref(), Some("use better data"));
}

#[test]
fn keep_going_runs_the_other_branches() {
    let mut project = Project::new(BRANCHES);
    project.options.on_failure = OnFailure::KeepGoing;
    let ran = project.run();
    assert_eq!(ran.outcome.conclusion, Conclusion::Failed);
    assert_eq!(ran.states(), "bad failed, after_bad skipped, good done, after_good done");
}

#[test]
fn only_causes_that_may_pass_are_tried_again() {
    let project = Project::new(
        "\nstages:\n  a: { uses: unlucky, with: { how: network, times: 2 }, retries: { max: 2, delay: 20ms } }\n",
    );
    let ran = project.run().succeeded();
    assert_eq!(ran.number("a"), 3);
    let failures: Vec<_> = ran
        .events
        .iter()
        .filter_map(|event| match event {
            RunEvent::StageFailed { failure, retry_in_seconds, .. } => {
                Some((failure.messages.clone(), *retry_in_seconds))
            }
            _ => None,
        })
        .collect();
    let messages = vec!["the server is away".to_owned(), "connection refused".to_owned()];
    assert_eq!(failures, [(messages.clone(), Some(0.02)), (messages, Some(0.04))]);

    project.write(
        "\nstages:\n  a: { uses: unlucky, with: { how: network, times: 50 }, retries: { max: 1, delay: 20ms } }\n",
    );
    assert_eq!(project.run().states(), "a failed");

    project.write("\nstages:\n  a: { uses: unlucky, with: { how: data, times: 1 }, retries: 5 }\n");
    let ran = project.run();
    assert_eq!(ran.states(), "a failed");
    let tries = ran.events.iter().filter(|event| matches!(event, RunEvent::StageStarted { .. })).count();
    assert_eq!(tries, 1);
}

#[test]
fn crashes_and_panics_are_told_apart() {
    let cases = [
        ("panic", Cause::Internal, "the stage panicked: this should not happen"),
        ("abort", Cause::Crashed, "the stage's process died of SIGABRT"),
        ("silence", Cause::Crashed, "the stage's process exited with 0 and gave no result"),
    ];
    for (how, cause, message) in cases {
        let project = Project::new(&format!("\nstages:\n  a: {{ uses: unlucky, with: {{ how: {how} }} }}\n"));
        let ran = project.run();
        let failure = ran.failure("a");
        assert_eq!((failure.cause, failure.messages[0].as_str()), (cause, message));
    }
}

#[test]
fn stray_output_goes_to_the_log() {
    let project = Project::new("\nstages:\n  a: { uses: unlucky, with: { how: noise } }\n");
    let ran = project.run().succeeded();
    let log = fs::read_to_string(ran.outcome.folder.join("a/log")).unwrap();
    assert!(log.contains("a library prints this\n") && log.contains("and this\n"), "{log:?}");
}

#[test]
fn a_timeout_ends_a_stage() {
    let mut project = Project::new("\nstages:\n  a: { uses: slow, with: { steps: 5000 }, timeout: 1s }\n");
    project.options.grace = Duration::from_secs(120);
    let started = Instant::now();
    let ran = project.run();
    assert_eq!(ran.failure("a").cause, Cause::Timeout);
    assert!(started.elapsed() < Duration::from_secs(60), "it handles the request to stop: {:?}", started.elapsed());
}

#[test]
fn a_timeout_kills_a_stubborn_stage() {
    let project = Project::new("\nstages:\n  a: { uses: slow, with: { steps: 5000, stubborn: true }, timeout: 1s }\n");
    let started = Instant::now();
    let ran = project.run();
    assert_eq!(ran.failure("a").cause, Cause::Timeout);
    let took = started.elapsed();
    assert!(took >= Duration::from_secs(2) && took < Duration::from_secs(60), "timeout and grace: {took:?}");
}

#[test]
fn facts_of_made_inputs_are_checked() {
    let project = Project::new(
        "
stages:
  a: { uses: constant, with: { value: 13 } }
  b: { uses: sum, with: { of: [a] } }
",
    );
    let ran = project.run();
    assert_eq!(ran.states(), "a done, b failed");
    let failure = ran.failure("b");
    assert_eq!(failure.cause, Cause::BadParameters);
    assert!(failure.messages[0].starts_with("13 must not be added"), "{failure:?}");
    assert!(!ran.events.iter().any(|event| matches!(event, RunEvent::StageStarted { stage, .. } if stage == "b")));
}

#[test]
fn missing_files_are_found_before_anything_runs() {
    let project = Project::new(
        "
stages:
  a: { uses: read_number, with: { source: none.txt } }
  b: { uses: read_number, with: { source: 'none/*.txt' } }
",
    );
    let Err(engine::run::RunError::Rejected(problems)) = project.try_run() else { panic!("it must not run") };
    let messages: Vec<_> = problems.iter().map(|problem| (problem.code, problem.message.as_str())).collect();
    let expected = [("file-missing", "there is no file `none.txt`"), ("file-missing", "no file matches `none/*.txt`")];
    assert_eq!(messages, expected);
    assert_eq!(engine::checks::check(&project.plan(), None, None).into_problems(), problems);
    assert_eq!(fs::read_dir(project.home().runs()).unwrap().count(), 0);
}

#[test]
fn missing_devices_are_found_before_anything_runs() {
    let stages = "
stages:
  a: { uses: constant, with: { value: 1 } }
  b: { uses: sum, with: { of: [a] }, resources: { device: npu } }
";
    let project = Project::new(stages);
    let Err(engine::run::RunError::Devices(missing)) = project.try_run() else { panic!("it must not run") };
    assert_eq!(missing[0].to_string(), "stage `b` requests an NPU (Ascend), and `sum` computes on the CPU");
    assert_eq!(missing[0].help(), "to run it on the CPU add `b.resources.device=cpu` to the command");
    // A result made on the CPU serves: the device is in no key.
    project.write(&stages.replace("npu", "cpu"));
    project.run().succeeded();
    project.write(stages);
    assert_eq!(project.run().succeeded().outcome.counts.cached, 2);
}
