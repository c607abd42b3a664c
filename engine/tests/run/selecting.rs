//! Parts of a pipeline: from a stage on, some stages alone, and stages that are made again.

use engine::explain::Status;
use engine::plan::{Force, Selection};
use engine::run::{Compared, RunError, RunEvent};
use test_harness::test;

use crate::project::{Project, Ran};

const CHAIN: &str = "
stages:
  a: { uses: constant, with: { value: 4 } }
  b: { uses: half, with: { of: a } }
  c: { uses: sum, with: { of: [b], plus: 1 } }
  d: { uses: constant, with: { value: 9 } }
";

fn only(stages: &[&str]) -> Selection {
    Selection { only: stages.iter().map(|&stage| stage.to_owned()).collect(), ..Selection::default() }
}

fn from(stage: &str) -> Selection {
    Selection { from: vec![stage.to_owned()], ..Selection::default() }
}

fn force(stage: &str) -> Selection {
    Selection { force: Force::Stages(vec![stage.to_owned()]), ..Selection::default() }
}

fn compared(ran: &Ran, stage: &str) -> Option<Compared> {
    ran.events.iter().find_map(|event| match event {
        RunEvent::StageDone { stage: done, compared, .. } if done == stage => compared.clone(),
        _ => None,
    })
}

#[test]
fn what_a_part_reads_must_have_been_made() {
    let mut project = Project::new(CHAIN);
    project.selection = only(&["c", "d"]);
    let missing = |project: &Project| match project.try_run() {
        Err(RunError::Results(missing)) => missing,
        _ => panic!("it must not run"),
    };
    // All that is missing is named, and nothing is made.
    let found = missing(&project);
    assert_eq!(found.iter().map(|missing| missing.stage.as_str()).collect::<Vec<_>>(), ["a", "b"]);
    assert!(found[0].help().contains("--until a` makes it"), "{found:?}");
    assert_eq!(std::fs::read_dir(project.home().runs()).unwrap().count(), 0);
    let statuses: Vec<_> = project.explain().into_iter().map(|forecast| forecast.status).collect();
    assert_eq!(statuses, [Status::Missing, Status::Missing, Status::WillRun, Status::WillRun]);
    project.selection = from("b");
    assert_eq!(missing(&project).len(), 1);
    project.selection = only(&["a", "c"]);
    assert_eq!(missing(&project)[0].stage, "b");
}

#[test]
fn a_result_that_was_made_before_the_last_one_is_taken() {
    let of = |plus: u8| {
        format!(
            "\nstages:\n  a: {{ uses: constant, with: {{ value: 4 }} }}\n  \
             b: {{ uses: sum, with: {{ of: [a], plus: {plus} }} }}\n  c: {{ uses: half, with: {{ of: b }} }}\n"
        )
    };
    let mut project = Project::new(&of(2));
    project.run().succeeded();
    project.write(&of(4));
    project.run().succeeded();
    project.write(&of(2));
    project.selection = Selection { force: Force::Stages(vec!["a".to_owned()]), ..only(&["a", "c"]) };
    // `b` and `c` differ from what was made last, but not from what was made first.
    let statuses: Vec<_> = project.explain().into_iter().map(|forecast| forecast.status).collect();
    assert_eq!(statuses, [Status::WillRun, Status::Unknown, Status::Unknown]);
    assert_eq!(project.run().succeeded().states(), "a done, b cached, c cached");
}

#[test]
fn a_part_is_made_and_nothing_else() {
    let mut project = Project::new(CHAIN);
    project.selection = Selection { until: vec!["b".to_owned()], ..Selection::default() };
    assert_eq!(project.run().succeeded().states(), "a done, b done");
    project.selection = from("b");
    assert_eq!(project.run().succeeded().states(), "a cached, b cached, c done");
    project.selection = only(&["d"]);
    assert_eq!(project.run().succeeded().states(), "d done");
}

#[test]
fn a_forced_stage_is_made_from_its_begin_and_compared() {
    let mut project = Project::new(CHAIN);
    project.run().succeeded();
    project.selection = force("b");
    let forecasts: Vec<_> = project.explain().into_iter().map(|forecast| forecast.status).collect();
    assert_eq!(forecasts, [Status::Cached, Status::WillRun, Status::Unknown, Status::Cached]);
    assert_eq!(project.reasons("b"), ["has a result, and is forced to run"]);
    let ran = project.run().succeeded();
    assert_eq!(ran.states(), "a cached, b done, c cached, d cached");
    assert_eq!((compared(&ran, "b"), ran.why("b")), (Some(Compared::Equal), project.reasons("b")));
    project.selection = Selection { force: Force::Everything, ..Selection::default() };
    assert_eq!(project.run().succeeded().states(), "a done, b done, c done, d done");

    // A stage whose result depends on what it finds: the second process of a run that was cut off passes on a 2.
    let slow = "\nstages:\n  a: { uses: slow, with: { steps: 3, milliseconds: 1 } }\n";
    project.selection = Selection::default();
    project.write(slow);
    project.run().succeeded();
    project.write(&slow.replace("steps: 3", "steps: 5"));
    assert_eq!(project.run().succeeded().number("a"), 2);
    project.selection = force("a");
    let ran = project.run().succeeded();
    assert_eq!((ran.checkpoints(), ran.number("a")), (5, 1), "it did not go on from what was saved");
    assert_eq!(compared(&ran, "a"), Some(Compared::Differs { outputs: vec!["number".to_owned()] }));
    project.selection = Selection::default();
    assert_eq!(project.run().succeeded().number("a"), 1, "the new result is the one that holds");
}
