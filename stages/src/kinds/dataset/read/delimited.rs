//! CSV and TSV with a header: every value is text, an empty one too.

use std::io::Read;
use std::ops::Range;

use csv::{ByteRecord, ReaderBuilder};
use serde_json::{Map, Value};

use super::super::flaw::Reason;
use super::super::form::{Format, SourceFile};
use super::open::open;
use super::quotes::{Quotes, RowStarts};
use super::{BadRecord, ReadError, Record, Visit, Wanted};

/// The rows behind the header, and the lines in which they begin.
struct Rows {
    reader: csv::Reader<Quotes<Box<dyn Read>>>,
    starts: RowStarts,
    columns: Vec<String>,
}

impl From<csv::Error> for ReadError {
    fn from(error: csv::Error) -> Self {
        match error.into_kind() {
            csv::ErrorKind::Io(error) => error.into(),
            other => Self::Malformed(format!("it is not CSV: {other:?}")),
        }
    }
}

/// Opens a file. A row may have any width: that it is another one than the header's is that row's flaw.
fn rows(file: &SourceFile) -> Result<Rows, ReadError> {
    let delimiter = if file.form.format == Format::Tsv { b'\t' } else { b',' };
    let text: Box<dyn Read> = Box::new(open(file)?);
    let (watched, starts) = Quotes::new(text, delimiter);
    let mut reader = ReaderBuilder::new().delimiter(delimiter).flexible(true).from_reader(watched);
    let names = reader.byte_headers()?.iter().map(|name| String::from_utf8(name.to_vec()));
    let columns = names.collect::<Result<_, _>>();
    let columns = columns.map_err(|_| ReadError::HeaderNotUtf8)?;
    starts.next();
    Ok(Rows { reader, starts, columns })
}

/// The names of the columns.
pub(super) fn header(file: &SourceFile) -> Result<Vec<String>, ReadError> {
    Ok(rows(file)?.columns)
}

impl Rows {
    /// Reads the next row and returns the line that it begins in; nothing at the end of the file.
    fn next(&mut self, record: &mut ByteRecord) -> Result<Option<u64>, ReadError> {
        let there = self.reader.read_byte_record(record)?;
        Ok(there.then(|| self.starts.next().unwrap_or_default()))
    }
}

/// How many rows there are behind the header.
pub(super) fn count(file: &SourceFile) -> Result<u64, ReadError> {
    let mut rows = rows(file)?;
    let mut record = ByteRecord::new();
    let mut count = 0;
    while rows.next(&mut record)?.is_some() {
        count += 1;
    }
    Ok(count)
}

/// Reads the values of the wanted columns.
pub(super) fn read(
    file: &SourceFile,
    range: Range<u64>,
    wanted: &Wanted,
    visit: &mut Visit<'_>,
) -> Result<u64, ReadError> {
    let mut rows = rows(file)?;
    if let Some(twice) = wanted.ambiguous(rows.columns.iter().map(String::as_str)) {
        return Err(ReadError::Malformed(format!("it has several columns `{twice}`")));
    }
    let mut record = ByteRecord::new();
    let mut seen = 0;
    while seen < range.end {
        let Some(line) = rows.next(&mut record)? else { break };
        seen += 1;
        if seen > range.start && visit(row(line, &record, &rows.columns, wanted)).is_break() {
            break;
        }
    }
    Ok(seen)
}

fn row(number: u64, record: &ByteRecord, columns: &[String], wanted: &Wanted) -> Result<Record, BadRecord> {
    if record.len() != columns.len() {
        let problem = format!("it has {}, and the header has {}", values(record.len()), columns.len());
        return Err(BadRecord::new(number, Reason::Ragged, problem));
    }
    let mut fields = Map::new();
    for (name, value) in columns.iter().zip(record).filter(|(name, _)| wanted.has(name)) {
        let text = std::str::from_utf8(value)
            .map_err(|_| BadRecord::new(number, Reason::NotUtf8, format!("column `{name}` is not UTF-8")))?;
        fields.insert(name.clone(), Value::from(text));
    }
    Ok(Record { fields, number })
}

fn values(count: usize) -> String {
    if count == 1 { "1 value".to_owned() } else { format!("{count} values") }
}
