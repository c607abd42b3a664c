//! Tasks of the program whose rows come from the Hub: pinned, and fetched split by split.

use std::fs;
use std::path::Path;

use engine::context::Artifact;
use engine::error::StageError;
use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::{Outside, Stage as _, StageKind};
use serde_json::{Value, json};
use stages::kinds::evaluate::Evaluate;
use stages::kinds::train::Train;
use test_harness::{child, test};

use crate::support::{FaultyHub, in_child, in_process_with_hub};
use crate::tiny::Tiny;
use crate::training::{self, write_tokens};

const README: &str = "---\nconfigs:\n- config_name: ARC-Easy\n  data_files:\n  - split: train\n    path: easy/train.jsonl\n  \
    - split: test\n    path: easy/test.jsonl\n---\n# Questions\n";

/// A task file whose rows are those of a dataset.
const OWN: &str = "task: own
dataset_path: owner/rows
dataset_name: ARC-Easy
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: '{{ choices.text }}'
doc_to_target: '{{ choices.label.index(answerKey) }}'
metric_list: [{ metric: acc }]
";

fn rows(from: usize, to: usize) -> String {
    let row = |at: usize| {
        let choices = json!({"text": [format!("{at}"), format!("{}", at * 7), "no number"], "label": ["A", "B", "C"]});
        json!({"id": at.to_string(), "question": format!("What is {at} times 7?"), "choices": choices, "answerKey": "B"})
    };
    (from..to).map(|at| row(at).to_string() + "\n").collect()
}

/// The figures of `arc_easy` by a model, in a process whose environment names a server; or what went wrong.
fn evaluated(endpoint: &str, with: &Value) -> Result<Value, String> {
    in_process_with_hub("evaluates_in_a_process_of_its_own", endpoint, with)
}

#[child]
fn evaluates_in_a_process_of_its_own() {
    in_child(|root, with| {
        let metrics = run::<Evaluate>(root, with, "metrics")?;
        let text = fs::read_to_string(metrics.folder.join("metrics.json")).unwrap();
        Ok(serde_json::from_str::<Value>(&text).unwrap()["results"].clone())
    });
}

#[child]
fn trains_in_a_process_of_its_own() {
    in_child(|root, with| {
        let metrics = run::<Train>(root, with, "metrics")?;
        let lines = fs::read_to_string(metrics.folder.join("metrics.jsonl")).unwrap();
        let records = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        Ok(records.filter(|record| record["kind"] == "tasks").collect::<Vec<_>>())
    });
}

/// Runs a stage with all that it reads from outside pinned; an output of it.
fn run<K: StageKind>(root: &Path, with: Value, output: &str) -> Result<Artifact, StageError> {
    let stage = K::read_of(&with);
    let tiny = Tiny::new();
    let tokens = root.join("tokens");
    let facts = write_tokens(&tokens, training::rows());
    let mut bench = tiny.bench_in(root).input("tokens.tokens", "tokens", &tokens, facts).unwrap();
    for outside in stage.outside() {
        match outside {
            Outside::Pin(request) => {
                let pinned = K::pin(&request)?;
                bench = bench.pinned(&format!("{}:{}@{}", request.kind, request.name, request.revision), pinned);
            }
            Outside::Files { role, pattern, .. } => {
                fs::write(root.join(&pattern), OWN).unwrap();
                bench = bench.file(&role, &root.join(pattern))?;
            }
        }
    }
    let made = bench.run::<K>(with)?.remove(output).unwrap();
    assert!(!bench.working::<K>().join("finished").exists(), "fetched files stay behind");
    Ok(made)
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

    let own = |datasets: &[&str]| json!({"model": "base", "tasks": ["own.yaml"], "task_datasets": datasets});
    assert_eq!(evaluated(&server.endpoint, &own(&["owner/rows"])).unwrap()["own"]["sample_len"], 5);
    let error = evaluated(&server.endpoint, &own(&["owner/rows", "owner/other"])).unwrap_err();
    assert!(error.contains("`task_datasets` names `owner/other`, which no task reads"), "{error}");
    let error = evaluated(&server.endpoint, &json!({"model": "base", "tasks": ["own.yaml"]})).unwrap_err();
    assert!(error.contains("name the dataset in `task_datasets`"), "{error}");

    let tasks = json!({"tasks": ["arc_easy"], "limit": 3});
    let train = json!({"model": "base", "data": "tokens", "max_steps": 1, "validation_tasks": tasks});
    let trained: Vec<Value> = in_process_with_hub("trains_in_a_process_of_its_own", &server.endpoint, &train).unwrap();
    assert!(trained.len() == 2 && trained.iter().all(|record| record["arc_easy.acc,none"].is_number()), "{trained:?}");

    let empty = FaultyHub::serve(&[("README.md", b"# Nothing")]);
    empty.be_every_repository();
    let error = evaluated(&empty.endpoint, &with).unwrap_err();
    assert!(error.contains("`task_data`"), "{error}");
}

#[test]
fn only_what_a_folder_does_not_give_is_pinned() {
    let pins = |with: Value| -> Vec<String> {
        let params = Evaluate::read_of(&with);
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
    // Of task files, what is named.
    let own = json!({"model": "base", "tasks": ["./own.yaml"], "task_data": "./tasks", "task_datasets": "owner/rows"});
    assert_eq!(pins(own), ["hub-dataset:owner/rows"]);
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
