//! The rows of a task: local files of JSON, JSON lines or Parquet.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use arrow::json::writer::{JsonArray, WriterBuilder};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Value};

use super::TaskError;
use super::file::Task;

/// A row as the data has it.
pub type Document = Map<String, Value>;

/// The rows of a split, whose files are relative to `folder`.
///
/// # Errors
/// Fails where the task has no such split, or a file cannot be read; the row is named.
pub fn read(task: &Task, split: &str, folder: &Path) -> Result<Vec<Document>, TaskError> {
    let files = task.data_files.get(split).ok_or_else(|| without_split(task, split))?;
    processed(task, read_files(&files.iter().map(|file| folder.join(file)).collect::<Vec<_>>())?)
}

/// Rows as the templates of a task read them.
///
/// # Errors
/// Fails where its function cannot be used on them.
pub fn processed(task: &Task, rows: Vec<Document>) -> Result<Vec<Document>, TaskError> {
    let Some(processor) = &task.process_docs else { return Ok(rows) };
    processor.apply(rows).map_err(|(row, message)| {
        let error = TaskError::key(&task.file, "process_docs", message);
        match row {
            Some(row) => error.in_row(row),
            None => error,
        }
    })
}

/// That a task has no rows of a split.
pub fn without_split(task: &Task, split: &str) -> TaskError {
    let splits: Vec<String> = task.data_files.keys().map(|name| format!("`{name}`")).collect();
    let message = match splits.as_slice() {
        [] => "has no local files in `data_files`".to_owned(),
        splits => format!("`data_files` has no split `{split}`, only {}", splits.join(", ")),
    };
    TaskError::key(&task.file, "dataset_kwargs", message)
}

/// The rows of some files, one after the other.
///
/// # Errors
/// Fails where a file cannot be read; the row is named.
pub fn read_files(files: &[PathBuf]) -> Result<Vec<Document>, TaskError> {
    let rows: Vec<Vec<Document>> = files.iter().map(|file| read_file(file)).collect::<Result<_, _>>()?;
    let mut rows = rows.concat();
    let columns: BTreeSet<String> = rows.iter().flat_map(|row| row.keys().cloned()).collect();
    for column in &columns {
        unify(rows.iter_mut().map(|row| row.entry(column).or_insert(Value::Null)).collect());
    }
    Ok(rows)
}

/// Gives the numbers of a column one type, as the harness' tables have it: beside a fraction every number is one.
fn unify(values: Vec<&mut Value>) {
    let is_fraction = values.iter().any(|value| value.is_f64());
    let mut items = Vec::new();
    for value in values {
        match value {
            Value::Number(number) if is_fraction => {
                if let Some(fraction) = number.as_f64() {
                    *value = Value::from(fraction);
                }
            }
            Value::Array(list) => items.extend(list),
            _ => {}
        }
    }
    if !items.is_empty() {
        unify(items);
    }
}

/// A Parquet file by its name, else one with a list of objects or with an object on each line.
fn read_file(path: &Path) -> Result<Vec<Document>, TaskError> {
    let in_file = |message: String| TaskError::in_file(path, message);
    if path.extension().is_some_and(|extension| extension == "parquet") {
        return read_parquet(path).map_err(|error| in_file(format!("cannot be read: {error}")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| in_file(format!("cannot be read: {error}")))?;
    if text.trim_start().starts_with('[') {
        return serde_json::from_str(&text).map_err(|error| in_file(format!("is no list of objects: {error}")));
    }
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| {
            serde_json::from_str(line).map_err(|error| in_file(format!("is no object: {error}")).in_row(index))
        })
        .collect()
}

fn read_parquet(path: &Path) -> Result<Vec<Document>, Box<dyn std::error::Error>> {
    let mut rows = Vec::new();
    for batch in ParquetRecordBatchReaderBuilder::try_new(File::open(path)?)?.build()? {
        let mut writer = WriterBuilder::new().with_explicit_nulls(true).build::<_, JsonArray>(Vec::new());
        writer.write(&batch?)?;
        writer.finish()?;
        let written: Vec<Document> = serde_json::from_slice(&writer.into_inner())?;
        rows.extend(written);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_of_one_type() {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (folder.path().join("one.jsonl"), folder.path().join("other.json"));
        std::fs::write(&one, "{\"n\": 1, \"of\": {\"a\": 1}, \"list\": [1, 2]}\n{\"n\": 2.5, \"list\": [0.5]}\n")
            .unwrap();
        std::fs::write(&other, "[{\"of\": {\"b\": [{\"x\": 1}, {}]}, \"whole\": 7}]").unwrap();
        let rows = read_files(&[one, other]).unwrap();
        let expected = [
            r#"{"n":1.0,"of":{"a":1},"list":[1.0,2.0],"whole":null}"#,
            r#"{"n":2.5,"list":[0.5],"of":null,"whole":null}"#,
            r#"{"of":{"b":[{"x":1},{}]},"whole":7,"list":null,"n":null}"#,
        ];
        let written: Vec<String> = rows.iter().map(|row| serde_json::to_string(row).unwrap()).collect();
        assert_eq!(written, expected);
    }
}
