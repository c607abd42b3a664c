//! What an evaluation found row by row, and its file `examples.parquet`.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, BooleanArray, Float64Array, StringArray, UInt64Array};
use engine::error::StageError;

use crate::compute::inference::Ended;
use crate::data::results::TableWriter;
use crate::metrics::rouge::Rouge;

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
    /// The prediction against the reference.
    pub rouge: Option<Rouge>,
    /// The same as BLEU of this pair alone, from 0 to 100.
    pub bleu: Option<f64>,
    /// Whether they are equal.
    pub exact_match: Option<bool>,
}

impl Example {
    /// A row of which nothing is known yet.
    pub(super) fn new(row: u64) -> Self {
        Self { row, ..Self::default() }
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
        let numbers = |of: fn(&Example) -> Option<f64>| -> ArrayRef {
            Arc::new(examples.iter().map(of).collect::<Float64Array>())
        };
        let counts = |of: fn(&Example) -> Option<u64>| -> ArrayRef {
            Arc::new(examples.iter().map(of).collect::<UInt64Array>())
        };
        let matches: BooleanArray = examples.iter().map(|example| example.exact_match).collect();
        self.0.write([
            ("row", counts(|example| Some(example.row))),
            ("prompt", texts(|example| example.prompt.as_deref())),
            ("reference", texts(|example| example.reference.as_deref())),
            ("prediction", texts(|example| example.prediction.as_deref())),
            ("stop", texts(|example| example.ended.map(Ended::name))),
            ("nll", numbers(|example| example.nll)),
            ("tokens", counts(|example| example.tokens)),
            ("correct", counts(|example| example.correct)),
            ("rouge1", numbers(|example| Some(example.rouge?.rouge1.fmeasure))),
            ("rouge2", numbers(|example| Some(example.rouge?.rouge2.fmeasure))),
            ("rougeL", numbers(|example| Some(example.rouge?.rouge_l.fmeasure))),
            ("rougeLsum", numbers(|example| Some(example.rouge?.rouge_lsum.fmeasure))),
            ("bleu", numbers(|example| example.bleu)),
            ("exact_match", Arc::new(matches)),
        ])
    }

    /// Ends the file.
    ///
    /// # Errors
    /// Fails if the disk refuses.
    pub(super) fn finish(self) -> Result<(), StageError> {
        self.0.finish()
    }
}
