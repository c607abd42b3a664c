//! The figures of an evaluation, and their file `metrics.json`.

use std::path::Path;

use engine::artifact::Facts;
use engine::error::{Cause, OrFail, StageError};
use serde_json::{Map, Value};

use super::write_text;
use crate::metrics::{Headline, Metric};

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
        let of =
            |(headline, figure): (&Headline, &Value)| Some((headline.name, figure.pointer(headline.at)?.as_f64()?));
        self.with_figures().filter_map(of).collect()
    }

    /// The headline figures and their standard errors as facts of the artefact.
    pub(super) fn facts(&self) -> Facts {
        let mut facts = Facts::new();
        for (headline, figure) in self.with_figures() {
            let number = |at: &str| figure.pointer(at).filter(|value| value.is_number()).cloned();
            facts.extend(number(headline.at).map(|value| (headline.name.to_owned(), value)));
            facts.extend(headline.error_name().zip(headline.error_at.and_then(number)));
        }
        facts.extend(self.0.get_key_value("rows").map(|(name, rows)| (name.clone(), rows.clone())));
        facts
    }

    /// The headlines of what was measured, each with its metric's figure.
    fn with_figures(&self) -> impl Iterator<Item = (&'static Headline, &Value)> {
        Metric::ALL.into_iter().flat_map(|metric| {
            let figure = self.0.get(metric.name());
            metric.definition().headlines.iter().filter_map(move |headline| Some((headline, figure?)))
        })
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
