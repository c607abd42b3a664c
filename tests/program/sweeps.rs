//! Sweeps with the built program: children run, what reads them follows, and only what is new runs again.

use std::fs;

use serde_json::Value;
use test_harness::test;

use crate::support::{Project, Ran};

/// The stages of a run that are in a state.
#[track_caller]
fn in_state(ran: &Ran, state: &str) -> Vec<String> {
    let outcome = ran.json();
    let stages = outcome["stages"].as_array().unwrap().iter().filter(|stage| stage["state"] == state);
    stages.map(|stage| stage["stage"].as_str().unwrap().to_owned()).collect()
}

fn run(project: &Project, arguments: &[&str]) -> Ran {
    project.run(&[&["run", "lora.yaml", "--format", "json"], arguments].concat()).ends_with(0)
}

/// A project in which one adapter takes a moment.
fn project() -> Project {
    let project = Project::with_pipeline("lora.yaml");
    project.edit("lora.yaml", "epochs: 8", "epochs: 1");
    project
}

/// A project in which a command ran as the children of a stage `b`, with these axes and other parameters.
fn swept(matrix: &str, run: &str, more: &str) -> Project {
    let project = Project::new();
    let with = format!("    with:\n      run: {run}\n      outputs: {{ o: files }}\n{more}");
    let stage = format!("  b:\n    uses: command\n    matrix: {matrix}\n{with}");
    project.write("p.yaml", &format!("version: 1\nname: sweep\nstages:\n{stage}"));
    project.run(&["run", "p.yaml"]).ends_with(0);
    project
}

/// As [`swept`], over numbers, which can be spelled in several ways.
fn swept_over_numbers() -> Project {
    swept("{ lr: [0.001, 0.01], s: [1, 2] }", "echo ${matrix.lr} ${matrix.s} | tee \"$OUTPUT_o/x\" >&2", "")
}

#[test]
fn a_name_of_children_is_taken_where_several_stages_can_be() {
    let matrix = "{ env.LR: [\"0.001\", \"0.01\"], env.S: [x, y] }";
    let project = swept(matrix, "echo \"$LR $S\" >\"$OUTPUT_o/x\"", "      env: { LR: \"1\", S: z }\n");
    let verify = |name: &[&str]| project.run(&[&["runs", "verify", "latest", "--format", "json"], name].concat());
    verify(&["b"]).ends_with(0).found_equal(4);
    verify(&["b[env.S=y]"]).ends_with(0).found_equal(2);
    verify(&["b[env.S=y]", "b[env.LR=\"0.01\",env.S=y]"]).ends_with(0).found_equal(2);
    verify(&["b[env.S=q]"]).ends_with(2).warns("there is no stage");
}

#[test]
fn a_child_is_named_by_its_values_in_any_order_and_spelling() {
    let project = swept_over_numbers();
    let child = "b[s=1,lr=1e-3]";
    project.run(&["logs", child]).ends_with(0).says("0.001 1\n");
    project.run(&["logs", "latest", child]).ends_with(0).says("0.001 1\n");
    project.run(&["runs", "show", "latest", child]).ends_with(0);
    for several in [&["logs", "b[s=1]"][..], &["runs", "show", "latest", "b[s=1]"]] {
        project.run(several).ends_with(2).warns("`b[s=1]` is 2 stages").warns("name one: `b[lr=0.001,s=1]`");
    }
    project.run(&["logs", "b[s=3]"]).ends_with(2).warns("there is no stage `b[s=3]`");
    let again = || project.run(&["run", "p.yaml", "--format", "json"]).ends_with(0);
    project.run(&["cache", "rm", child]).ends_with(0);
    again().made(1);
    project.run(&["cache", "rm", "sweep/b[s=2]"]).ends_with(0);
    again().made(2);
    project.run(&["cache", "rm", "b"]).ends_with(0);
    again().made(4);
    project.run(&["cache", "rm", "b[s=3]"]).ends_with(2);
}

#[test]
fn the_profile_and_the_provenance_of_a_child_are_found_by_its_values_and_a_beginning_of_the_run() {
    let project = swept_over_numbers();
    // All of them ran once more, and then none.
    project.run(&["run", "p.yaml", "--profile", "--force"]).ends_with(0);
    project.run(&["run", "p.yaml"]).ends_with(0);
    let runs = project.run(&["runs", "ls", "--format", "json"]).ends_with(0).json();
    let ids: Vec<&str> = runs.as_array().unwrap().iter().map(|run| run["run"].as_str().unwrap()).collect();
    let is_its_own = |beginning: &&str| ids.iter().filter(|id| id.starts_with(*beginning)).count() == 1;
    let named = (1..=ids[1].len()).map(|end| &ids[1][..end]).find(is_its_own).unwrap();
    let child = "b[s=1,lr=1e-3]";
    for run in [named, "latest~1"] {
        let profiled = project.run(&["runs", "profile", run, child]).ends_with(0).says("[b[lr=0.001,s=1]] where ");
        assert!(!profiled.stdout.contains("[b[lr=0.01,"), "{profiled}");
    }
    let made = format!("in run {}", ids[1]);
    for target in [child, "b[s=1,lr=1e-3].o"] {
        for more in [&["--run", named][..], &["--run", "latest~1"], &["--run", "latest"], &[]] {
            let traced = project.run(&[&["runs", "provenance", target][..], more].concat()).ends_with(0).says(&made);
            assert!(traced.stdout.starts_with("b[lr=0.001,s=1]"), "{traced}");
        }
    }
    for several in [
        &["runs", "profile", named, "b[s=1]"][..],
        &["runs", "provenance", "b[s=1]"],
        &["runs", "provenance", "b[s=1]", "--run", named],
    ] {
        project.run(several).ends_with(2).warns("`b[s=1]` is 2 stages").warns("`b[lr=0.001,s=1]`");
    }
    project.run(&["runs", "provenance", "b[s=1].o"]).ends_with(2).warns("name one: `b[lr=0.001,s=1].o`");
    for wrong in [&["runs", "profile", named, "b[s=3]"][..], &["runs", "provenance", "b[s=3]"]] {
        project.run(wrong).ends_with(2).warns("there is no stage `b[s=3]`");
    }
}

#[test]
fn a_stage_that_also_ran_unswept_is_named_with_its_children() {
    let project = Project::new();
    let again = |matrix: &str| {
        let stage = "version: 1\nname: sweep\nstages:\n  b:\n    uses: command\n";
        let with = "    with:
      run: echo \"$S\" | tee \"$OUTPUT_o/x\" >&2
      env: { S: z }
      outputs: { o: files }
";
        project.write("p.yaml", &format!("{stage}{matrix}{with}"));
        project.run(&["run", "p.yaml", "--format", "json"]).ends_with(0)
    };
    let swept = "    matrix: { env.S: [x, y] }\n";
    again("").made(1);
    project.run(&["cache", "rm", "b"]).ends_with(0);
    again(swept).made(2);
    project.run(&["logs", "b"]).ends_with(2).warns("`b` is 2 stages");
    project.run(&["cache", "rm", "b"]).ends_with(0);
    again(swept).made(2);
    again("").made(1);
    project.run(&["logs", "b"]).ends_with(0).says("z\n");
    project.run(&["cache", "rm", "sweep/b[env.S=x]"]).ends_with(0);
    again("").made(0);
    again(swept).made(1);
    project.run(&["cache", "rm", "sweep/b"]).ends_with(0);
    again("").made(1);
    again(swept).made(2);
}

#[test]
fn results_of_children_are_removed_by_values_that_hold_commas() {
    let project = Project::new();
    let again = |matrix: &str, axis: &str| {
        let text = format!(
            "version: 1
name: sweep
stages:
  b:
    uses: command
    matrix: {matrix}
    with:
      run: echo '${{matrix.{axis}}} ${{matrix.s}}' >\"$OUTPUT_o/x\"
      outputs: {{ o: files }}
"
        );
        project.write("p.yaml", &text);
        project.run(&["run", "p.yaml", "--format", "json"]).ends_with(0)
    };
    let lists = || again("{ m: [[1, 2], [3]], s: [1, 2] }", "m");
    lists().made(4);
    project.run(&["cache", "rm", "b[s=1]"]).ends_with(0);
    lists().made(2);
    project.run(&["cache", "rm", "b[m=[1,2],s=1]"]).ends_with(0);
    lists().made(1);
    let texts = || again("{ p: [\"x,s=1\"], s: [1, 2] }", "p");
    texts().made(2);
    project.run(&["cache", "rm", "b[p=x,s=1,s=2]"]).ends_with(0);
    assert_eq!(in_state(&texts(), "done"), ["b[p=x,s=1,s=2]"]);
    project.run(&["cache", "rm", "b[s=1]"]).ends_with(0);
    assert_eq!(in_state(&texts(), "done"), ["b[p=x,s=1,s=1]"]);
}

#[test]
fn only_new_children_run_and_a_child_is_the_stage_written_by_hand() {
    let project = project();
    let first = run(&project, &["adapter.lora.rank=2,4"]);
    assert_eq!(
        in_state(&first, "done")[4..],
        ["adapter[lora.rank=2]", "adapter[lora.rank=4]", "merged[lora.rank=2]", "merged[lora.rank=4]"]
    );
    let again = run(&project, &["adapter.lora.rank=2,4"]);
    assert_eq!((in_state(&again, "cached").len(), in_state(&again, "done").len()), (8, 0));
    let longer = run(&project, &["adapter.lora.rank=4,2,8"]);
    assert_eq!(in_state(&longer, "done"), ["adapter[lora.rank=8]", "merged[lora.rank=8]"]);
    let by_hand = run(&project, &["adapter.lora.rank=8"]);
    assert_eq!(in_state(&by_hand, "done"), [] as [&str; 0]);

    // The record of the run knows the values.
    let folder = longer.json()["folder"].as_str().unwrap().to_owned();
    let record: Value = serde_json::from_slice(&fs::read(format!("{folder}/run.json")).unwrap()).unwrap();
    let child = record["stages"].as_array().unwrap().iter().find(|stage| stage["id"] == "merged[lora.rank=8]").unwrap();
    assert_eq!((&child["declared"], &child["axes"]), (&"merged".into(), &serde_json::json!([["lora.rank", 8]])));

    // A name means all children, or one, or none.
    let swept = ["lora.yaml", "merged", "adapter.lora.rank=2,4"];
    let several = project.run(&[&["show"], &swept[..]].concat()).ends_with(2);
    assert!(several.stderr.contains("name one: `merged[lora.rank=2]`, `merged[lora.rank=4]`"), "{}", several.stderr);
    project.run(&["show", "lora.yaml", "merged[lora.rank=2]", "adapter.lora.rank=2,4"]).ends_with(0);
    let until = run(&project, &["adapter.lora.rank=2,4", "--until", "adapter"]);
    assert_eq!(in_state(&until, "cached").len(), 6);
    let one = run(&project, &["adapter.lora.rank=2,4", "--until", "merged[lora.rank=4]"]);
    assert_eq!(in_state(&one, "cached").len(), 6);
    let unknown =
        project.run(&["run", "lora.yaml", "adapter.lora.rank=2,4", "--until", "merged[lora.rank=5]"]).ends_with(2);
    assert!(unknown.stderr.contains("did you mean `merged[lora.rank=2]`?"), "{}", unknown.stderr);
}

#[test]
fn all_children_are_merged_into_one_and_published_apart() {
    let project = project();
    project.edit("lora.yaml", "      save_every: 2\n", "      save_every: 2\n    matrix: { seed: [1, 2] }\n");
    project.edit(
        "lora.yaml",
        "with: { model: fresh, adapter: adapter, data: tokens }",
        "with: { model: fresh, adapters: { collect: adapter, weight: 0.5 } }\npublish: { adapter.adapter: './out/seed-${matrix.seed}' }",
    );
    let ran = run(&project, &[]);
    assert_eq!(in_state(&ran, "done")[4..], ["adapter[seed=1]", "adapter[seed=2]", "merged"]);
    let weights = |seed: u32| fs::read(project.path(&format!("out/seed-{seed}/adapter_model.safetensors"))).unwrap();
    assert_ne!(weights(1), weights(2));
}

#[test]
fn measurements_are_run_each_and_then_cached() {
    let project = project();
    let arguments = ["adapter.resources.threads=1,2", "merged.when=false"];
    assert_eq!(in_state(&run(&project, &arguments), "done").len(), 6);
    assert_eq!(in_state(&run(&project, &arguments), "cached").len(), 6);
    let compared = project.run(&["runs", "compare", "adapter"]).ends_with(0).stdout;
    let [title, one, two] = compared.lines().take(3).collect::<Vec<_>>()[..] else { panic!("{compared}") };
    assert!(["tokens/s", "speed-up", "efficiency"].iter().all(|column| title.contains(column)), "{compared}");
    assert!(one.contains("1.00x") && one.contains("100 %") && two.contains('x'), "{compared}");
    let read = project.run(&["validate", "lora.yaml"]).ends_with(0);
    assert!(read.stdout.contains("6 stages"), "{}", read.stdout);
    let refused = project.run(&["plan", "lora.yaml", "adapter.resources.threads=1,2"]).ends_with(2);
    assert!(refused.stderr.contains("whose children only measure"), "{}", refused.stderr);
}

#[test]
fn a_stage_that_is_left_out_is_said() {
    let project = project();
    project.edit("lora.yaml", "name: lora\n", "name: lora\nvars: { train: false }\n");
    project.edit("lora.yaml", "      save_every: 2\n", "      save_every: 2\n    when: ${vars.train}\n");
    let ran = run(&project, &[]);
    assert_eq!(in_state(&ran, "done").len(), 4);
    for line in
        ["left out: `adapter`: its `when:` is false (lora.yaml:41:11)", "left out: `merged`: it needs `adapter`"]
    {
        assert!(ran.stderr.contains(line), "{}", ran.stderr);
    }
    let plan = project.run(&["plan", "lora.yaml", "--format", "json"]).ends_with(0).json();
    assert_eq!(plan["left_out"][1]["follows"], "adapter");
    let asked = project.run(&["run", "lora.yaml", "--until", "merged"]).ends_with(2);
    assert!(asked.stderr.contains("left out: `merged`"), "{}", asked.stderr);
    assert!(asked.stderr.contains("add `adapter.when=true`"), "{}", asked.stderr);
    assert_eq!(in_state(&run(&project, &["vars.train=true"]), "done").len(), 2);
}

/// What is read of an axis in one string beside an axis of a stage before is no measurement.
#[test]
fn an_axis_beside_an_inherited_one_decides_the_result() {
    let project = Project::new();
    project.write(
        "p.yaml",
        "version: 1
name: sweep
stages:
  a:
    uses: command
    matrix: { m: [1, 3] }
    with: { run: 'echo ${matrix.m} >\"$OUTPUT_o/x\"', outputs: { o: files } }
  b:
    uses: command
    matrix: { n: [7, 8] }
    with: { run: 'echo b${matrix.n}${matrix.m} >\"$OUTPUT_o/x\"', inputs: { i: a }, outputs: { o: files } }
  d:
    uses: command
    with: { run: 'cat \"$INPUT_i/x\" >\"$OUTPUT_o/x\"', inputs: { i: b }, outputs: { o: files } }
publish: { d: './out/${matrix.n}-${matrix.m}' }
",
    );
    project.run(&["run", "p.yaml", "--format", "json"]).ends_with(0).made(10);
    assert_eq!(fs::read_to_string(project.path("out/7-3/x")).unwrap(), "b73\n");
    assert_eq!(fs::read_to_string(project.path("out/8-1/x")).unwrap(), "b81\n");
    // Of a matrix in which something is wrong, that is said and no more.
    project.edit("p.yaml", "m: [1, 3]", "m: [1, 1]");
    let wrong = project.run(&["validate", "p.yaml", "--format", "json"]).ends_with(2).json();
    let codes: Vec<_> =
        wrong[0]["problems"].as_array().unwrap().iter().map(|problem| problem["code"].clone()).collect();
    assert_eq!(codes, ["bad-matrix"], "{wrong:#}");
}

#[test]
fn values_are_compared_to_their_last_digit_and_those_of_later_stages_are_not() {
    let project = Project::new();
    project.write(
        "p.yaml",
        "version: 1
name: sweep
stages:
  a:
    uses: command
    matrix: { m: [0.1234561, 0.1234562] }
    with: { run: 'echo \"{\\\"x\\\": ${matrix.m}}\" >\"$OUTPUT_o/metrics.json\"', outputs: { o: metrics } }
  e:
    uses: command
    with: { run: 'cat \"$INPUT_i/metrics.json\" >\"$OUTPUT_o/x\"', inputs: { i: 'a[m=0.1234561]' }, outputs: { o: files } }
",
    );
    project.run(&["run", "p.yaml"]).ends_with(0);
    let compared = project.run(&["runs", "compare", "a", "--format", "json"]).ends_with(0).json();
    let parameters: Vec<_> = compared["parameters"].as_array().unwrap().iter().collect();
    assert_eq!(parameters, ["m", "run"], "{compared:#}");
    assert_eq!(compared["candidates"][1]["parameters"]["m"], 0.123_456_2);
    let names: Vec<_> = compared["candidates"].as_array().unwrap().iter().map(|it| it["name"].clone()).collect();
    assert_eq!(names, ["m=0.1234561", "m=0.1234562"]);
    project.run(&["runs", "compare", "a", "--format", "csv"]).ends_with(0).says("0.1234561").says("0.1234562");
}

#[test]
fn a_pipeline_of_which_every_stage_is_left_out_is_done() {
    let project = Project::new();
    project.write(
        "p.yaml",
        "version: 1\nname: none\nstages:\n  a: { uses: command, when: false, with: { run: 'true' } }\n",
    );
    for command in ["plan", "run"] {
        project.run(&[command, "p.yaml"]).ends_with(0).warns("a");
        let ran = project.run(&[command, "p.yaml", "--format", "json"]).ends_with(0).json();
        assert_eq!(ran["stages"].as_array().unwrap().len(), 0, "{ran:#}");
    }
}
