//! What `plan` says before anything runs.

use engine::explain::Forecast;

use crate::project::Project;

pub const TESTS: &[(&str, fn())] = &[
    ("a_plan_tells_what_would_run", a_plan_tells_what_would_run),
    ("a_plan_names_the_field", a_plan_names_the_field),
    ("a_plan_looks_ahead", a_plan_looks_ahead),
    ("what_is_only_expected_is_no_mistake", what_is_only_expected_is_no_mistake),
];

const CHAIN: &str = "
stages:
  a: { uses: constant, with: { value: 4 } }
  b: { uses: half, with: { of: a } }
  c: { uses: sum, with: { of: [b], plus: 1 } }
";

fn statuses(project: &Project) -> Vec<Forecast> {
    project.explain().into_iter().map(|forecast| forecast.status).collect()
}

fn a_plan_tells_what_would_run() {
    let project = Project::new(CHAIN);
    assert_eq!(statuses(&project), [Forecast::WillRun; 3]);
    assert_eq!(project.reasons("a"), ["never ran"]);
    assert_eq!(project.reasons("b"), ["never ran"]);
    project.run().succeeded();
    assert_eq!(statuses(&project), [Forecast::Cached; 3]);
    assert!(project.reasons("c").is_empty());
    assert_eq!(project.explain()[2].outputs["number"].facts["number"], 3);
}

fn a_plan_names_the_field() {
    let project = Project::new(CHAIN);
    project.run().succeeded();
    project.write(&CHAIN.replace("value: 4", "value: 5"));
    assert_eq!(statuses(&project), [Forecast::WillRun, Forecast::Unknown, Forecast::Unknown]);
    assert_eq!(project.reasons("a"), [format!("value 4 → 5 ({}:5:39)", project.file().display())]);
    assert_eq!(project.reasons("b"), ["input `a.number` is made first (stays cached if it comes out as it was)"]);
    // 5 / 2 is 4 / 2: what was foretold as unknown turns out as cached.
    assert_eq!(project.run().succeeded().states(), "a done, b done, c cached");
    project.write(&CHAIN.replace("value: 4", "value: 5").replace(", plus: 1", ""));
    // A field that the file leaves out has no place of its own.
    assert_eq!(project.reasons("c"), ["plus 1 → 0"]);
}

const SUM: &str = "
stages:
  a: { uses: constant, with: { value: 7 } }
  s: { uses: sum, with: { of: [a] } }
";

fn a_plan_looks_ahead() {
    let project = Project::new(SUM);
    let sum = project.explain().remove(1);
    // Before anything ran, the figures stand on what the first stage expects of itself.
    assert_eq!(sum.preflight.figures[0].text, "[7]");
    assert_eq!(sum.preflight.warnings[0].message, "adds a seven");
    assert!(sum.last_run.is_none());
    project.run().succeeded();
    assert!(project.explain()[1].preflight.figures.is_empty(), "what is cached costs nothing");
    project.write(&SUM.replace("[a]", "[a], plus: 3"));
    let sum = project.explain().remove(1);
    assert_eq!(sum.preflight.figures[0].text, "[7]");
    assert!(sum.last_run.is_some());
}

fn what_is_only_expected_is_no_mistake() {
    let project = Project::new(&SUM.replace("value: 7", "value: 13"));
    // The number is expected, and not known: the check that would refuse it waits.
    assert!(project.explain()[1].problems.is_empty());
    assert_eq!(project.run().states(), "a done, s failed");
    assert_eq!(project.explain()[1].problems[0].code, "unlucky");
}
