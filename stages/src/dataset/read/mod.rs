//! Reading rows out of files, one after the other: memory does not grow with their number.

mod json;
mod quotes;
mod table;
mod text;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::path::Path;

use engine::error::{Cause, StageError};
use serde_json::{Map, Value};

use super::SampleBy;
use super::source::{Format, SourceFile};

/// A row as a file holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Its values by column.
    pub fields: Map<String, Value>,
    /// Its place in the file, from 1: a line where rows are lines, else a row.
    pub number: u64,
}

/// A row that is not one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadRecord {
    /// Its place in the file, from 1.
    pub number: u64,
    /// What is wrong.
    pub problem: String,
}

/// What is done with each row.
pub type Sink<'a> = dyn FnMut(Result<Record, BadRecord>) -> Result<(), StageError> + 'a;

/// A file that cannot be read on.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The disk refuses.
    #[error("cannot read the file")]
    Io(#[from] std::io::Error),
    /// It is not what its extension says.
    #[error("{0}")]
    Malformed(String),
}

impl SourceFile {
    /// The columns: the header, the schema, or what the first row has.
    ///
    /// # Errors
    /// Fails where the file cannot be read that far.
    pub fn columns(&self) -> Result<Vec<String>, StageError> {
        match self.format {
            Format::Json | Format::JsonLines => {
                let mut columns = Vec::new();
                self.read(0..1, &[], SampleBy::Line, &mut |record| {
                    let record = record.map_err(|bad| self.bad_row(&bad))?;
                    columns = record.fields.keys().cloned().collect();
                    Ok(())
                })?;
                Ok(columns)
            }
            Format::Csv | Format::Tsv | Format::Parquet | Format::Arrow => {
                table::columns(self).map_err(|error| self.failed(error))
            }
            Format::Text => Ok(vec!["text".to_owned()]),
        }
    }

    /// How many rows there are.
    ///
    /// # Errors
    /// Fails where the file cannot be read to its end.
    pub fn count(&self, sample_by: SampleBy) -> Result<u64, StageError> {
        let counted = match self.format {
            Format::Json => json::count_values(&self.path),
            Format::Csv | Format::Tsv | Format::Parquet | Format::Arrow => table::count(self),
            Format::JsonLines => text::count(&self.path, SampleBy::Line),
            Format::Text => text::count(&self.path, sample_by),
        };
        counted.map_err(|error| self.failed(error))
    }

    /// Gives the rows of a range to `sink` and returns how many rows the file was found to have, up to the range's end.
    /// Of tables only the columns `wanted` are read; all of them where that is empty.
    ///
    /// # Errors
    /// Fails where the file cannot be read on, and with the sink's own failure.
    pub fn read(
        &self,
        range: Range<u64>,
        wanted: &[String],
        sample_by: SampleBy,
        sink: &mut Sink<'_>,
    ) -> Result<u64, StageError> {
        let mut stopped = None;
        let mut careful = |record| match sink(record) {
            Ok(()) => std::ops::ControlFlow::Continue(()),
            Err(error) => {
                stopped = Some(error);
                std::ops::ControlFlow::Break(())
            }
        };
        let read = match self.format {
            Format::Json => json::read_values(&self.path, range, &mut careful),
            Format::JsonLines => json::read_lines(&self.path, range, &mut careful),
            Format::Csv | Format::Tsv | Format::Parquet | Format::Arrow => {
                table::read(self, range, wanted, &mut careful)
            }
            Format::Text => text::read(&self.path, range, sample_by, &mut careful),
        };
        match stopped {
            Some(error) => Err(error),
            None => read.map_err(|error| self.failed(error)),
        }
    }

    fn failed(&self, error: ReadError) -> StageError {
        let cause = match &error {
            ReadError::Io(_) => Cause::Machine,
            ReadError::Malformed(_) => Cause::BadData,
        };
        StageError::new(cause, format!("cannot read `{}`", self.name)).with_source(error)
    }

    /// The failure over a row that cannot be used.
    pub fn bad_row(&self, bad: &BadRecord) -> StageError {
        let place = match self.format {
            Format::JsonLines => "line",
            Format::Text => "line",
            Format::Json | Format::Csv | Format::Tsv | Format::Parquet | Format::Arrow => "row",
        };
        StageError::bad_data(format!("`{}`, {place} {}: {}", self.name, bad.number, bad.problem))
            .with_help("mend the row, or set `on_bad_row: drop` to leave such rows out")
    }
}

/// What the readers call with each row of the range.
type Visit<'a> = dyn FnMut(Result<Record, BadRecord>) -> std::ops::ControlFlow<()> + 'a;

/// Opens a file behind its byte order mark.
fn open(path: &Path) -> Result<BufReader<File>, ReadError> {
    let mut reader = BufReader::with_capacity(1 << 16, File::open(path)?);
    let start = reader.fill_buf()?;
    if start.starts_with(b"\xEF\xBB\xBF") {
        reader.consume(3);
    } else if start.starts_with(b"\xFF\xFE") || start.starts_with(b"\xFE\xFF") {
        return Err(ReadError::Malformed("it is UTF-16, and UTF-8 is expected".to_owned()));
    }
    Ok(reader)
}

#[cfg(test)]
mod tests;
