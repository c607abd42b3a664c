//! `--smoke`: the whole file in little, and nothing of it in a real run.

use test_harness::test;

use crate::support::Project;

#[test]
fn a_smoke_run_does_little_and_serves_no_real_run() {
    let project = Project::with_pipeline("train.yaml");
    project.run(&["plan", "train.yaml", "--smoke"]).ends_with(0).says("will run");
    let smoke = project.run(&["run", "train.yaml", "--smoke", "--format", "json"]).ends_with(0).json();
    let keys = |outcome: &serde_json::Value| -> Vec<String> {
        let stages = outcome["stages"].as_array().unwrap();
        stages.iter().map(|stage| stage["key"].as_str().unwrap().to_owned()).collect()
    };
    let rows = smoke["stages"][0]["outputs"]["rows"]["facts"]["rows"].as_u64().unwrap();
    assert!(rows <= 8, "{rows} rows");
    assert_eq!(smoke["published"], serde_json::json!([]));
    let again = project.run(&["run", "train.yaml", "--smoke"]).ends_with(0);
    again.warns("nothing to do");
    let real = project.run(&["run", "train.yaml", "--format", "json"]).ends_with(0).json();
    let real_keys = keys(&real);
    assert!(keys(&smoke).iter().all(|key| !real_keys.contains(key)));
    for stage in real["stages"].as_array().unwrap() {
        assert_eq!(stage["state"], "done", "{stage}");
    }
    project.run(&["runs", "ls"]).ends_with(0).says("(smoke)");
}

#[test]
fn results_of_a_smoke_run_are_shown_as_such() {
    let project = Project::with_pipeline("train.yaml");
    project.run(&["show", "train.yaml", "tokens", "--smoke"]).ends_with(2).warns("pipeline run train.yaml --smoke");
    project.run(&["run", "train.yaml", "--smoke", "--until", "adapter"]).ends_with(0);
    let real = project.run(&["show", "train.yaml", "tokens"]).ends_with(2).warns("has no result yet");
    let words = real.stderr.replace('│', " ").split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("`pipeline show train.yaml tokens.tokens --smoke` shows that"), "{real}");
    project.run(&["show", "train.yaml", "tokens", "--smoke"]).ends_with(0).says("⟦");
    project.run(&["logs", "adapter"]).ends_with(0);
}

#[test]
fn a_smoke_run_hides_no_real_run_from_a_comparison() {
    let project = Project::with_pipeline("train.yaml");
    let compare = || {
        let compared = project.run(&["runs", "compare", "adapter", "--format", "json"]).ends_with(0).json();
        let candidates = compared["candidates"].as_array().unwrap().iter();
        candidates.map(|candidate| candidate["metrics"].clone()).collect::<Vec<_>>()
    };
    project.run(&["run", "train.yaml", "--smoke", "--until", "adapter"]).ends_with(0);
    assert_eq!(compare().len(), 1);
    for epochs in ["adapter.epochs=1", "adapter.epochs=2"] {
        project.run(&["run", "train.yaml", epochs, "--until", "adapter"]).ends_with(0);
    }
    let real = compare();
    assert_eq!(real.len(), 2, "{real:#?}");
    project.run(&["run", "train.yaml", "--smoke", "--until", "adapter", "adapter.seed=7"]).ends_with(0);
    assert_eq!(compare(), real);
}

#[test]
fn a_mistake_of_the_last_stage_shows_in_a_smoke_run() {
    let project = Project::with_pipeline("data.yaml");
    let last = "  last:\n    uses: command\n    with:\n      run: 'test \"$PIPELINE_SMOKE\" = 1 && exit 9'\n      inputs: { packs: text_packs }\n";
    let text = std::fs::read_to_string(project.path("data.yaml")).unwrap();
    project.write("data.yaml", &format!("{text}{last}"));
    project.run(&["run", "data.yaml", "--smoke"]).ends_with(1).warns("exit code 9");
}

/// Completions of a few tokens of a model that has hardly learned are all cut off.
#[test]
fn a_smoke_run_ranks_what_is_cut_off() {
    let project = Project::new();
    project.run(&["cp", "quickstart_rank", "job.yaml"]).ends_with(0);
    project.run(&["run", "job.yaml", "--smoke", "pairs.min_score=100"]).ends_with(0);
}
