//! `log_probs.parquet`: a record for each document, in the order of the tokens or packs.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{Float64Array, UInt64Array};
use engine::error::{Cause, OrFail, StageError};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde::{Deserialize, Serialize};

use crate::data::results::TableWriter;

/// The file.
const TABLE: &str = "log_probs.parquet";

/// Documents that are written together.
const GROUP: usize = 1 << 14;

/// A document.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Summed log-probability of its targets, in nats.
    pub log_prob: f64,
    /// Number of its targets.
    pub targets: u64,
}

/// Writes the file of an output's folder.
pub(super) struct Writer {
    table: TableWriter,
    waiting: Vec<Record>,
    documents: u64,
    log_prob: f64,
    targets: u64,
}

impl Writer {
    /// Begins it.
    pub(super) fn create(folder: &Path) -> Self {
        let table = TableWriter::new(folder.join(TABLE));
        Self { table, waiting: Vec::new(), documents: 0, log_prob: 0.0, targets: 0 }
    }

    /// Adds documents.
    pub(super) fn write(&mut self, records: &[Record]) -> Result<(), StageError> {
        self.waiting.extend_from_slice(records);
        self.documents += records.len() as u64;
        self.log_prob += records.iter().map(|record| record.log_prob).sum::<f64>();
        self.targets += records.iter().map(|record| record.targets).sum::<u64>();
        if self.waiting.len() >= GROUP { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), StageError> {
        let records = std::mem::take(&mut self.waiting);
        let log_probs: Float64Array = records.iter().map(|record| Some(record.log_prob)).collect();
        let targets: UInt64Array = records.iter().map(|record| Some(record.targets)).collect();
        self.table.write([("log_prob", Arc::new(log_probs) as _), ("targets", Arc::new(targets) as _)])
    }

    /// Ends it: documents, the sum of their log-probabilities, their targets.
    pub(super) fn finish(mut self) -> Result<(u64, f64, u64), StageError> {
        self.flush()?;
        self.table.finish()?;
        Ok((self.documents, self.log_prob, self.targets))
    }
}

/// The records of an artefact's folder.
///
/// # Errors
/// Fails where the file is not what this stage writes.
pub(crate) fn read(folder: &Path) -> Result<Vec<Record>, StageError> {
    let path = folder.join(TABLE);
    let unreadable = || format!("cannot read `{}`", path.display());
    let file = File::open(&path).or_fail(Cause::BadData, unreadable)?;
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).or_fail(Cause::BadData, unreadable)?;
    let mut records = Vec::new();
    for batch in reader.build().or_fail(Cause::BadData, unreadable)? {
        let batch = batch.or_fail(Cause::BadData, unreadable)?;
        let column = |name: &str| batch.column_by_name(name);
        let log_probs = column("log_prob").and_then(|array| array.as_any().downcast_ref::<Float64Array>());
        let targets = column("targets").and_then(|array| array.as_any().downcast_ref::<UInt64Array>());
        let (Some(log_probs), Some(targets)) = (log_probs, targets) else {
            return Err(StageError::bad_data(unreadable()));
        };
        let rows = log_probs.values().iter().zip(targets.values());
        records.extend(rows.map(|(&log_prob, &targets)| Record { log_prob, targets }));
    }
    Ok(records)
}
