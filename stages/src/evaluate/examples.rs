//! What an evaluation found row by row, and its file `examples.parquet`.

use std::path::Path;

use arrow::array::{ArrayRef, Float64Array, StringArray, UInt64Array};
use engine::error::StageError;

use crate::results;
use crate::rouge::Rouge;

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
    /// Summed negative log-likelihood of the response tokens, in nats.
    pub nll: Option<f64>,
    /// How many response tokens there are.
    pub tokens: Option<u64>,
    /// The prediction against the reference.
    pub rouge: Option<Rouge>,
}

impl Example {
    /// A row of which nothing is known yet.
    pub(super) fn new(row: u64) -> Self {
        Self { row, ..Self::default() }
    }
}

/// Writes the examples into an output's folder.
pub(super) fn write(examples: &[Example], folder: &Path) -> Result<(), StageError> {
    let texts = |of: fn(&Example) -> Option<&str>| -> ArrayRef {
        std::sync::Arc::new(examples.iter().map(of).collect::<StringArray>())
    };
    let numbers = |of: fn(&Example) -> Option<f64>| -> ArrayRef {
        std::sync::Arc::new(examples.iter().map(of).collect::<Float64Array>())
    };
    let counts = |of: fn(&Example) -> Option<u64>| -> ArrayRef {
        std::sync::Arc::new(examples.iter().map(of).collect::<UInt64Array>())
    };
    let columns = [
        ("row", counts(|example| Some(example.row))),
        ("prompt", texts(|example| example.prompt.as_deref())),
        ("reference", texts(|example| example.reference.as_deref())),
        ("prediction", texts(|example| example.prediction.as_deref())),
        ("nll", numbers(|example| example.nll)),
        ("tokens", counts(|example| example.tokens)),
        ("rouge1", numbers(|example| Some(example.rouge?.rouge1.fmeasure))),
        ("rouge2", numbers(|example| Some(example.rouge?.rouge2.fmeasure))),
        ("rougeL", numbers(|example| Some(example.rouge?.rouge_l.fmeasure))),
        ("rougeLsum", numbers(|example| Some(example.rouge?.rouge_lsum.fmeasure))),
    ];
    results::write(&folder.join("examples.parquet"), columns)
}
