//! The stage kind `dataset`, from a Hub.

#![allow(clippy::unwrap_used, reason = "tests")]

mod support;

use std::path::PathBuf;
use std::process::Command;

use engine::file::source::Span;
use engine::stage::{PinRequest, Stage as _};
use engine::test_bench::TestBench;
use serde_json::json;
use stages::artifact::{Row, RowsReader};
use stages::dataset::Dataset;
use support::{COMMIT, Fault, FaultyHub};

fn lines(from: usize, to: usize) -> Vec<u8> {
    (from..to).flat_map(|n| format!("{{\"document\":\"text {n}\",\"summary\":\"{n}\"}}\n").into_bytes()).collect()
}

#[test]
fn a_split_of_a_hub_dataset_becomes_rows() {
    let (first, second, test) = (lines(0, 300), lines(300, 500), lines(500, 600));
    let server = FaultyHub::serve(&[
        ("README.md", b"# A dataset"),
        ("data/train-00000-of-00002.jsonl", &first),
        ("data/train-00001-of-00002.jsonl", &second),
        ("data/test-00000-of-00001.jsonl", &test),
    ]);
    server.fail("data/train-00000-of-00002.jsonl", &[Fault::CutAfter(1000)]);
    let root = tempfile::tempdir().unwrap();
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "reads_a_hub_dataset_in_a_process_of_its_own", "--ignored"])
        .env("HF_ENDPOINT", &server.endpoint)
        .env("HF_HOME", root.path().join("home"))
        .env_remove("HF_HUB_CACHE")
        .env_remove("HF_TOKEN")
        .env("TEST_FOLDER", root.path())
        .status()
        .unwrap();
    assert!(status.success());
    assert!(server.requests_for("data/test-00000-of-00001.jsonl").is_empty(), "another split was fetched");
}

#[test]
#[ignore = "the child process of a_split_of_a_hub_dataset_becomes_rows"]
fn reads_a_hub_dataset_in_a_process_of_its_own() {
    let (kind, name, revision) = ("hub-dataset".to_owned(), "owner/name".to_owned(), "main".to_owned());
    let commit = Dataset::pin(&PinRequest { kind, name, revision, span: Span::default() }).unwrap();
    assert_eq!(commit, COMMIT);
    let root = PathBuf::from(std::env::var("TEST_FOLDER").unwrap());
    let bench = TestBench::new(&root).pin("hub-dataset:owner/name@main", &commit);
    let with = json!({
        "source": "owner/name",
        "split": "train[298:302]",
        "template": "summarize",
        "column_map": {"dialogue": "document", "output": "summary"},
    });
    let outputs = bench.run::<Dataset>(with).unwrap();
    let rows: Vec<Row> = RowsReader::open(&outputs["rows"]).unwrap().iter().collect::<Result<_, _>>().unwrap();
    let outputs = rows.into_iter().map(|row| match row {
        Row::Columns(columns) => columns["output"].clone(),
        other => panic!("no columns: {other:?}"),
    });
    assert_eq!(outputs.collect::<Vec<_>>(), ["298", "299", "300", "301"]);
    assert!(!bench.working::<Dataset>().join("finished").exists(), "fetched files stay behind");
}
