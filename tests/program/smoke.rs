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
