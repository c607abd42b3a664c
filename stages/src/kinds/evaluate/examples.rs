//! What an evaluation found row by row, and its file `examples.parquet`.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Float64Array, StringArray, UInt64Array};
use engine::error::StageError;

use crate::compute::inference::Ended;
use crate::data::results::TableWriter;
use crate::metrics::{Column, Metric};

/// One row: what the model made of it. What was not measured is absent.
#[derive(Debug, Clone, Default)]
pub(super) struct Example {
    /// Index of the row.
    pub row: u64,
    /// The prompt as the model sees it.
    pub prompt: Option<String>,
    /// The response that the row gives.
    pub reference: Option<String>,
    /// The model's own.
    pub prediction: Option<String>,
    /// Why it ended.
    pub ended: Option<Ended>,
    /// Summed negative log-likelihood of the response tokens, in nats.
    pub nll: Option<f64>,
    /// How many response tokens there are.
    pub tokens: Option<u64>,
    /// How many of them the model finds the most likely.
    pub correct: Option<u64>,
    /// What the columns of metrics have for it.
    pub cells: Vec<(Column, f64)>,
}

impl Example {
    /// A row of which nothing is known yet.
    pub(super) fn new(row: u64) -> Self {
        Self { row, ..Self::default() }
    }

    fn cell(&self, column: Column) -> Option<f64> {
        self.cells.iter().find(|(known, _)| *known == column).map(|(_, cell)| *cell)
    }
}

/// Writes examples, a group at a time.
pub(super) struct ExamplesWriter(TableWriter);

impl ExamplesWriter {
    /// Begins the file of an output's folder.
    pub(super) fn create(folder: &Path) -> Self {
        Self(TableWriter::new(folder.join("examples.parquet")))
    }

    /// Adds examples.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub(super) fn write(&mut self, examples: &[Example]) -> Result<(), StageError> {
        let texts = |of: fn(&Example) -> Option<&str>| -> ArrayRef {
            Arc::new(examples.iter().map(of).collect::<StringArray>())
        };
        let of_metric = |column: &Column| -> (&'static str, ArrayRef) {
            let cells = examples.iter().map(|example| example.cell(*column));
            match *column {
                Column::Numbers(name) => (name, Arc::new(cells.collect::<Float64Array>())),
                Column::Flags(name) => (name, Arc::new(cells.map(|cell| Some(cell? != 0.0)).collect::<BooleanArray>())),
            }
        };
        let counts = |of: fn(&Example) -> Option<u64>| -> ArrayRef {
            Arc::new(examples.iter().map(of).collect::<UInt64Array>())
        };
        let nll: Float64Array = examples.iter().map(|example| example.nll).collect();
        let of_rows: [(&str, ArrayRef); 8] = [
            ("row", counts(|example| Some(example.row))),
            ("prompt", texts(|example| example.prompt.as_deref())),
            ("reference", texts(|example| example.reference.as_deref())),
            ("prediction", texts(|example| example.prediction.as_deref())),
            ("stop", texts(|example| example.ended.map(Ended::name))),
            ("nll", Arc::new(nll)),
            ("tokens", counts(|example| example.tokens)),
            ("correct", counts(|example| example.correct)),
        ];
        let of_metrics = Metric::ALL.into_iter().flat_map(|metric| metric.definition().columns).map(of_metric);
        self.0.write(of_rows.into_iter().chain(of_metrics))
    }

    /// Ends the file.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub(super) fn finish(self) -> Result<(), StageError> {
        self.0.finish()
    }
}
