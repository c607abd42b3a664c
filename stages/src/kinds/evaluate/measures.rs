//! The metrics that are asked for, while they measure.

use super::Evaluate;
use super::examples::Example;
use crate::metrics::{Found, Measurement, Metric, Observed, Reads};

pub(super) struct Measures(Vec<(Metric, Box<dyn Measurement>)>);

impl Measures {
    pub(super) fn start(params: &Evaluate) -> Self {
        let asked = Metric::ALL.into_iter().filter(|metric| params.metrics.contains(metric));
        Self(asked.map(|metric| (metric, (metric.definition().start)(&params.options))).collect())
    }

    /// Has the metrics take in a row that read such of it, and notes with its example what their columns have.
    pub(super) fn add(&mut self, row: &Observed<'_>, example: &mut Example) {
        let reading = self.0.iter_mut().filter(|(metric, _)| metric.definition().reads == row.reads());
        for (metric, measurement) in reading {
            example.cells.extend(metric.definition().columns.iter().copied().zip(measurement.add(row)));
        }
    }

    /// Their figures; `skipped` tells how many rows could not be read.
    ///
    /// # Errors
    /// Fails where one is no number.
    pub(super) fn figures(
        &self,
        skipped: impl Fn(Reads) -> u64,
    ) -> impl Iterator<Item = Result<(Metric, Found), engine::error::StageError>> {
        self.0
            .iter()
            .map(move |(metric, measurement)| Ok((*metric, measurement.figure(skipped(metric.definition().reads))?)))
    }
}
