//! What `plan` says before anything runs.

use std::fs;

use engine::explain::{Status, explain};
use engine::home::Home;
use test_harness::test;

use crate::kinds::commit;
use crate::project::Project;

const CHAIN: &str = "
stages:
  a: { uses: constant, with: { value: 4 } }
  b: { uses: half, with: { of: a } }
  c: { uses: sum, with: { of: [b], plus: 1 } }
";

fn statuses(project: &Project) -> Vec<Status> {
    project.explain().into_iter().map(|forecast| forecast.status).collect()
}

#[test]
fn a_plan_tells_what_would_run() {
    let project = Project::new(CHAIN);
    assert_eq!(statuses(&project), [Status::WillRun; 3]);
    assert_eq!(project.reasons("a"), ["never ran"]);
    assert_eq!(project.reasons("b"), ["never ran"]);
    project.run().succeeded();
    assert_eq!(statuses(&project), [Status::Cached; 3]);
    assert!(project.reasons("c").is_empty());
    assert_eq!(project.explain()[2].outputs["number"].facts["number"], 3);
}

#[test]
fn a_plan_names_the_field() {
    let project = Project::new(CHAIN);
    project.run().succeeded();
    project.write(&CHAIN.replace("value: 4", "value: 5"));
    assert_eq!(statuses(&project), [Status::WillRun, Status::Unknown, Status::Unknown]);
    assert_eq!(project.reasons("a"), [format!("value 4 → 5 ({}:5:39)", project.file().display())]);
    assert_eq!(project.reasons("b"), ["input a is made first (stays cached if it comes out as it was)"]);
    // 5 / 2 is 4 / 2: what was estimated as unknown turns out as cached.
    assert_eq!(project.run().succeeded().states(), "a done, b done, c cached");
    project.write(&CHAIN.replace("value: 4", "value: 5").replace(", plus: 1", ""));
    // A field that the file leaves out has no place of its own: the mapping that it would be in has.
    assert_eq!(project.reasons("c"), [format!("plus 1 → 0 ({}:7:25)", project.file().display())]);
}

const SUM: &str = "
stages:
  a: { uses: constant, with: { value: 7 } }
  s: { uses: sum, with: { of: [a] } }
";

#[test]
fn a_plan_looks_ahead() {
    let project = Project::new(SUM);
    let sum = project.explain().remove(1);
    // Before anything ran, the figures stand on what the first stage expects of itself.
    assert_eq!(sum.ahead.figures[0].text, "[7]");
    assert_eq!(sum.ahead.problems[0].message, "adds a seven");
    assert!(sum.last_run.is_none());
    project.run().succeeded();
    assert!(project.explain()[1].ahead.figures.is_empty(), "what is cached costs nothing");
    project.write(&SUM.replace("[a]", "[a], plus: 3"));
    let sum = project.explain().remove(1);
    assert_eq!(sum.ahead.figures[0].text, "[7]");
    assert!(sum.last_run.is_some());
}

#[test]
fn what_is_only_expected_is_no_mistake() {
    let project = Project::new(&SUM.replace("value: 7", "value: 13"));
    // The number is expected, and not known: the check that would refuse it waits.
    assert!(project.check().is_empty());
    assert_eq!(project.run().states(), "a done, s failed");
    assert_eq!(project.check()[0].code, "unlucky");
}

#[test]
fn a_plan_names_pins_and_versions() {
    let stages = "\nstages:\n  a: { uses: constant, with: { value: 1, pinned: four } }\n";
    let project = Project::new(stages);
    assert_eq!(project.reasons("a"), ["never ran", "number:four@now is not pinned yet"]);
    project.run().succeeded();
    let lock = fs::read_to_string(project.path("pipeline.lock")).unwrap();
    fs::write(project.path("pipeline.lock"), lock.replace(&commit(4), &commit(5))).unwrap();
    assert_eq!(project.reasons("a"), [format!("pin number:four@now {} → {}", commit(4), commit(5))]);
    fs::write(project.path("pipeline.lock"), lock).unwrap();

    // The next version of this program makes the kind in another way.
    let mut plan = project.plan();
    plan.stages[0].version = 2;
    let reasons = explain(&plan, &project.home()).unwrap().remove(0).reasons;
    assert_eq!(reasons.iter().map(ToString::to_string).collect::<Vec<_>>(), ["version of the stage kind 1 → 2"]);
}

#[test]
fn a_plan_names_the_other_stage() {
    let stages = "
stages:
  a: { uses: constant, with: { value: 4 } }
  b: { uses: constant, with: { value: 9 } }
  c: { uses: half, with: { of: a } }
";
    let project = Project::new(stages);
    project.run().succeeded();
    project.write(&stages.replace("of: a", "of: b"));
    assert_eq!(project.reasons("c"), [format!("of a → b ({}:7:32)", project.file().display())]);
    project.write(&stages.replace("uses: half, with: { of: a }", "uses: sum, with: { of: [a] }"));
    assert_eq!(project.reasons("c"), ["kind half → sum"]);
}

/// Files that went with the field that named them are no reason of their own.
#[test]
fn what_a_stage_no_longer_reads_is_no_reason() {
    let stages = "\nstages:\n  a: { uses: constant, with: { value: 1, pinned: four } }\n";
    let project = Project::new(stages);
    project.run().succeeded();
    project.write(&stages.replace(", pinned: four", ""));
    assert_eq!(project.reasons("a"), [format!("pinned four → none ({}:5:30)", project.file().display())]);
}

#[test]
fn a_plan_makes_nothing() {
    let project = Project::new(CHAIN);
    let home = Home::at(&project.file(), None);
    let forecasts = explain(&project.plan(), &home).unwrap();
    assert!(forecasts.iter().all(|forecast| forecast.reasons[0].to_string() == "never ran"));
    assert!(!home.root().exists());
    project.run().succeeded();
    // As it is where nothing can be written: the index cannot be opened, and the run folders tell the same.
    fs::remove_file(home.index()).unwrap();
    fs::create_dir(home.index()).unwrap();
    project.write(&CHAIN.replace("value: 4", "value: 9"));
    let forecasts = explain(&project.plan(), &home).unwrap();
    assert!(forecasts[0].reasons[0].to_string().starts_with("value 4 → 9"));
}
