//! Tables of results, one Parquet file each: written a few rows at a time and read in batches, so that a million rows
//! cost no more memory than a few.

use std::fs::File;
use std::path::{Path, PathBuf};

use arrow::array::{Array, ArrayRef, RecordBatch, StringArray};
use engine::error::{Cause, OrFail, StageError};
use parquet::arrow::ArrowWriter;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder};
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

/// A row group ends after so many bytes; until then it is held in memory.
const ROW_GROUP_BYTES: usize = 16 << 20;

/// Rows that are read at once.
const ROWS_PER_READ: usize = 512;

/// Writes a table.
pub struct TableWriter {
    path: PathBuf,
    /// Made with the first rows, whose columns are those of the table.
    writer: Option<ArrowWriter<File>>,
}

impl TableWriter {
    /// A table at a path, where nothing lies yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path, writer: None }
    }

    /// Adds rows, as columns of equal length; every call gives the same columns.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub fn write<'a>(&mut self, columns: impl IntoIterator<Item = (&'a str, ArrayRef)>) -> Result<(), StageError> {
        let failed = || format!("cannot write `{}`", self.path.display());
        let nullable = columns.into_iter().map(|(name, column)| (name, column, true));
        let batch = RecordBatch::try_from_iter_with_nullable(nullable).expect("columns are equally long");
        let writer = match &mut self.writer {
            Some(writer) => writer,
            none => {
                let file = File::create(&self.path).or_fail(Cause::Machine, failed)?;
                let properties = WriterProperties::builder()
                    .set_created_by("pipeline".to_owned())
                    .set_compression(Compression::ZSTD(ZstdLevel::default()))
                    .build();
                let writer = ArrowWriter::try_new(file, batch.schema(), Some(properties));
                none.insert(writer.or_fail(Cause::Machine, failed)?)
            }
        };
        writer.write(&batch).or_fail(Cause::Machine, failed)?;
        if writer.in_progress_size() >= ROW_GROUP_BYTES {
            writer.flush().or_fail(Cause::Machine, failed)?;
        }
        Ok(())
    }

    /// Ends the table.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub fn finish(self) -> Result<(), StageError> {
        let Some(writer) = self.writer else { return Ok(()) };
        writer.close().or_fail(Cause::Machine, || format!("cannot write `{}`", self.path.display()))?;
        Ok(())
    }
}

/// Reads columns of a table, a batch at a time.
pub struct TableReader {
    path: PathBuf,
    batches: ParquetRecordBatchReader,
}

impl TableReader {
    /// Opens a table.
    ///
    /// # Errors
    /// Fails if there is no such file, or it lacks a column.
    pub fn open(path: &Path, columns: &[&str]) -> Result<Self, StageError> {
        let failed = || format!("cannot read `{}`", path.display());
        let file = File::open(path).or_fail(Cause::BadData, failed)?;
        let builder = ParquetRecordBatchReaderBuilder::try_new(file).or_fail(Cause::BadData, failed)?;
        if let Some(missing) = columns.iter().find(|name| builder.schema().field_with_name(name).is_err()) {
            return Err(StageError::bad_data(format!("`{}` has no column `{missing}`", path.display())));
        }
        let mask = ProjectionMask::columns(builder.parquet_schema(), columns.iter().copied());
        let batches = builder.with_projection(mask).with_batch_size(ROWS_PER_READ).build();
        Ok(Self { path: path.to_owned(), batches: batches.or_fail(Cause::BadData, failed)? })
    }

    /// The next rows; `None` at the end.
    ///
    /// # Errors
    /// Fails if the file is damaged.
    pub fn next_batch(&mut self) -> Result<Option<RecordBatch>, StageError> {
        let batch = self.batches.next().transpose();
        batch.or_fail(Cause::BadData, || format!("cannot read `{}`", self.path.display()))
    }

    /// A column of a batch, as the array that it is to be.
    ///
    /// # Errors
    /// Fails if it is another.
    pub fn column<'a, A: Array + 'static>(&self, batch: &'a RecordBatch, name: &str) -> Result<&'a A, StageError> {
        let values = batch.column_by_name(name).and_then(|values| values.as_any().downcast_ref());
        let of_another_type = || format!("column `{name}` of `{}` is of another type", self.path.display());
        values.ok_or_else(|| StageError::bad_data(of_another_type()))
    }
}

/// Reads columns of text, a batch at a time.
pub struct TextReader {
    table: TableReader,
    columns: Vec<String>,
}

impl TextReader {
    /// Opens a table.
    ///
    /// # Errors
    /// Fails if there is no such file, or it lacks a column.
    pub fn open(path: &Path, columns: &[&str]) -> Result<Self, StageError> {
        let table = TableReader::open(path, columns)?;
        Ok(Self { table, columns: columns.iter().map(|&name| name.to_owned()).collect() })
    }

    /// The next rows, column by column; an absent value is empty. `None` at the end.
    ///
    /// # Errors
    /// Fails if the file is damaged or a column is no text.
    pub fn next_rows(&mut self) -> Result<Option<Vec<Vec<String>>>, StageError> {
        let Some(batch) = self.table.next_batch()? else { return Ok(None) };
        let texts = self.columns.iter().map(|name| {
            let values: &StringArray = self.table.column(&batch, name)?;
            Ok(values.iter().map(|value| value.unwrap_or_default().to_owned()).collect())
        });
        texts.collect::<Result<_, StageError>>().map(Some)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::UInt64Array;

    use super::*;

    #[test]
    fn what_is_written_in_pieces_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("table.parquet");
        let mut writer = TableWriter::new(path.clone());
        for piece in 0..3_u64 {
            let numbers: UInt64Array = (0..700).map(|row| Some(piece * 700 + row)).collect();
            let texts: StringArray = (0..700).map(|row| (row % 7 > 0).then(|| format!("{piece}.{row}"))).collect();
            writer.write([("row", Arc::new(numbers) as ArrayRef), ("text", Arc::new(texts))]).unwrap();
        }
        writer.finish().unwrap();
        let mut reader = TextReader::open(&path, &["text"]).unwrap();
        let mut found = Vec::new();
        while let Some(mut columns) = reader.next_rows().unwrap() {
            assert!(columns[0].len() <= ROWS_PER_READ);
            found.append(&mut columns[0]);
        }
        assert_eq!(found.len(), 2100);
        assert_eq!((found[0].as_str(), found[1].as_str(), found[2099].as_str()), ("", "0.1", "2.699"));
        assert!(TextReader::open(&path, &["other"]).is_err());
        assert!(TextReader::open(&path, &["row"]).unwrap().next_rows().is_err());
    }
}
