//! A table on disk: Parquet parts of a fixed number of rows, and the list of them.

mod encoder;

use std::fs::File;
use std::path::{Path, PathBuf};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use arrow::error::ArrowError;
use cache::Digest;
use engine::error::{Cause, StageError};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReaderBuilder};
use parquet::basic::{Compression, Encoding, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::SerializedFileWriter;
use serde::{Deserialize, Serialize};

use encoder::{Encoded, GroupEncoder};

/// Rows in each part but the last.
pub const ROWS_PER_PART: u64 = 8192;

/// Rows that are decoded together: small, so that reading one row in the middle of a part stays cheap.
pub(super) const ROWS_PER_GROUP: usize = 1024;

/// A group ends with the row that takes its values to so many bytes.
pub(super) const BYTES_PER_GROUP: usize = 512 << 10;

/// So many groups are being encoded at a time, on the threads of the pool that the writer is called in.
const GROUPS_ENCODED: usize = 8;

pub(super) const PARTS_FILE: &str = "parts.json";

/// Whom Parquet files name as their author.
pub(super) const CREATED_BY: &str = "pipeline";

const FORMAT: u32 = 1;

/// Why a table cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// A file cannot be read or written.
    #[error("cannot access `{}`", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A part is not the Parquet it should be.
    #[error("cannot use `{}` as Parquet", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A description or list is not what this version writes.
    #[error("cannot understand `{}`: {what}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A row beyond the last was asked for.
    #[error("row {index} does not exist: there are {rows} rows")]
    NoSuchRow {
        /// The row asked for.
        index: u64,
        /// How many there are.
        rows: u64,
    },
}

impl From<TableError> for StageError {
    fn from(error: TableError) -> Self {
        let (cause, message) = match &error {
            TableError::Io { .. } => (Cause::Machine, "cannot read or write a table"),
            TableError::Parquet { .. } | TableError::Form { .. } => (Cause::BadData, "a table cannot be used"),
            TableError::NoSuchRow { .. } => (Cause::Internal, "a table was read beyond its end"),
        };
        let help = error.is_full_disk().then(|| "free some space, or take a home on another disk: `--home`".to_owned());
        StageError { help, ..StageError::new(cause, message).with_source(error) }
    }
}

impl TableError {
    pub(super) fn form(path: &Path, what: impl Into<String>) -> Self {
        Self::Form { path: path.to_owned(), what: what.into() }
    }

    fn parquet(path: &Path, source: ParquetError) -> Self {
        let path = path.to_owned();
        match source {
            // That the disk refuses is no fault of the table.
            ParquetError::External(inner) => match inner.downcast::<std::io::Error>() {
                Ok(source) if source.raw_os_error().is_some() => Self::Io { path, source: *source },
                Ok(other) => Self::Parquet { path, source: other },
                Err(other) => Self::Parquet { path, source: other },
            },
            other => Self::Parquet { path, source: other.into() },
        }
    }

    fn arrow(path: &Path, source: ArrowError) -> Self {
        match source {
            ArrowError::ParquetError(_) | ArrowError::IoError(..) => Self::parquet(path, source.into()),
            other => Self::Parquet { path: path.to_owned(), source: other.into() },
        }
    }

    fn is_full_disk(&self) -> bool {
        let full = [std::io::ErrorKind::StorageFull, std::io::ErrorKind::QuotaExceeded];
        matches!(self, Self::Io { source, .. } if full.contains(&source.kind()))
    }

    fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, source }
    }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, TableError> {
    let bytes = std::fs::read(path).map_err(TableError::io(path))?;
    serde_json::from_slice(&bytes).map_err(|error| TableError::form(path, error.to_string()))
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartList {
    format: u32,
    rows: u64,
    parts: Vec<Part>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    file: String,
    rows: u64,
    /// Identity of the part's own values, for work that is cached part by part.
    identity: Digest,
}

/// A part as the list of a table names it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Listed {
    pub file: String,
    pub rows: u64,
    /// What its values and the table's attributes come to.
    pub identity: Digest,
}

/// The parts that a list of them names.
pub(super) fn listed_parts(path: &Path) -> Result<Vec<Listed>, TableError> {
    let list: PartList = read_json(path)?;
    Ok(list.parts.into_iter().map(|Part { file, rows, identity }| Listed { file, rows, identity }).collect())
}

/// A longer file is not looked at as a list of parts: this is one of billions of rows.
const LONGEST_LIST: u64 = 64 << 20;

/// Whether a file is the list of parts of a table that lie beside it.
pub fn is_part_list(path: &Path) -> bool {
    let is_named = path.file_name().is_some_and(|name| name == PARTS_FILE);
    if !is_named || !path.metadata().is_ok_and(|found| found.is_file() && found.len() <= LONGEST_LIST) {
        return false;
    }
    let parts = listed_parts(path).unwrap_or_default();
    !parts.is_empty() && parts.iter().all(|part| path.with_file_name(&part.file).is_file())
}

/// Writes a table part by part.
pub(super) struct PartsWriter {
    folder: PathBuf,
    schema: SchemaRef,
    properties: WriterProperties,
    open: Option<OpenPart>,
    list: PartList,
}

/// A part in the making.
struct OpenPart {
    path: PathBuf,
    writer: SerializedFileWriter<File>,
    encoder: GroupEncoder,
    /// Those whose encoding has begun.
    rows: u64,
}

impl PartsWriter {
    /// A writer of tables of this schema, whose values take this form before they are compressed.
    pub(super) fn new(folder: &Path, schema: SchemaRef, encoding: Encoding) -> Self {
        let list = PartList { format: FORMAT, rows: 0, parts: Vec::new() };
        let properties = WriterProperties::builder()
            .set_created_by(CREATED_BY.to_owned())
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            // Texts hardly repeat, and ids take less time and space as they are.
            .set_dictionary_enabled(false)
            .set_encoding(encoding)
            .set_statistics_enabled(EnabledStatistics::None)
            .build();
        Self { folder: folder.to_owned(), schema, properties, open: None, list }
    }

    /// Rows that still fit into the present part.
    pub(super) fn room(&self) -> u64 {
        ROWS_PER_PART - self.open.as_ref().map_or(0, |part| part.rows)
    }

    /// Writes a group of rows, which must fit into the present part.
    pub(super) fn write(&mut self, group: RecordBatch) -> Result<(), TableError> {
        let part = match &mut self.open {
            Some(part) => part,
            None => self.open.insert(begin_part(&self.folder, self.list.parts.len(), &self.schema, &self.properties)?),
        };
        part.rows += group.num_rows() as u64;
        part.encoder.begin(group);
        part.append_until(GROUPS_ENCODED)
    }

    /// Ends the present part, if one is open; `identity` is that of its values.
    pub(super) fn end_part(&mut self, identity: Digest) -> Result<(), TableError> {
        let Some(mut part) = self.open.take() else { return Ok(()) };
        part.append_until(0)?;
        let OpenPart { path, writer, rows, .. } = part;
        writer.close().map_err(|error| TableError::parquet(&path, error))?;
        let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        self.list.parts.push(Part { file, rows, identity });
        self.list.rows += rows;
        Ok(())
    }

    /// Writes the list of parts and returns the number of rows.
    pub(super) fn finish(self) -> Result<u64, TableError> {
        let path = self.folder.join(PARTS_FILE);
        let text = serde_json::to_string_pretty(&self.list).expect("a part list is JSON");
        std::fs::write(&path, text).map_err(TableError::io(&path))?;
        Ok(self.list.rows)
    }
}

fn begin_part(
    folder: &Path,
    number: usize,
    schema: &SchemaRef,
    properties: &WriterProperties,
) -> Result<OpenPart, TableError> {
    let path = folder.join(format!("part-{number:05}.parquet"));
    let file = File::create(&path).map_err(TableError::io(&path))?;
    let opened = ArrowWriter::try_new(file, schema.clone(), Some(properties.clone()))
        .and_then(ArrowWriter::into_serialized_writer)
        .map_err(|error| TableError::parquet(&path, error))?;
    let (writer, columns) = opened;
    Ok(OpenPart { path, writer, encoder: GroupEncoder::new(schema.clone(), columns), rows: 0 })
}

impl OpenPart {
    /// Appends encoded groups to the file until no more than `left` are still to be appended.
    fn append_until(&mut self, left: usize) -> Result<(), TableError> {
        while self.encoder.begun() > left
            && let Some(encoded) = self.encoder.take()
        {
            encoded
                .and_then(|encoded| append(&mut self.writer, encoded))
                .map_err(|error| TableError::parquet(&self.path, error))?;
        }
        Ok(())
    }
}

fn append(writer: &mut SerializedFileWriter<File>, columns: Encoded) -> Result<(), ParquetError> {
    let mut group = writer.next_row_group()?;
    columns.into_iter().try_for_each(|column| column.append_to_row_group(&mut group))?;
    group.close().map(drop)
}

/// Reads a table: any row group by the index of a row in it.
pub(super) struct PartsReader {
    folder: PathBuf,
    list: PartList,
    /// Parquet metadata of the parts met so far.
    metadata: Vec<Option<ArrowReaderMetadata>>,
    /// The rows decoded last.
    group: Option<Group>,
}

/// Consecutive rows, decoded.
struct Group {
    /// Index of the first.
    first: u64,
    /// Their values.
    batch: RecordBatch,
}

impl Group {
    /// Where in the batch a row lies, if it is in it.
    fn position(&self, index: u64) -> Option<usize> {
        let offset = index.checked_sub(self.first)?;
        (offset < self.batch.num_rows() as u64).then_some(offset as usize)
    }
}

impl PartsReader {
    pub(super) fn open(folder: &Path) -> Result<Self, TableError> {
        let path = folder.join(PARTS_FILE);
        let list: PartList = read_json(&path)?;
        if list.format != FORMAT {
            return Err(TableError::form(&path, format!("format {} is not {FORMAT}", list.format)));
        }
        if list.parts.iter().map(|part| part.rows).sum::<u64>() != list.rows {
            return Err(TableError::form(&path, "its parts do not add up to its rows"));
        }
        let metadata = list.parts.iter().map(|_| None).collect();
        Ok(Self { folder: folder.to_owned(), list, metadata, group: None })
    }

    pub(super) fn rows(&self) -> u64 {
        self.list.rows
    }

    /// The files with the rows, in order.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        self.list.parts.iter().map(|part| self.folder.join(&part.file)).collect()
    }

    /// The table's folder.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The decoded batch that holds a row, and the row's place in it. Memory holds one batch at a time.
    pub(super) fn row(&mut self, index: u64) -> Result<(&RecordBatch, usize), TableError> {
        let (group, position) = match self.group.take().and_then(|group| Some((group.position(index)?, group))) {
            Some((position, group)) => (group, position),
            None => {
                let group = self.group_of(index)?;
                let position = group.position(index).expect("the group of a row holds it");
                (group, position)
            }
        };
        Ok((&self.group.insert(group).batch, position))
    }

    /// Decodes the row group that holds a row.
    fn group_of(&mut self, index: u64) -> Result<Group, TableError> {
        let mut first = 0;
        for number in 0..self.list.parts.len() {
            let rows = self.list.parts[number].rows;
            if index < first + rows {
                return self.group_in_part(number, first, index);
            }
            first += rows;
        }
        Err(TableError::NoSuchRow { index, rows: self.list.rows })
    }

    fn group_in_part(&mut self, number: usize, first_of_part: u64, index: u64) -> Result<Group, TableError> {
        let path = self.folder.join(&self.list.parts[number].file);
        let file = File::open(&path).map_err(TableError::io(&path))?;
        let metadata = match &self.metadata[number] {
            Some(metadata) => metadata.clone(),
            None => {
                let metadata = ArrowReaderMetadata::load(&file, ArrowReaderOptions::new())
                    .map_err(|error| TableError::parquet(&path, error))?;
                self.metadata[number].insert(metadata).clone()
            }
        };
        let mut first = first_of_part;
        for group in 0..metadata.metadata().num_row_groups() {
            let rows = metadata.metadata().row_group(group).num_rows() as u64;
            if index < first + rows {
                return Ok(Group { first, batch: decode(&path, file, metadata, group, rows as usize)? });
            }
            first += rows;
        }
        Err(TableError::form(&path, "it has fewer rows than in `parts.json`"))
    }
}

fn decode(
    path: &Path,
    file: File,
    metadata: ArrowReaderMetadata,
    group: usize,
    rows: usize,
) -> Result<RecordBatch, TableError> {
    let schema = metadata.schema().clone();
    let reader = ParquetRecordBatchReaderBuilder::new_with_metadata(file, metadata)
        .with_row_groups(vec![group])
        .with_batch_size(rows.max(1))
        .build()
        .map_err(|error| TableError::parquet(path, error))?;
    let batches: Vec<RecordBatch> = reader.collect::<Result<_, _>>().map_err(|error| TableError::arrow(path, error))?;
    arrow::compute::concat_batches(&schema, &batches).map_err(|error| TableError::arrow(path, error))
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_full_disk_is_the_machines_fault_and_a_broken_table_is_not() {
        let written = |source: ParquetError| StageError::from(TableError::parquet(Path::new("part"), source));
        let full = written(ParquetError::External(Box::new(io::Error::from_raw_os_error(28))));
        assert_eq!(full.cause, Cause::Machine);
        assert!(full.help.unwrap().contains("free some space"));
        for broken in [ParquetError::EOF("cut off".to_owned()), ParquetError::External("no magic".into())] {
            assert_eq!(written(broken).cause, Cause::BadData);
        }
    }
}
