//! The figures of an evaluation, and their file `metrics.json`.

use std::path::Path;

use engine::artifact::Facts;
use engine::error::{Cause, OrFail, StageError};
use serde_json::{Map, Value};

use super::write_text;
use crate::metrics::Metric;

/// The file inside a Metrics artefact.
const FILE: &str = "metrics.json";

/// The figure of each metric by its name, beside what all of them are of.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Figures(Map<String, Value>);

impl Figures {
    /// None yet, of so many rows.
    pub(super) fn of_rows(rows: u64) -> Self {
        Self([("rows".to_owned(), rows.into())].into_iter().collect())
    }

    pub(super) fn insert(&mut self, name: &str, figure: Value) {
        self.0.insert(name.to_owned(), figure);
    }

    /// Name and value of each headline figure.
    pub(super) fn headlines(&self) -> Vec<(&'static str, f64)> {
        let of_metric = |metric: Metric| {
            let figure = self.0.get(metric.name());
            let headlines = metric.definition().headlines.iter();
            headlines.filter_map(move |headline| Some((headline.name, figure?.pointer(headline.at)?.as_f64()?)))
        };
        Metric::ALL.into_iter().flat_map(of_metric).collect()
    }

    /// The headline figures as facts of the artefact.
    pub(super) fn facts(&self) -> Facts {
        let mut facts: Facts =
            self.headlines().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        facts.extend(self.0.get_key_value("rows").map(|(name, rows)| (name.clone(), rows.clone())));
        facts
    }

    pub(super) fn write(&self, folder: &Path) -> Result<(), StageError> {
        let text = serde_json::to_string_pretty(&self.0).expect("figures are plain data");
        write_text(&folder.join(FILE), &(text + "\n"))
    }

    /// Reads the figures of another evaluation.
    ///
    /// # Errors
    /// Fails where there are none, or none of rows.
    pub(super) fn read(folder: &Path) -> Result<Self, StageError> {
        let path = folder.join(FILE);
        let text =
            std::fs::read(&path).or_fail(Cause::BadData, || "`compare_with` has no `metrics.json`".to_owned())?;
        let wrong = || "`compare_with` holds metrics that are not of an evaluation".to_owned();
        let figures: Map<String, Value> = serde_json::from_slice(&text).or_fail(Cause::BadData, wrong)?;
        if !figures.contains_key("rows") {
            return Err(StageError::bad_data(wrong()));
        }
        Ok(Self(figures))
    }
}
