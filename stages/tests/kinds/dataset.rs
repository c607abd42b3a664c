//! The stage kind `dataset`, from a Hub.

use std::path::Path;

use engine::file::source::Span;
use engine::stage::{PinRequest, StageKind as _};
use engine::test_bench::TestBench;
use serde_json::{Value, json};
use stages::data::artifact::{Row, RowsReader};
use stages::kinds::dataset::Dataset;
use test_harness::{child, test};

use crate::support::{COMMIT, CONVERTED, Fault, FaultyHub, in_child, in_process_with_hub};

fn lines(from: usize, to: usize) -> Vec<u8> {
    (from..to).flat_map(|n| format!("{{\"document\":\"text {n}\",\"summary\":\"{n}\"}}\n").into_bytes()).collect()
}

fn csv(from: usize, to: usize) -> Vec<u8> {
    let rows = (from..to).map(|n| format!("text {n},{n}\n"));
    std::iter::once("document,summary\n".to_owned()).chain(rows).collect::<String>().into_bytes()
}

/// A Parquet file with the rows of [`lines`].
fn parquet(folder: &Path, from: usize, to: usize) -> Vec<u8> {
    let column = |text: fn(usize) -> String| {
        std::sync::Arc::new((from..to).map(|n| Some(text(n))).collect::<arrow::array::StringArray>())
            as arrow::array::ArrayRef
    };
    let columns = [("document", column(|n| format!("text {n}"))), ("summary", column(|n| n.to_string()))];
    let batch = arrow::array::RecordBatch::try_from_iter(columns).unwrap();
    let path = folder.join("rows.parquet");
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    std::fs::read(path).unwrap()
}

/// Pins and reads the dataset `owner/name` of a server, in a process whose environment names that server. The commit
/// and the summaries of the rows, or the message and the help of the failure.
fn read(server: &FaultyHub, with: Value) -> Result<(String, Vec<String>), String> {
    in_process_with_hub("reads_a_hub_dataset_in_a_process_of_its_own", &server.endpoint, &with)
}

#[child]
fn reads_a_hub_dataset_in_a_process_of_its_own() {
    in_child(pin_and_read);
}

fn pin_and_read(root: &Path, mut with: Value) -> Result<(String, Vec<String>), engine::error::StageError> {
    with["source"] = "owner/name".into();
    with["template"] = "summarize".into();
    with["column_map"] = json!({"dialogue": "document", "output": "summary"});
    let (kind, name, revision) = ("hub-dataset".to_owned(), "owner/name".to_owned(), "main".to_owned());
    let pinned = Dataset::pin(&PinRequest { kind, name, revision, token_env: None, span: Span::default() })?;
    let bench = TestBench::new(root).pinned("hub-dataset:owner/name@main", pinned.clone());
    let outputs = bench.run::<Dataset>(with)?;
    assert!(!bench.working::<Dataset>().join("finished").exists(), "fetched files stay behind");
    let rows = RowsReader::open(&outputs["rows"]).unwrap().iter().map(|row| summary(row.unwrap())).collect();
    Ok((pinned.commit, rows))
}

fn summary(row: Row) -> String {
    match row {
        Row::Columns(mut columns) => columns.remove("output").unwrap(),
        other => panic!("no columns: {other:?}"),
    }
}

fn numbers(from: usize, to: usize) -> Vec<String> {
    (from..to).map(|n| n.to_string()).collect()
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
    let made = read(&server, json!({"split": "train[298:302]"})).unwrap();
    assert_eq!(made, (COMMIT.to_owned(), numbers(298, 302)));
    assert!(server.requests_for("data/test-00000-of-00001.jsonl").is_empty(), "another split was fetched");
}

#[test]
fn the_readme_says_which_files_are_which_configuration_and_split() {
    let readme = "---\nconfigs:\n- config_name: plain\n  data_files: b/*.csv\n- config_name: halves\n  default: true\n  data_files:\n  \
        - split: train\n    path: [b/second.csv, a/first.csv]\n  - split: rest\n    path: c\n---\n# A dataset\n";
    let (first, second, rest) = (csv(0, 3), csv(3, 5), csv(5, 7));
    let server = FaultyHub::serve(&[
        ("README.md", readme.as_bytes()),
        ("a/first.csv", &first),
        ("b/second.csv", &second),
        ("c/deep/rest.csv", &rest),
    ]);
    let order = [numbers(3, 5), numbers(0, 3)].concat();
    assert_eq!(read(&server, json!({})).unwrap().1, order);
    assert_eq!(read(&server, json!({"split": "rest"})).unwrap().1, numbers(5, 7));
    assert_eq!(read(&server, json!({"config": "plain"})).unwrap().1, numbers(3, 5));
    let error = read(&server, json!({"config": "plane"})).unwrap_err();
    assert!(error.contains("no configuration `plane`") && error.contains("did you mean `plain`?"), "{error}");
    let error = read(&server, json!({"split": "held"})).unwrap_err();
    assert!(error.contains("no files of a split `held`") && error.contains("`rest`, `train`"), "{error}");
}

#[test]
fn a_dataset_made_by_a_script_is_read_from_the_hubs_conversion_or_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let train = parquet(scratch.path(), 0, 4);
    let server = FaultyHub::serve(&[("name.py", b"import datasets"), ("raw/train.json", b"[]")]);
    let error = read(&server, json!({})).unwrap_err();
    assert!(error.contains("made by a script, `name.py`") && error.contains("trust_remote_code"), "{error}");
    server.convert(&[("default/train/0000.parquet", &train)]);
    assert_eq!(read(&server, json!({})).unwrap(), (CONVERTED.to_owned(), numbers(0, 4)));

    // Beside Parquet files a script is a remnant.
    let server = FaultyHub::serve(&[("name.py", b"import datasets"), ("data/train-00000-of-00001.parquet", &train)]);
    assert_eq!(read(&server, json!({})).unwrap(), (COMMIT.to_owned(), numbers(0, 4)));
}
