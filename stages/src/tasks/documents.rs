//! The rows of a task: local files of JSON, JSON lines or Parquet.

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
/// Fails with the first row that its function cannot be used on.
pub fn processed(task: &Task, mut rows: Vec<Document>) -> Result<Vec<Document>, TaskError> {
    let Some(processor) = task.process_docs else { return Ok(rows) };
    for (index, row) in rows.iter_mut().enumerate() {
        let applied = processor.apply(row);
        applied.map_err(|message| TaskError::key(&task.file, "process_docs", message).in_row(index))?;
    }
    Ok(rows)
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
    Ok(rows.concat())
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
