//! What a stage asks of the machine, and how it is tried again.

use super::*;

const SLOTS: &str = "version: 1
slots: { license: 2 }
stages:
  a: { uses: dataset, with: { source: a.jsonl }, resources: { slots: { license: 2 } }, retries: { max: 3, on: [network] } }
";

#[test]
fn slots_are_declared_and_enough() {
    let plan = plan(SLOTS);
    assert_eq!((plan.slots["license"], plan.stages[0].resources.slots["license"]), (2, 2));
    let more = SLOTS.replace("license: 2 } }", "license: 3, licence: 1 } }");
    assert_eq!(
        wrong(&more),
        [
            "never-fits 4:72 stage `a` needs 3 of `license`, and there are 2: it could never run (lower it, or raise \
             `slots.license` (for one run: `--slots license=3`))",
            "unknown-slot 4:84 stage `a` uses slots of `licence`, which the file does not declare (did you mean `license`?)",
        ]
    );
    // What `--slots license=3` and `--slots licence=1` become.
    let raised = plan_over(&more, &["slots.license=3", "slots.licence=1"]);
    assert_eq!((raised.slots["license"], raised.slots["licence"]), (3, 1));
    let mistyped = plan_over(SLOTS, &["slots.licence=3"]);
    let unused = mistyped.warnings.iter().find(|warning| warning.code == "unused-slot").expect("a warning");
    assert_eq!(unused.message, "no stage takes a slot of `licence`");
    assert_eq!(unused.help.as_deref(), Some("did you mean `license`?"));
    assert_eq!(
        wrong(&SLOTS.replace("license: 2 } }", "license: 0 } }"))[0],
        "out-of-range 4:81 `resources.slots.license` must be at least 1"
    );
}

#[test]
fn a_stage_runs_where_it_says_and_else_where_the_file_says() {
    let text = "version: 1
executor: { slurm: { partition: gpu, time: 12h, gres: 'gpu:h200' } }
stages:
  a: { uses: dataset, with: { source: a.jsonl }, executor: local }
  b: { uses: dataset, with: { source: b.jsonl }, executor: { slurm: { partition: cpu } } }
  c: { uses: dataset, with: { source: c.jsonl } }
";
    let of = |plan: &Plan, id: &str, forced| {
        let stage = plan.stages.iter().position(|stage| stage.id == id).unwrap();
        let (kind, settings) = plan.executor_of(stage, forced);
        (kind, settings.partition.unwrap_or_default())
    };
    let (local, slurm) = (ExecutorKind::Local, ExecutorKind::Slurm);
    let file = plan(text);
    assert_eq!(of(&file, "a", None), (local, "gpu".into()));
    assert_eq!((of(&file, "b", None), of(&file, "c", None)), ((slurm, "cpu".into()), (slurm, "gpu".into())));
    assert_eq!((of(&file, "a", Some(slurm)).0, of(&file, "c", Some(local)).0), (local, local));
    let over = plan_over(text, &["executor.slurm.partition=debug", "a.executor=slurm"]);
    assert_eq!((of(&over, "a", None), of(&over, "c", None)), ((slurm, "debug".into()), (slurm, "debug".into())));
    assert_eq!(wrong(&text.replace("gres:", "gers:"))[0], "unknown-key 2:49 unknown key `gers` (did you mean `gres`?)");
}

#[test]
fn retries_are_a_number_or_say_when() {
    let retries = plan(SLOTS).stages[0].retries.clone();
    assert_eq!((retries.max, retries.on.as_slice()), (3, &[crate::error::Cause::Network][..]));
    assert_eq!(retries.delay_after(2), Duration::from_secs(4));
    let with = |text: &str| SLOTS.replace("{ max: 3, on: [network] }", text);
    let plain = plan(&with("4")).stages[0].retries.clone();
    assert_eq!(plain, Retries { max: 4, ..Retries::default() });
    let long = plan(&with("{ delay: 10m }")).stages[0].retries.clone();
    assert_eq!((long.max, long.max_delay), (2, Duration::from_secs(600)));
    assert_eq!(plan(&with("{ on: [] }")).stages[0].retries.on, []);
    assert_eq!(
        wrong(&with("{ delay: 10m, max_delay: 5m }")),
        ["out-of-range 4:122 `retries.max_delay` must be at least as long as `delay`"]
    );
    let never = wrong(&with("{ on: [bad_data] }"));
    assert!(never[0].starts_with("unknown-value 4:104 `retries.on[0]`: unknown value `bad_data`"), "{never:?}");
    assert!(wrong(&with("[3]"))[0].contains("expected an integer, or a mapping"));
}
