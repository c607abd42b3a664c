//! Architectures that the native backend lacks, through every stage that reads a model: one dense, and before a release
//! one mixture of experts. Their checkpoints are made with transformers, and what is trained is compared with a plain
//! loop over transformers and PEFT (`architectures.py`).

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use test_harness::{Unmet, do_everything, test};

use crate::bench::{Bench, LOSS_BOUND, losses};

pub(crate) const PIPELINE: &str = "architectures.yaml";

/// What the checkpoints have as their tokenizer.
pub(crate) const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/data/tokenizers/bytelevel");

/// The largest difference of two logits of a merged model and base with adapter, which are in f32.
const MERGE_BOUND: f64 = 1e-4;

/// The mixture of experts takes as long again; the worker's own tests train several.
pub(crate) fn families() -> Vec<&'static str> {
    if do_everything() { vec!["olmo2", "qwen3_moe"] } else { vec!["olmo2"] }
}

/// What the script prints.
pub(crate) fn reference(bench: &Bench, arguments: &[&str]) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torch/architectures.py");
    let mut command = Command::new(&bench.python);
    let ran = command.arg(script).args(arguments).current_dir(bench.project.path(".")).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).unwrap()
}

/// Copies an output into a folder of the project.
fn export(bench: &Bench, output: &str, folder: &str) {
    bench.run(&["export", PIPELINE, output, folder]).ends_with(0);
}

fn json(bench: &Bench, path: &str) -> Value {
    serde_json::from_slice(&fs::read(bench.project.path(path)).unwrap()).unwrap()
}

#[track_caller]
fn are_like(bench: &Bench, stage: &str, adapter: &str) {
    export(bench, &format!("{stage}.metrics"), &format!("{stage}-metrics"));
    let records = fs::read_to_string(bench.project.path(&format!("{stage}-metrics/metrics.jsonl"))).unwrap();
    let records: Vec<Value> = records.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let printed = reference(bench, &["train", "checkpoint", "tokens", adapter, "3e-3"]);
    let expected: Vec<f64> = serde_json::from_str(printed.lines().last().unwrap()).unwrap();
    let found = losses(&records);
    assert_eq!(found.len(), expected.len());
    let apart = found.iter().zip(&expected).map(|(one, two)| (one - two).abs() / two).fold(0.0, f64::max);
    assert!(apart <= LOSS_BOUND, "{stage}: {found:?} {expected:?}");
    println!("losses of `{stage}` are at most {apart:.1e} apart");
}

#[test(each = families())]
fn it_trains_evaluates_generates_and_merges(family: &str) -> Result<(), Unmet> {
    let bench = Bench::of(PIPELINE)?;
    reference(&bench, &["make", family, "checkpoint", TOKENIZER]);

    let native = bench.run(&["plan", PIPELINE, "adapter.backend=native"]).ends_with(2);
    native.warns(&format!("`backend: native` does not go with `{family}`")).warns("set `backend: torch`");
    bench.run(&["plan", PIPELINE]).ends_with(0).warns("computed by transformers; not native");
    if family == "qwen3_moe" {
        let experts = bench.run(&["run", PIPELINE, "--until", "start", "start.lora.target_modules=[down_proj]"]);
        experts.ends_with(2).warns("`down_proj` names experts or their router");
    }
    bench.run(&["run", PIPELINE]).ends_with(0).says("computed by torch");

    for (output, folder) in
        [("tokens", "tokens"), ("start.adapter", "start"), ("adapter.adapter", "adapter"), ("merged", "merged")]
    {
        export(&bench, output, folder);
    }
    are_like(&bench, "adapter", "start");
    are_like(&bench, "full", "none");

    // PEFT takes the adapter, and the merged model computes what base and adapter do.
    let printed = reference(&bench, &["compare", "checkpoint", "adapter", "merged"]);
    let apart: Value = serde_json::from_str(printed.lines().last().unwrap()).unwrap();
    assert!(apart["merged"].as_f64().unwrap() <= MERGE_BOUND, "{apart}");
    assert!(apart["base"].as_f64().unwrap() > 100.0 * MERGE_BOUND, "{apart}");
    let report = json(&bench, "merged/merge_report.json");
    assert!(report.to_string().contains("before_rounding"), "{report:#}");

    export(&bench, "scores", "scores");
    export(&bench, "scores_of_merged", "scores-of-merged");
    let perplexity =
        |folder: &str| json(&bench, &format!("{folder}/metrics.json"))["perplexity"]["value"].as_f64().unwrap();
    let (one, two) = (perplexity("scores"), perplexity("scores-of-merged"));
    assert!((one - two).abs() <= 1e-4 * two, "{one} {two}");
    Ok(())
}
