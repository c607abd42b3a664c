//! Tasks of the program whose rows come from the Hub: pinned, and fetched split by split.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;
mod tiny;

use std::fs;
use std::path::PathBuf;

use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::{Outside, Stage as _};
use serde_json::{Value, json};
use stages::kinds::evaluate::Evaluate;
use support::FaultyHub;
use test_harness::{child, test};
use tiny::Tiny;

test_harness::main!();

const README: &str = "---\nconfigs:\n- config_name: ARC-Easy\n  data_files:\n  - split: train\n    path: easy/train.jsonl\n  \
    - split: test\n    path: easy/test.jsonl\n---\n# Questions\n";

fn rows(from: usize, to: usize) -> String {
    let row = |at: usize| {
        let choices = json!({"text": [format!("{at}"), format!("{}", at * 7), "no number"], "label": ["A", "B", "C"]});
        json!({"id": at.to_string(), "question": format!("What is {at} times 7?"), "choices": choices, "answerKey": "B"})
    };
    (from..to).map(|at| row(at).to_string() + "\n").collect()
}

/// The figures of `arc_easy` by a model, in a process whose environment names a server; or what went wrong.
fn evaluated(endpoint: &str, with: &Value) -> Result<Value, String> {
    let root = tempfile::tempdir().unwrap();
    let output = child("evaluates_in_a_process_of_its_own")
        .env("HF_ENDPOINT", endpoint)
        .env("HF_HOME", root.path().join("home"))
        .env_remove("HF_HUB_CACHE")
        .env_remove("HF_TOKEN")
        .env("TEST_FOLDER", root.path())
        .env("TEST_WITH", with.to_string())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&fs::read(root.path().join("result.json")).unwrap()).unwrap()
}

#[child]
fn evaluates_in_a_process_of_its_own() {
    let root = PathBuf::from(std::env::var("TEST_FOLDER").unwrap());
    let with: Value = serde_json::from_str(&std::env::var("TEST_WITH").unwrap()).unwrap();
    let found = evaluate(&root, with).map_err(|error| format!("{error}\n{}", error.help.clone().unwrap_or_default()));
    fs::write(root.join("result.json"), serde_json::to_vec(&found).unwrap()).unwrap();
}

fn evaluate(root: &std::path::Path, with: Value) -> Result<Value, engine::error::StageError> {
    let params = <Evaluate as engine::stage::Stage>::Params::read_of(&with);
    let tiny = Tiny::new();
    let mut bench = tiny.bench_in(root);
    for outside in Evaluate::outside(&params) {
        match outside {
            Outside::Pin(request) => {
                let pinned = Evaluate::pin(&request)?;
                bench = bench.pinned(&format!("{}:{}@{}", request.kind, request.name, request.revision), pinned);
            }
            Outside::Files { pattern, .. } => panic!("`{pattern}` is not of the Hub"),
        }
    }
    let metrics = bench.run::<Evaluate>(with)?.remove("metrics").unwrap();
    assert!(!bench.working::<Evaluate>().join("finished").exists(), "fetched files stay behind");
    let text = fs::read_to_string(metrics.folder.join("metrics.json")).unwrap();
    Ok(serde_json::from_str::<Value>(&text).unwrap()["results"].clone())
}

#[test]
fn rows_come_from_the_hub_split_by_split() {
    let (test, shown) = (rows(0, 5), rows(5, 9));
    let server = FaultyHub::serve(&[
        ("README.md", README.as_bytes()),
        ("easy/test.jsonl", test.as_bytes()),
        ("easy/train.jsonl", shown.as_bytes()),
    ]);
    server.be_every_repository();
    let with = json!({"model": "base", "tasks": ["arc_easy"]});
    let found = evaluated(&server.endpoint, &with).unwrap();
    assert_eq!(found["arc_easy"]["sample_len"], 5, "{found}");
    assert!(server.requests_for("easy/train.jsonl").is_empty(), "a split that nothing is shown of was fetched");
    let shots = json!({"model": "base", "tasks": ["arc_easy"], "num_fewshot": 1});
    assert_eq!(evaluated(&server.endpoint, &shots).unwrap()["arc_easy"]["sample_len"], 5);
    assert!(!server.requests_for("easy/train.jsonl").is_empty());

    let empty = FaultyHub::serve(&[("README.md", b"# Nothing")]);
    empty.be_every_repository();
    let error = evaluated(&empty.endpoint, &with).unwrap_err();
    assert!(error.contains("`task_data`"), "{error}");
}

#[test]
fn only_what_a_folder_does_not_give_is_pinned() {
    let pins = |with: Value| -> Vec<String> {
        let params = <Evaluate as engine::stage::Stage>::Params::read_of(&with);
        let name = |outside: Outside| match outside {
            Outside::Pin(request) => Some(format!("{}:{}", request.kind, request.name)),
            Outside::Files { .. } => None,
        };
        Evaluate::outside(&params).into_iter().filter_map(name).collect()
    };
    // A group's tasks are of one dataset.
    let found = pins(json!({"model": "base", "tasks": ["mmlu", "gsm8k", "./own.yaml"]}));
    assert_eq!(found, ["hub-dataset:cais/mmlu", "hub-dataset:openai/gsm8k"]);
    assert!(pins(json!({"model": "base", "tasks": ["mmlu"], "task_data": "./rows"})).is_empty());
}

/// Parameters as a file would give them.
trait ReadOf {
    fn read_of(with: &Value) -> Self;
}

impl<P: engine::parameter::Parameter> ReadOf for P {
    fn read_of(with: &Value) -> Self {
        let mut reader = Reader::default();
        let params = P::read(&Node::from_json(with), &mut reader).unwrap();
        assert!(reader.problems.is_empty(), "{:?}", reader.problems);
        params
    }
}
