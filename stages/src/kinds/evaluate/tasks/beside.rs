//! The figures of tasks beside those of another evaluation: how far apart, and whether beyond their standard error.

use std::path::{Path, PathBuf};

use arrow::array::{Array, Float64Array, StringArray};
use engine::error::{Cause, OrFail, StageError};
use engine::figure::name_of_standard_error;
use serde_json::{Map, Value, json};

use super::outcome::samples_file;
use crate::data::results::TableReader;

/// Another evaluation of tasks.
pub(super) struct Other {
    /// The stage that made it.
    pub stage: String,
    folder: PathBuf,
    results: Map<String, Value>,
}

/// Two figures of a task.
pub(super) struct Difference {
    pub task: String,
    /// Metric and filter: `acc,none`.
    pub key: String,
    pub stage: String,
    /// Ours and the other one.
    pub values: [f64; 2],
    /// Of their difference; none where one of them has none.
    pub stderr: Option<f64>,
    /// The rows are the same in both, and compared one by one.
    pub paired: bool,
    pub rows: usize,
}

impl Difference {
    fn value(&self) -> f64 {
        self.values[0] - self.values[1]
    }

    /// Whether the difference is beyond its standard error; `None` where it has none.
    fn is_beyond(&self) -> Option<bool> {
        self.stderr.map(|error| self.value().abs() > error)
    }

    pub(super) fn words(&self) -> String {
        let [ours, other] = self.values;
        let verdict = match (self.stderr, self.is_beyond()) {
            (Some(error), Some(beyond)) => {
                let how = if self.paired { format!(", paired over {} rows", self.rows) } else { String::new() };
                let beyond = if beyond { "beyond its standard error" } else { "within its standard error" };
                format!(" ± {error:.4}{how}: {beyond}")
            }
            _ => String::new(),
        };
        let (task, key, stage) = (&self.task, &self.key, &self.stage);
        format!("{task} {key}: {ours:.4}, `{stage}` {other:.4}: {:+.4}{verdict}", self.value())
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "stage": self.stage, "task": self.task, "metric": self.key, "value": self.values[0], "other": self.values[1],
            "difference": self.value(), "stderr": self.stderr, "paired": self.paired, "beyond_stderr": self.is_beyond(),
        })
    }
}

impl Other {
    /// Reads the figures of another evaluation.
    ///
    /// # Errors
    /// Fails where they are not of tasks.
    pub(super) fn read(stage: &str, folder: &Path) -> Result<Self, StageError> {
        let wrong = || format!("`compare_with: {stage}` has no metrics of tasks");
        let text = std::fs::read(folder.join("metrics.json")).or_fail(Cause::BadData, wrong)?;
        let mut value: Value = serde_json::from_slice(&text).or_fail(Cause::BadData, wrong)?;
        match value["results"].take() {
            Value::Object(results) => Ok(Self { stage: stage.to_owned(), folder: folder.to_owned(), results }),
            _ => {
                Err(StageError::bad_data(wrong())
                    .with_help("it measures rows (`data`), and this stage evaluates `tasks`"))
            }
        }
    }

    fn number(&self, task: &str, key: &str) -> Option<f64> {
        self.results.get(task)?.get(key)?.as_f64()
    }

    /// A figure beside the same one of this evaluation, whose samples are in `folder`; `None` where it lacks it.
    ///
    /// # Errors
    /// Fails where samples cannot be read.
    pub(super) fn difference(
        &self,
        task: &str,
        key: &str,
        (value, stderr): (f64, Option<f64>),
        folder: &Path,
    ) -> Result<Option<Difference>, StageError> {
        let Some(other) = self.number(task, key) else { return Ok(None) };
        let apart = stderr.zip(self.number(task, &name_of_standard_error(key))).map(|(one, two)| one.hypot(two));
        let mut difference = Difference {
            task: task.to_owned(),
            key: key.to_owned(),
            stage: self.stage.clone(),
            values: [value, other],
            stderr: apart,
            paired: false,
            rows: 0,
        };
        let (ours, theirs) = (worths(folder, task, key)?, worths(&self.folder, task, key)?);
        if let (Some((rows, ours)), Some((other_rows, theirs))) = (ours, theirs)
            && rows == other_rows
            && difference.stderr.is_some()
        {
            let apart: Vec<f64> = ours.iter().zip(&theirs).map(|(one, other)| one - other).collect();
            difference.stderr = crate::tasks::metric::standard_error(&apart);
            difference.paired = true;
            difference.rows = apart.len();
        }
        Ok(Some(difference))
    }
}

/// The rows of a task, and what each is worth.
type Worths = (Vec<String>, Vec<f64>);

/// Those by a figure that is their mean; `None` where it is not.
fn worths(folder: &Path, task: &str, key: &str) -> Result<Option<Worths>, StageError> {
    let path = folder.join(samples_file(task));
    let is_mean = ["acc", "exact_match"].iter().any(|metric| key.starts_with(metric));
    if !is_mean || !path.is_file() {
        return Ok(None);
    }
    let mut table = TableReader::open(&path, &["doc", key])?;
    let (mut rows, mut worths) = (Vec::new(), Vec::new());
    while let Some(batch) = table.next_batch()? {
        let documents: &StringArray = table.column(&batch, "doc")?;
        let values: &Float64Array = table.column(&batch, key)?;
        if values.null_count() > 0 {
            return Ok(None);
        }
        rows.extend(documents.iter().map(|text| text.unwrap_or_default().to_owned()));
        worths.extend(values.values());
    }
    Ok(Some((rows, worths)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_says_whether_it_is_beyond_its_error() {
        let difference = |values, stderr| Difference {
            task: "arc".into(),
            key: "acc,none".into(),
            stage: "before".into(),
            values,
            stderr,
            paired: true,
            rows: 8,
        };
        let words = difference([0.75, 0.5], Some(0.1)).words();
        assert_eq!(
            words,
            "arc acc,none: 0.7500, `before` 0.5000: +0.2500 ± 0.1000, paired over 8 rows: beyond its standard error"
        );
        assert!(
            difference([0.5, 0.55], Some(0.1))
                .words()
                .ends_with(": -0.0500 ± 0.1000, paired over 8 rows: within its standard error")
        );
        assert_eq!(difference([0.5, 0.55], None).words(), "arc acc,none: 0.5000, `before` 0.5500: -0.0500");
    }
}
