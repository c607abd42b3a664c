//! CSV, Parquet and Arrow files, read in batches of rows.

use std::fs::File;
use std::io::{BufRead, BufReader, Seek};
use std::ops::Range;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray};
use arrow::csv::reader::Format as CsvFormat;
use arrow::datatypes::{DataType, Field, Schema};
use arrow::error::ArrowError;
use arrow::ipc::reader::{FileReader, StreamReader};
use arrow::json::writer::{JsonArray, WriterBuilder};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Value};

use super::super::source::{Format, SourceFile};
use super::quotes::Quotes;
use super::{ReadError, Record, Visit, open};

const ROWS_PER_BATCH: usize = 1024;

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>>>;

fn malformed(error: impl std::fmt::Display) -> ReadError {
    ReadError::Malformed(error.to_string())
}

/// The names of the columns.
pub(super) fn columns(file: &SourceFile) -> Result<Vec<String>, ReadError> {
    let schema = match file.format {
        Format::Csv | Format::Tsv => csv_schema(file)?,
        Format::Parquet => parquet(file)?.schema().clone(),
        _ => arrow_batches(file)?.0,
    };
    Ok(schema.fields().iter().map(|field| field.name().clone()).collect())
}

/// How many rows there are.
pub(super) fn count(file: &SourceFile) -> Result<u64, ReadError> {
    match file.format {
        Format::Parquet => {
            let rows = parquet(file)?.metadata().file_metadata().num_rows();
            u64::try_from(rows).map_err(malformed)
        }
        _ => batches(file, &(0..u64::MAX), &[])?
            .0
            .try_fold(0, |rows, batch| Ok(rows + batch.map_err(malformed)?.num_rows() as u64)),
    }
}

/// Reads rows of the wanted columns.
pub(super) fn read(
    file: &SourceFile,
    range: Range<u64>,
    wanted: &[String],
    visit: &mut Visit<'_>,
) -> Result<u64, ReadError> {
    let (batches, mut seen) = batches(file, &range, wanted)?;
    for batch in batches {
        let batch = batch.map_err(malformed)?;
        let rows = batch.num_rows() as u64;
        let from = range.start.saturating_sub(seen).min(rows);
        let to = range.end.saturating_sub(seen).min(rows);
        let batch = batch.slice(from as usize, (to - from) as usize);
        let columns = texts(&batch, wanted, matches!(file.format, Format::Csv | Format::Tsv))?;
        for (offset, fields) in columns.into_iter().enumerate() {
            let number = seen + from + offset as u64 + 1;
            if visit(Ok(Record { fields, number })).is_break() {
                return Ok(seen);
            }
        }
        seen += rows;
        if seen >= range.end {
            break;
        }
    }
    Ok(seen.min(range.end))
}

/// Batches of rows, and the number of rows before the first batch.
fn batches(file: &SourceFile, range: &Range<u64>, wanted: &[String]) -> Result<(Batches, u64), ReadError> {
    match file.format {
        Format::Csv | Format::Tsv => {
            let schema = csv_schema(file)?;
            let reader = arrow::csv::ReaderBuilder::new(schema)
                .with_format(csv_format(file.format))
                .with_batch_size(ROWS_PER_BATCH)
                .build_buffered(Quotes::new(open(&file.path)?, delimiter(file.format)))
                .map_err(malformed)?;
            Ok((Box::new(reader), 0))
        }
        Format::Parquet => {
            let builder = parquet(file)?;
            let rows = u64::try_from(builder.metadata().file_metadata().num_rows()).map_err(malformed)?;
            let from = range.start.min(rows);
            let names: Vec<&str> = wanted.iter().map(String::as_str).collect();
            let roots: Vec<usize> = (0..builder.schema().fields().len())
                .filter(|index| names.is_empty() || names.contains(&builder.schema().field(*index).name().as_str()))
                .collect();
            let mask = ProjectionMask::roots(builder.parquet_schema(), roots);
            let reader = builder
                .with_projection(mask)
                .with_offset(from as usize)
                .with_limit((range.end.min(rows) - from) as usize)
                .with_batch_size(ROWS_PER_BATCH)
                .build()
                .map_err(malformed)?;
            Ok((Box::new(reader), from))
        }
        _ => Ok((arrow_batches(file)?.1, 0)),
    }
}

fn parquet(file: &SourceFile) -> Result<ParquetRecordBatchReaderBuilder<File>, ReadError> {
    ParquetRecordBatchReaderBuilder::try_new(File::open(&file.path)?).map_err(malformed)
}

fn csv_format(format: Format) -> CsvFormat {
    CsvFormat::default().with_header(true).with_delimiter(delimiter(format))
}

fn delimiter(format: Format) -> u8 {
    if format == Format::Tsv { b'\t' } else { b',' }
}

/// The header's columns, all of them text: what looks like a number in one row may be a text in the next.
fn csv_schema(file: &SourceFile) -> Result<Arc<Schema>, ReadError> {
    let (schema, _) = csv_format(file.format).infer_schema(open(&file.path)?, Some(0)).map_err(malformed)?;
    let fields: Vec<Field> =
        schema.fields().iter().map(|field| Field::new(field.name(), DataType::Utf8, true)).collect();
    Ok(Arc::new(Schema::new(fields)))
}

/// An Arrow file begins with a magic word; what Hugging Face caches is a stream and does not.
fn arrow_batches(file: &SourceFile) -> Result<(Arc<Schema>, Batches), ReadError> {
    let mut reader = BufReader::new(File::open(&file.path)?);
    let is_file = reader.fill_buf()?.starts_with(b"ARROW1");
    reader.rewind()?;
    if is_file {
        let reader = FileReader::try_new(reader, None).map_err(malformed)?;
        Ok((reader.schema(), Box::new(reader)))
    } else {
        let reader = StreamReader::try_new(reader, None).map_err(malformed)?;
        Ok((reader.schema(), Box::new(reader)))
    }
}

/// The rows of a batch as JSON objects. `empty_is_text`: CSV cannot tell an empty text from none, and means the text.
fn texts(batch: &RecordBatch, wanted: &[String], empty_is_text: bool) -> Result<Vec<Map<String, Value>>, ReadError> {
    let schema = batch.schema();
    let times = |name: &String| schema.fields().iter().filter(|field| field.name() == name).count();
    if let Some(twice) = wanted.iter().find(|name| times(name) > 1) {
        return Err(ReadError::Malformed(format!("it has several columns `{twice}`")));
    }
    let mut rows = vec![Map::new(); batch.num_rows()];
    for (field, column) in schema.fields().iter().zip(batch.columns()) {
        if !wanted.is_empty() && !wanted.contains(field.name()) {
            continue;
        }
        let values = match as_text(column)? {
            Some(texts) => texts.iter().map(|text| text.map_or(Value::Null, Value::from)).collect(),
            None => as_json(field.name(), column)?,
        };
        for (row, value) in rows.iter_mut().zip(values) {
            let value = if value.is_null() && empty_is_text { Value::from("") } else { value };
            row.insert(field.name().clone(), value);
        }
    }
    Ok(rows)
}

/// A column of any of Arrow's text types.
fn as_text(column: &ArrayRef) -> Result<Option<StringArray>, ReadError> {
    let is_text = |data_type: &DataType| matches!(data_type, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View);
    let holds_text = match column.data_type() {
        DataType::Dictionary(_, values) => is_text(values),
        other => is_text(other),
    };
    if !holds_text {
        return Ok(None);
    }
    let column = arrow::compute::cast(column, &DataType::Utf8).map_err(malformed)?;
    Ok(Some(column.as_string::<i32>().clone()))
}

/// A column of anything else, such as conversations.
fn as_json(name: &str, column: &ArrayRef) -> Result<Vec<Value>, ReadError> {
    let field = Field::new(name, column.data_type().clone(), true);
    let batch = RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![column.clone()]).map_err(malformed)?;
    let mut writer = WriterBuilder::new().with_explicit_nulls(true).build::<_, JsonArray>(Vec::new());
    writer.write(&batch).and_then(|()| writer.finish()).map_err(malformed)?;
    let rows: Vec<Map<String, Value>> = match writer.into_inner().as_slice() {
        [] => Vec::new(),
        bytes => serde_json::from_slice(bytes).map_err(malformed)?,
    };
    Ok(rows.into_iter().map(|mut row| row.remove(name).unwrap_or(Value::Null)).collect())
}
