//! Reading rows out of files, one after the other: memory does not grow with their number.

mod delimited;
mod json;
mod open;
mod quotes;
mod table;
mod text;

use std::collections::HashSet;
use std::io;
use std::ops::{ControlFlow, Range};

use engine::error::{Cause, StageError};
use serde_json::{Map, Value};

use super::SampleBy;
use super::flaw::{Flaw, Reason, TO_UTF8};
use super::form::{Format, SourceFile};

/// How many rows are looked at to learn which columns there are, of forms that do not say.
const ROWS_LOOKED_AT: usize = 64;

/// A row as a file holds it.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Its values by column.
    pub fields: Map<String, Value>,
    /// Its place in the file, from 1: the line it begins in where a form has lines, else the number of the row.
    pub number: u64,
}

/// A row that is not one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadRecord {
    /// Its place in the file, from 1.
    pub number: u64,
    /// What is wrong.
    pub flaw: Flaw,
}

impl BadRecord {
    fn new(number: u64, reason: Reason, problem: impl Into<String>) -> Self {
        Self { number, flaw: Flaw::new(reason, problem) }
    }

    fn too_long(number: u64) -> Self {
        Self::new(number, Reason::TooLong, format!("it is longer than {} MiB", open::LONGEST >> 20))
    }
}

/// How files are read, where their form leaves a choice.
#[derive(Debug, Clone)]
pub struct Reading {
    /// What is one row of a plain text file.
    pub sample_by: SampleBy,
    /// The key under which a JSON object holds the rows.
    pub field: Option<String>,
}

impl Default for Reading {
    /// As `dataset` reads where nothing else is said.
    fn default() -> Self {
        Self { sample_by: SampleBy::Line, field: None }
    }
}

/// Which columns of a table are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    All,
    /// Those of these names.
    Named(Vec<String>),
}

impl Wanted {
    /// Whether a column is read.
    pub fn has(&self, column: &str) -> bool {
        match self {
            Self::All => true,
            Self::Named(names) => names.iter().any(|name| name == column),
        }
    }

    /// A column that may be asked for and is there more than once. What has no name cannot be asked for.
    fn ambiguous<'a>(&'a self, mut columns: impl Iterator<Item = &'a str> + Clone) -> Option<&'a str> {
        let Self::Named(names) = self else {
            let mut seen = HashSet::new();
            return columns.find(|column| !column.is_empty() && !seen.insert(*column));
        };
        names.iter().map(String::as_str).find(|name| columns.clone().filter(|column| column == name).count() > 1)
    }
}

/// What is done with each row.
pub type Sink<'a> = dyn FnMut(Result<Record, BadRecord>) -> Result<ControlFlow<()>, StageError> + 'a;

/// A file that cannot be read on.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The disk refuses.
    #[error("cannot read the file")]
    Io(#[source] io::Error),
    /// It is not what its extension says.
    #[error("{0}")]
    Malformed(String),
    /// It is text of another encoding.
    #[error("it is UTF-16, and UTF-8 is expected")]
    Utf16,
    /// The names of its columns are text of another encoding.
    #[error("its header is not UTF-8")]
    HeaderNotUtf8,
    /// It is compressed, and its name does not say so.
    #[error("it is compressed with {kind}, and its name does not end in `.{extension}`")]
    Compressed {
        /// With what.
        kind: &'static str,
        /// What its name should end in.
        extension: &'static str,
    },
}

impl ReadError {
    fn help(&self) -> Option<&'static str> {
        match self {
            Self::Io(_) => None,
            Self::Malformed(_) => Some("correct the file, generate or fetch it again, or leave it out of `source`"),
            Self::Utf16 => Some("convert it: `iconv -f UTF-16 -t UTF-8 FILE > NEW_FILE`"),
            Self::HeaderNotUtf8 => Some(TO_UTF8),
            Self::Compressed { .. } => Some("add that ending to its name"),
        }
    }
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => Self::Malformed(error.to_string()),
            _ => Self::Io(error),
        }
    }
}

impl SourceFile {
    /// The columns: the header, the schema, or those that the first rows have.
    ///
    /// # Errors
    /// Fails where the file cannot be read that far.
    pub fn columns(&self, reading: &Reading) -> Result<Vec<String>, StageError> {
        match self.form.format {
            Format::Json | Format::JsonLines => {
                let mut columns: Vec<String> = Vec::new();
                let mut looked_at = 0;
                self.read(0..u64::MAX, &Wanted::All, reading, &mut |record| {
                    if let Ok(Record { fields, .. }) = record {
                        let new: Vec<String> =
                            fields.into_iter().map(|(name, _)| name).filter(|name| !columns.contains(name)).collect();
                        columns.extend(new);
                        looked_at += 1;
                    }
                    Ok(if looked_at < ROWS_LOOKED_AT { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
                })?;
                Ok(columns)
            }
            Format::Csv | Format::Tsv => delimited::header(self).map_err(|error| self.failed(error)),
            Format::Parquet | Format::Arrow => table::columns(self).map_err(|error| self.failed(error)),
            Format::Text => Ok(vec!["text".to_owned()]),
        }
    }

    /// Whether one of these columns holds lists: by the schema, or by the first rows, none of which may have strings
    /// alone in them.
    ///
    /// # Errors
    /// Fails where the file cannot be read that far.
    pub fn holds_lists(&self, columns: &[&str], reading: &Reading) -> Result<bool, StageError> {
        match self.form.format {
            Format::Json | Format::JsonLines => {
                let (mut lists, mut texts, mut looked_at) = (false, false, 0);
                self.read(0..u64::MAX, &Wanted::All, reading, &mut |record| {
                    if let Ok(Record { fields, .. }) = record {
                        let mut values = columns.iter().filter_map(|column| fields.get(*column));
                        let has_list = values.clone().any(Value::is_array);
                        texts = !has_list && values.any(Value::is_string);
                        lists |= has_list;
                        looked_at += 1;
                    }
                    let goes_on = !texts && looked_at < ROWS_LOOKED_AT;
                    Ok(if goes_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
                })?;
                Ok(lists && !texts)
            }
            Format::Parquet | Format::Arrow => table::holds_lists(self, columns).map_err(|error| self.failed(error)),
            Format::Csv | Format::Tsv | Format::Text => Ok(false),
        }
    }

    /// The first row, where it is none that can be used.
    ///
    /// # Errors
    /// Fails where the file cannot be read that far.
    pub fn first_bad_row(&self, reading: &Reading) -> Result<Option<BadRecord>, StageError> {
        let mut bad = None;
        self.read(0..1, &Wanted::All, reading, &mut |record| {
            bad = record.err();
            Ok(ControlFlow::Break(()))
        })?;
        Ok(bad)
    }

    /// How many rows there are, those that cannot be used among them.
    ///
    /// # Errors
    /// Fails where the file cannot be read to its end.
    pub fn count(&self, reading: &Reading) -> Result<u64, StageError> {
        let counted = match self.form.format {
            Format::Json => json::count_values(self, reading.field.as_deref()),
            Format::Csv | Format::Tsv => delimited::count(self),
            Format::Parquet | Format::Arrow => table::count(self),
            Format::JsonLines => text::count(self, SampleBy::Line),
            Format::Text => text::count(self, reading.sample_by),
        };
        counted.map_err(|error| self.failed(error))
    }

    /// Gives the rows of a range to `sink`, until that breaks, and returns how many rows the file was found to have, up
    /// to the range's end. Of tables only the columns `wanted` are read.
    ///
    /// # Errors
    /// Fails where the file cannot be read on, and with the sink's own failure.
    pub fn read(
        &self,
        range: Range<u64>,
        wanted: &Wanted,
        reading: &Reading,
        sink: &mut Sink<'_>,
    ) -> Result<u64, StageError> {
        let mut stopped = None;
        let mut careful = |record| {
            sink(record).unwrap_or_else(|error| {
                stopped = Some(error);
                ControlFlow::Break(())
            })
        };
        let read = match self.form.format {
            Format::Json => json::read_values(self, reading.field.as_deref(), range, &mut careful),
            Format::JsonLines => json::read_lines(self, range, &mut careful),
            Format::Csv | Format::Tsv => delimited::read(self, range, wanted, &mut careful),
            Format::Parquet | Format::Arrow => table::read(self, range, wanted, &mut careful),
            Format::Text => text::read(self, range, reading.sample_by, &mut careful),
        };
        match stopped {
            Some(error) => Err(error),
            None => read.map_err(|error| self.failed(error)),
        }
    }

    fn failed(&self, error: ReadError) -> StageError {
        let cause = match &error {
            ReadError::Io(_) => Cause::Machine,
            ReadError::Malformed(_) | ReadError::Utf16 | ReadError::HeaderNotUtf8 | ReadError::Compressed { .. } => {
                Cause::BadData
            }
        };
        let help = error.help().map(str::to_owned);
        StageError { help, ..StageError::new(cause, format!("cannot read `{}`", self.name)).with_source(error) }
    }

    /// The place of a row, for messages.
    pub fn place(&self, number: u64) -> String {
        let unit = if self.form.format.has_lines() { "line" } else { "row" };
        format!("`{}`, {unit} {number}", self.name)
    }
}

/// What the readers call with each row of the range.
type Visit<'a> = dyn FnMut(Result<Record, BadRecord>) -> ControlFlow<()> + 'a;

#[cfg(test)]
mod tests;
