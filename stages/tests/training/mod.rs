//! Rows of tokens and a bench to train on them.

#![allow(dead_code, clippy::unwrap_used, reason = "support code of several tests, each of which uses a part of it")]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use engine::artifact::Facts;
use engine::context::Artifact;
use engine::error::StageError;
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::Reader;
use engine::stage::InputFacts;
use engine::test_bench::TestBench;
use serde_json::{Value, json};
use stages::data::artifact::{Shape, TokenRow, TokensFacts, TokensWriter};
use stages::kinds::train::Train;

use crate::tiny::Tiny;

/// Facts of rows of which none is written yet.
pub(crate) fn facts() -> TokensFacts {
    TokensFacts { vocab_size: 300, ..TokensFacts::none(Shape::Text) }
}

/// A row in which each token is learned.
pub(crate) fn learned(ids: impl IntoIterator<Item = u32>) -> TokenRow {
    let ids: Vec<u32> = ids.into_iter().collect();
    let labels = ids.iter().map(|id| *id as i32).collect();
    TokenRow::document(ids, labels)
}

/// Eleven rows of some length.
pub(crate) fn rows() -> Vec<TokenRow> {
    (0..11).map(|row| learned((0..6 + row % 4).map(|at| 3 + (7 * row + 5 * at) % 200))).collect()
}

/// Writes rows as a Tokens artefact and gives its facts.
pub(crate) fn write_tokens(folder: &Path, rows: Vec<TokenRow>) -> Facts {
    fs::create_dir_all(folder).unwrap();
    let mut writer = TokensWriter::tokens(folder, facts());
    rows.into_iter().for_each(|row| writer.write(row).unwrap());
    writer.finish(|_| ()).unwrap().0.to_facts()
}

/// A bench in a folder of its own, with the tiny model as `base`, rows as `tokens` and others as `held_out`.
pub(crate) fn bench(tiny: &Tiny, folder: &Path, rows: Vec<TokenRow>, held_out: Option<Vec<TokenRow>>) -> TestBench {
    let mut bench = TestBench::new(folder).input_of("base.model", &tiny.model.folder).unwrap();
    for (name, rows) in [("tokens", Some(rows)), ("held_out", held_out)] {
        let Some(rows) = rows else { continue };
        let tokens = folder.join("rows of tokens").join(name);
        let facts = write_tokens(&tokens, rows);
        bench = bench.input(&format!("{name}.tokens"), "tokens", &tokens, facts).unwrap();
    }
    bench
}

/// The least that a stage must be told, and more.
pub(crate) fn with(more: Value) -> Value {
    let mut parameters = json!({
        "model": "base", "data": "tokens", "micro_batch_size": 2, "gradient_accumulation_steps": 2, "save_every": 1,
        "optimizer": {"learning_rate": 1e-2},
    });
    parameters.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    parameters
}

pub(crate) fn train(bench: &TestBench, more: Value) -> Result<BTreeMap<String, Artifact>, StageError> {
    bench.run::<Train>(with(more))
}

/// The adapter's weights file.
pub(crate) fn adapter(outputs: &BTreeMap<String, Artifact>) -> Vec<u8> {
    fs::read(outputs["adapter"].folder.join("adapter_model.safetensors")).unwrap()
}

/// The figures of each step.
pub(crate) fn steps(outputs: &BTreeMap<String, Artifact>) -> Vec<Value> {
    records(outputs, "train")
}

/// The records of a kind in `metrics.jsonl`.
pub(crate) fn records(outputs: &BTreeMap<String, Artifact>, kind: &str) -> Vec<Value> {
    let lines = fs::read_to_string(outputs["metrics"].folder.join("metrics.jsonl")).unwrap();
    let records = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    records.filter(|record| record["kind"] == kind).collect()
}

/// What is wrong with parameters.
pub(crate) fn problems(parameters: Value, inputs: &InputFacts) -> Vec<String> {
    let mut reader = Reader::default();
    let bound = stages::registry().get("train").unwrap().read(&Node::from_json(&parameters), &mut reader);
    let found = bound.map_or_else(Vec::new, |bound| bound.check(inputs, Span::default()));
    reader.problems.into_iter().chain(found).map(|problem| problem.message).collect()
}

/// Parameters with more of them, which take the place of namesakes.
pub(crate) fn merged(one: Value, more: Value) -> Value {
    let mut both = one;
    both.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    both
}
