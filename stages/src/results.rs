//! Small tables of results: one Parquet file, read and written whole.

use std::fs::File;
use std::path::Path;

use arrow::array::{Array, ArrayRef, RecordBatch, StringArray};
use engine::error::{Cause, OrFail, StageError};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

/// Writes columns of equal length.
///
/// # Errors
/// Fails if the disk refuses.
pub fn write<'a>(path: &Path, columns: impl IntoIterator<Item = (&'a str, ArrayRef)>) -> Result<(), StageError> {
    let nullable = columns.into_iter().map(|(name, column)| (name, column, true));
    let batch = RecordBatch::try_from_iter_with_nullable(nullable).expect("columns are equally long");
    let failed = || format!("cannot write `{}`", path.display());
    let file = File::create(path).or_fail(Cause::Machine, failed)?;
    let properties = WriterProperties::builder()
        .set_created_by("pipeline".to_owned())
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .build();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).or_fail(Cause::Machine, failed)?;
    writer.write(&batch).or_fail(Cause::Machine, failed)?;
    writer.close().or_fail(Cause::Machine, failed)?;
    Ok(())
}

/// Reads a column of text; an absent value is empty.
///
/// # Errors
/// Fails if there is no such file or column.
pub fn read_texts(path: &Path, column: &str) -> Result<Vec<String>, StageError> {
    let failed = || format!("cannot read `{}`", path.display());
    let file = File::open(path).or_fail(Cause::BadData, failed)?;
    let batches = ParquetRecordBatchReaderBuilder::try_new(file)
        .and_then(|builder| builder.build())
        .or_fail(Cause::BadData, failed)?;
    let mut texts = Vec::new();
    for batch in batches {
        let batch = batch.or_fail(Cause::BadData, failed)?;
        let values = batch
            .column_by_name(column)
            .and_then(|values| values.as_any().downcast_ref::<StringArray>())
            .ok_or_else(|| StageError::bad_data(format!("`{}` has no text column `{column}`", path.display())))?;
        texts.extend(
            (0..values.len()).map(|at| if values.is_null(at) { String::new() } else { values.value(at).to_owned() }),
        );
    }
    Ok(texts)
}
