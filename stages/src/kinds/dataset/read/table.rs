//! Parquet and Arrow files, read in batches of rows.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek};
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Float64Type, Schema};
use arrow::error::ArrowError;
use arrow::ipc::reader::{FileReader, StreamReader};
use arrow::json::writer::{JsonArray, WriterBuilder};
use arrow::util::display::array_value_to_string;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Map, Value};

use super::super::flaw::{Flaw, Reason};
use super::super::form::{Format, SourceFile};
use super::open::regular;
use super::{BadRecord, ReadError, Record, Visit, Wanted};
use crate::data::artifact::said::{self, Cells};
use crate::data::number;

/// Rows that are decoded together, where they are short.
const ROWS_PER_BATCH: usize = 1024;

/// What the rows that are decoded together should take at most, going by the average of their row group.
const BYTES_PER_BATCH: i64 = 16 << 20;

/// Rows that are turned into records together.
const ROWS_PER_SLICE: usize = 128;

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>>>;

/// Batches of rows.
struct Table {
    batches: Batches,
    /// The number of rows before the first batch.
    before: u64,
    /// The columns of preferences that this program has written.
    said: HashMap<String, Cells>,
}

fn malformed(error: impl std::fmt::Display) -> ReadError {
    let message = error.to_string();
    ReadError::Malformed(match message.split_once("Disabled feature at compile time: ") {
        Some((_, codec)) => {
            format!("it is compressed with {codec}, which is not read here; zstd, snappy, gzip and lz4 are")
        }
        None => message,
    })
}

/// What the `arrow` and `parquet` crates answer, a panic over a damaged file included.
fn unpanicked<T>(work: impl FnOnce() -> Result<T, ReadError>) -> Result<T, ReadError> {
    let damaged = |_| Err(ReadError::Malformed("it is damaged".to_owned()));
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(damaged)
}

/// The names of the columns.
pub(super) fn columns(file: &SourceFile) -> Result<Vec<String>, ReadError> {
    Ok(schema(file)?.fields().iter().map(|field| field.name().clone()).collect())
}

/// Whether one of these columns is of lists.
pub(super) fn holds_lists(file: &SourceFile, columns: &[&str]) -> Result<bool, ReadError> {
    let schema = schema(file)?;
    let mut asked_for = schema.fields().iter().filter(|field| columns.contains(&field.name().as_str()));
    Ok(asked_for.any(|field| field.data_type().is_list()))
}

fn schema(file: &SourceFile) -> Result<Arc<Schema>, ReadError> {
    unpanicked(|| match file.form.format {
        Format::Parquet => Ok(parquet(file)?.schema().clone()),
        _ => Ok(arrow_batches(file)?.0),
    })
}

/// How many rows there are.
pub(super) fn count(file: &SourceFile) -> Result<u64, ReadError> {
    unpanicked(|| match file.form.format {
        Format::Parquet => {
            let rows = parquet(file)?.metadata().file_metadata().num_rows();
            u64::try_from(rows).map_err(malformed)
        }
        _ => arrow_batches(file)?.1.try_fold(0, |rows, batch| Ok(rows + batch.map_err(malformed)?.num_rows() as u64)),
    })
}

/// Reads rows of the wanted columns.
pub(super) fn read(
    file: &SourceFile,
    range: Range<u64>,
    wanted: &Wanted,
    visit: &mut Visit<'_>,
) -> Result<u64, ReadError> {
    let Table { mut batches, before: mut seen, said } = unpanicked(|| table(file, &range, wanted))?;
    while let Some(batch) = unpanicked(|| batches.next().transpose().map_err(malformed))? {
        let rows = batch.num_rows() as u64;
        let from = range.start.saturating_sub(seen).min(rows);
        let to = range.end.saturating_sub(seen).min(rows);
        let batch = batch.slice(from as usize, (to - from) as usize);
        if visit_batch(&batch, seen + from, wanted, &said, visit)?.is_break() {
            return Ok(seen);
        }
        seen += rows;
        if seen >= range.end {
            break;
        }
    }
    Ok(seen.min(range.end))
}

/// Visits the rows of a batch, of which `before` come before it.
fn visit_batch(
    batch: &RecordBatch,
    before: u64,
    wanted: &Wanted,
    said: &HashMap<String, Cells>,
    visit: &mut Visit<'_>,
) -> Result<ControlFlow<()>, ReadError> {
    for first in (0..batch.num_rows()).step_by(ROWS_PER_SLICE) {
        let slice = batch.slice(first, ROWS_PER_SLICE.min(batch.num_rows() - first));
        for (offset, fields) in unpanicked(|| records(&slice, wanted, said))?.into_iter().enumerate() {
            let number = before + (first + offset) as u64 + 1;
            let record = fields.map(|fields| Record { fields, number }).map_err(|flaw| BadRecord { number, flaw });
            if visit(record).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

fn table(file: &SourceFile, range: &Range<u64>, wanted: &Wanted) -> Result<Table, ReadError> {
    if file.form.format != Format::Parquet {
        let (schema, batches) = arrow_batches(file)?;
        return Ok(Table { batches, before: 0, said: said::columns(&schema, None) });
    }
    let builder = parquet(file)?;
    let metadata = builder.metadata().file_metadata();
    let said = said::columns(builder.schema(), metadata.created_by());
    let rows = u64::try_from(metadata.num_rows()).map_err(malformed)?;
    let from = range.start.min(rows);
    let roots: Vec<usize> = (0..builder.schema().fields().len())
        .filter(|index| wanted.has(builder.schema().field(*index).name()))
        .collect();
    let mask = ProjectionMask::roots(builder.parquet_schema(), roots);
    let batch_size = rows_per_batch(&builder, &mask);
    let reader = builder
        .with_projection(mask)
        .with_offset(from as usize)
        .with_limit((range.end.min(rows) - from) as usize)
        .with_batch_size(batch_size)
        .build()
        .map_err(malformed)?;
    Ok(Table { batches: Box::new(reader), before: from, said })
}

/// Few rows where they are long, so that a batch of them stays small.
fn rows_per_batch(builder: &ParquetRecordBatchReaderBuilder<File>, mask: &ProjectionMask) -> usize {
    let average = |group: &parquet::file::metadata::RowGroupMetaData| {
        let columns = group.columns().iter().enumerate().filter(|(index, _)| mask.leaf_included(*index));
        let bytes: i64 = columns.map(|(_, column)| column.uncompressed_size()).sum();
        bytes / group.num_rows().max(1)
    };
    let longest = builder.metadata().row_groups().iter().map(average).max().unwrap_or(0).max(1);
    usize::try_from(BYTES_PER_BATCH / longest).unwrap_or(1).clamp(1, ROWS_PER_BATCH)
}

fn parquet(file: &SourceFile) -> Result<ParquetRecordBatchReaderBuilder<File>, ReadError> {
    ParquetRecordBatchReaderBuilder::try_new(regular(&file.path)?).map_err(malformed)
}

/// An Arrow file begins with a magic word; what Hugging Face caches is a stream and does not.
fn arrow_batches(file: &SourceFile) -> Result<(Arc<Schema>, Batches), ReadError> {
    let mut reader = BufReader::new(regular(&file.path)?);
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

type Fields = Map<String, Value>;

/// The rows of a batch as JSON objects.
fn records(
    batch: &RecordBatch,
    wanted: &Wanted,
    said: &HashMap<String, Cells>,
) -> Result<Vec<Result<Fields, Flaw>>, ReadError> {
    let schema = batch.schema();
    if let Some(twice) = wanted.ambiguous(schema.fields().iter().map(|field| field.name().as_str())) {
        return Err(ReadError::Malformed(format!("it has several columns `{twice}`")));
    }
    let mut rows: Vec<Result<Fields, Flaw>> = vec![Ok(Map::new()); batch.num_rows()];
    for (field, column) in schema.fields().iter().zip(batch.columns()).filter(|(field, _)| wanted.has(field.name())) {
        for (row, value) in rows.iter_mut().zip(values(field.name(), column)?) {
            match (value, row.as_mut()) {
                (Ok(value), Ok(fields)) => {
                    let value = match (value, said.get(field.name())) {
                        (Value::String(cell), Some(cells)) => cells.value(cell),
                        (value, _) => value,
                    };
                    fields.insert(field.name().clone(), value);
                }
                (Err(flaw), Ok(_)) => *row = Err(flaw),
                (_, Err(_)) => {}
            }
        }
    }
    Ok(rows)
}

fn values(name: &str, column: &ArrayRef) -> Result<Vec<Result<Value, Flaw>>, ReadError> {
    let plain = match column.data_type() {
        DataType::Dictionary(_, values) => values,
        other => other,
    };
    match plain {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
            let column = arrow::compute::cast(column, &DataType::LargeUtf8).map_err(malformed)?;
            Ok(column.as_string::<i64>().iter().map(|text| Ok(text.map_or(Value::Null, Value::from))).collect())
        }
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView => {
            let column = arrow::compute::cast(column, &DataType::LargeBinary).map_err(malformed)?;
            Ok(column.as_binary::<i64>().iter().map(|bytes| text_of(name, bytes)).collect())
        }
        _ => as_json(name, column),
    }
}

/// Bytes are text that was written without saying so, or none.
fn text_of(name: &str, bytes: Option<&[u8]>) -> Result<Value, Flaw> {
    let Some(bytes) = bytes else { return Ok(Value::Null) };
    let text = std::str::from_utf8(bytes);
    text.map(Value::from).map_err(|_| not_utf8(name))
}

fn not_utf8(name: &str) -> Flaw {
    Flaw::new(Reason::NotUtf8, format!("column `{name}` is not UTF-8"))
}

/// A column of anything else, such as conversations.
fn as_json(name: &str, column: &ArrayRef) -> Result<Vec<Result<Value, Flaw>>, ReadError> {
    let column = &match in_utc(column.data_type()) {
        Some(data_type) => arrow::compute::cast(column, &data_type).map_err(malformed)?,
        None => column.clone(),
    };
    let field = Field::new(name, column.data_type().clone(), true);
    let batch = RecordBatch::try_new(Arc::new(Schema::new(vec![field])), vec![column.clone()]).map_err(malformed)?;
    let mut writer = WriterBuilder::new().with_explicit_nulls(true).build::<_, JsonArray>(Vec::new());
    writer.write(&batch).and_then(|()| writer.finish()).map_err(malformed)?;
    let rows: Vec<Map<String, Value>> = match writer.into_inner().as_slice() {
        [] => Vec::new(),
        bytes => serde_json::from_slice(bytes).map_err(malformed)?,
    };
    let mut values: Vec<Value> = rows.into_iter().map(|mut row| row.remove(name).unwrap_or(Value::Null)).collect();
    let mut is_text = vec![true; values.len()];
    restore(&mut values, column, &mut |row| is_text[row] = false)?;
    Ok(values
        .into_iter()
        .zip(is_text)
        .map(|(value, is_text)| is_text.then_some(value).ok_or_else(|| not_utf8(name)))
        .collect())
}

/// The type of the same instants in UTC, where one has the name of a time zone: no offsets of zones are known here.
fn in_utc(data_type: &DataType) -> Option<DataType> {
    let of_item = |item: &Field| Some(Arc::new(item.clone().with_data_type(in_utc(item.data_type())?)));
    match data_type {
        DataType::Timestamp(unit, Some(zone)) if !zone.starts_with(['+', '-']) => {
            Some(DataType::Timestamp(*unit, Some("+00:00".into())))
        }
        DataType::List(item) => of_item(item).map(DataType::List),
        DataType::LargeList(item) => of_item(item).map(DataType::LargeList),
        DataType::FixedSizeList(item, length) => Some(DataType::FixedSizeList(of_item(item)?, *length)),
        DataType::Struct(fields) => {
            let changed = fields.iter().any(|field| in_utc(field.data_type()).is_some());
            let fields = fields.iter().map(|field| of_item(field).unwrap_or_else(|| Arc::clone(field)));
            changed.then(|| DataType::Struct(fields.collect()))
        }
        _ => None,
    }
}

/// Puts in their places what the writer of JSON makes something else of: floats that are not finite, null; those of 32
/// bits, other numbers than Python reads; decimals, floats; bytes, which are text that was written without saying so,
/// hexadecimal digits. Of which values bytes are no text, `not_utf8` is told.
fn restore(values: &mut [Value], column: &ArrayRef, not_utf8: &mut dyn FnMut(usize)) -> Result<(), ReadError> {
    if !is_changed_by_json(column.data_type()) {
        return Ok(());
    }
    if let Some(column) = column.as_map_opt() {
        let keys = arrow::compute::cast(column.keys(), &DataType::Utf8).map_err(malformed)?;
        for (index, value) in values.iter_mut().enumerate() {
            let Value::Object(entries) = value else { continue };
            let (begin, length) = (column.value_offsets()[index] as usize, column.value_length(index) as usize);
            let keys = (begin..begin + length).map(|at| keys.as_string::<i32>().value(at));
            let mut items: Vec<Value> = keys.clone().map(|key| entries.get(key).cloned().unwrap_or_default()).collect();
            restore(&mut items, &column.values().slice(begin, length), &mut |_| not_utf8(index))?;
            entries.extend(keys.map(str::to_owned).zip(items));
        }
        return Ok(());
    }
    if let Some(column) = column.as_struct_opt() {
        for (name, column) in column.column_names().into_iter().zip(column.columns()) {
            let take = |value: &mut Value| value.get_mut(name).map(Value::take).unwrap_or_default();
            let mut fields: Vec<Value> = values.iter_mut().map(take).collect();
            restore(&mut fields, column, not_utf8)?;
            for (value, field) in values.iter_mut().zip(fields) {
                if let Some(place) = value.get_mut(name) {
                    *place = field;
                }
            }
        }
        return Ok(());
    }
    let floats = match column.data_type() {
        DataType::Float16 | DataType::Float32 | DataType::Float64 => {
            Some(arrow::compute::cast(column, &DataType::Float64).map_err(malformed)?)
        }
        _ => None,
    };
    for (index, value) in values.iter_mut().enumerate().filter(|(index, _)| column.is_valid(*index)) {
        let items = match column.data_type() {
            DataType::List(_) => column.as_list::<i32>().value(index),
            DataType::LargeList(_) => column.as_list::<i64>().value(index),
            DataType::FixedSizeList(..) => column.as_fixed_size_list().value(index),
            DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
                let bytes = arrow::compute::cast(&column.slice(index, 1), &DataType::LargeBinary).map_err(malformed)?;
                match std::str::from_utf8(bytes.as_binary::<i64>().value(0)) {
                    Ok(text) => *value = text.into(),
                    Err(_) => not_utf8(index),
                }
                continue;
            }
            decimal if decimal.is_decimal() => {
                *value = number::decimal(&array_value_to_string(column, index).map_err(malformed)?);
                continue;
            }
            _ => {
                let floats = floats.as_ref().map(|floats| floats.as_primitive::<Float64Type>().value(index));
                *value = floats.map_or_else(|| value.take(), number::float);
                continue;
            }
        };
        if let Value::Array(values) = value {
            restore(values, &items, &mut |_| not_utf8(index))?;
        }
    }
    Ok(())
}

/// Whether a column holds what its JSON does not have as it is.
fn is_changed_by_json(data_type: &DataType) -> bool {
    match data_type {
        DataType::Float16 | DataType::Float32 | DataType::Float64 => true,
        DataType::List(item) | DataType::LargeList(item) | DataType::FixedSizeList(item, _) => {
            is_changed_by_json(item.data_type())
        }
        DataType::Map(entries, _) => is_changed_by_json(entries.data_type()),
        DataType::Struct(fields) => fields.iter().any(|field| is_changed_by_json(field.data_type())),
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => true,
        other => other.is_decimal(),
    }
}
