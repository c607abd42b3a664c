//! A tiny model with its tokenizer, and rows for it.

#![allow(dead_code, clippy::unwrap_used, reason = "support code of several tests, each of which uses a part of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, Float64Array, StringArray, UInt64Array};
use engine::context::Artifact;
use engine::test_bench::TestBench;
use model::cpu::Cpu;
use model::decoder::Decoder;
use model::ops::Compute;
use model::parameter::Trainability;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::json;
use stages::data::artifact::{Row, RowsFacts, RowsWriter};
use stages::data::prompt::Template;
use stages::kinds::new_model::NewModel;

/// Questions and answers.
pub(crate) const PAIRS: &[(&str, &str)] = &[
    ("Who are you?", "I am a small model."),
    ("What can you do?", "I answer short questions, and no long ones."),
    ("你是谁?", "我是一个小模型。"),
    ("Why?", ""),
    ("How many rows are there here, and why are there so few of them?", "Five rows."),
];

/// How they are asked.
pub(crate) const TEMPLATE: &str = "Question: {question}\nAnswer: ";

/// A model, its folder, and rows, on a bench.
pub(crate) struct Tiny {
    pub root: tempfile::TempDir,
    pub model: Artifact,
    pub tokenizer: Artifact,
    rows: PathBuf,
    facts: engine::artifact::Facts,
}

impl Tiny {
    /// Makes all of it.
    pub(crate) fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let rows = root.path().join("rows");
        std::fs::create_dir(&rows).unwrap();
        let facts = write_rows(&rows, PAIRS);
        let bench = TestBench::new(root.path()).input("rows.rows", "rows", &rows, facts.clone()).unwrap();
        let mut outputs = bench.run::<NewModel>(model_parameters()).unwrap();
        let (model, tokenizer) = (outputs.remove("model").unwrap(), outputs.remove("tokenizer").unwrap());
        Self { root, model, tokenizer, rows, facts }
    }

    /// A bench with the model as `base`, and the rows as `rows`.
    pub(crate) fn bench(&self) -> TestBench {
        self.bench_in(self.root.path())
    }

    /// As [`Tiny::bench`], in a folder of its own.
    pub(crate) fn bench_in(&self, folder: &Path) -> TestBench {
        TestBench::new(folder)
            .input_of("base.model", &self.model.folder)
            .unwrap()
            .input_of("base.tokenizer", &self.tokenizer.folder)
            .unwrap()
            .input("rows.rows", "rows", &self.rows, self.facts.clone())
            .unwrap()
    }

    /// Rows of other questions and answers, asked in the same words.
    pub(crate) fn rows(&self, pairs: &[(&str, &str)]) -> (tempfile::TempDir, engine::artifact::Facts) {
        let folder = tempfile::tempdir().unwrap();
        let facts = write_rows(folder.path(), pairs);
        (folder, facts)
    }

    /// A model like this one, whose vocabulary is smaller.
    pub(crate) fn model_with_vocabulary(&self, vocab_size: usize) -> Artifact {
        let mut parameters = model_parameters();
        parameters["vocab_size"] = vocab_size.into();
        self.bench().run::<NewModel>(parameters).unwrap().remove("model").unwrap()
    }

    /// The model, opened without the code under test.
    pub(crate) fn decoder(&self) -> Decoder<Cpu> {
        let ops = Arc::new(Cpu::new(1, Compute::F32).unwrap());
        Decoder::load(ops, &self.model.folder, Trainability::Frozen).unwrap()
    }

    pub(crate) fn open_tokenizer(&self) -> stages::data::tokenizer::Tokenizer {
        stages::data::tokenizer::Tokenizer::from_folder(&self.tokenizer.folder).unwrap()
    }
}

/// What the model is made from.
pub(crate) fn model_parameters() -> serde_json::Value {
    json!({
        "text": "rows", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "seed": 5,
        "initializer_range": 0.3,
    })
}

fn write_rows(folder: &Path, pairs: &[(&str, &str)]) -> engine::artifact::Facts {
    let columns = ["question", "answer"].map(str::to_owned);
    let facts = RowsFacts::prompt(Template::custom(TEMPLATE).unwrap(), "answer", columns);
    let mut writer = RowsWriter::create(folder, facts);
    for (question, answer) in pairs {
        let columns = [("question", *question), ("answer", *answer)];
        let columns = columns.map(|(name, text)| (name.to_owned(), text.to_owned()));
        writer.write(Row::Columns(columns.into())).unwrap();
    }
    writer.finish(0).unwrap().0
}

/// A column of a Parquet file.
pub(crate) fn column<A: Array + Clone + 'static>(path: &Path, name: &str) -> A {
    let file = std::fs::File::open(path).unwrap();
    let mut batches = ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let batch = batches.next().unwrap().unwrap();
    assert!(batches.next().is_none());
    batch.column_by_name(name).unwrap().as_any().downcast_ref::<A>().unwrap().clone()
}

/// A column of text; absent values are empty.
pub(crate) fn texts(path: &Path, name: &str) -> Vec<String> {
    let values: StringArray = column(path, name);
    values.iter().map(|value| value.unwrap_or_default().to_owned()).collect()
}

/// A column of numbers.
pub(crate) fn numbers(path: &Path, name: &str) -> Vec<Option<f64>> {
    column::<Float64Array>(path, name).iter().collect()
}

/// A column of counts.
pub(crate) fn counts(path: &Path, name: &str) -> Vec<Option<u64>> {
    column::<UInt64Array>(path, name).iter().collect()
}
