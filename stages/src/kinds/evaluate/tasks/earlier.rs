//! Answers that earlier results hold: of a task that is measured in another way, or beside another one, the model is
//! not asked again.
//!
//! What a row is answered depends on the model, how it is computed, and the row's tokens alone, whatever is asked
//! beside it. So the results of a model are a family, and a row is a piece of it.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use arrow::array::StringArray;
use cache::{Digest, Reusable};
use engine::context::{Artifact, StageContext};
use engine::error::StageError;
use serde_json::Value;

use super::outcome::samples_file;
use super::row_requests::RowRequests;
use crate::data::results::TableReader;
use crate::tasks::results::Answer;

/// The rows of each task of a result, by their identities, in the order of its samples.
type Pieces = BTreeMap<String, Vec<Digest>>;

/// Those of a result with these rows.
pub(super) fn pieces(rows: &[RowRequests]) -> Value {
    let mut pieces = Pieces::new();
    for row in rows {
        pieces.entry(row.task.name.clone()).or_default().push(row.identity);
    }
    serde_json::to_value(pieces).expect("pieces are plain data")
}

/// The rows of earlier results.
pub(super) struct Earlier {
    results: Vec<(Reusable, OnceCell<Option<Artifact>>)>,
    tasks: Vec<OfTask>,
    /// In which of the tasks a row is, and where.
    places: HashMap<Digest, (usize, usize)>,
}

/// The answers of a task, read when the first of them is wanted; none where they cannot be read.
struct OfTask {
    name: String,
    result: usize,
    answers: OnceCell<Vec<Option<Vec<Answer>>>>,
}

impl Earlier {
    /// Those of the newest results of a family.
    pub(super) fn new(context: &StageContext, family: &Digest) -> Self {
        let mut earlier = Self { results: Vec::new(), tasks: Vec::new(), places: HashMap::new() };
        for mut reusable in context.reusable(family) {
            let pieces: Pieces = serde_json::from_value(reusable.pieces.take()).unwrap_or_default();
            for (name, rows) in pieces {
                for (row, identity) in rows.into_iter().enumerate() {
                    earlier.places.entry(identity).or_insert((earlier.tasks.len(), row));
                }
                earlier.tasks.push(OfTask { name, result: earlier.results.len(), answers: OnceCell::new() });
            }
            earlier.results.push((reusable, OnceCell::new()));
        }
        earlier
    }

    /// The answers to a row, if an earlier result has them.
    pub(super) fn take(&self, context: &StageContext, row: &RowRequests) -> Option<Vec<Answer>> {
        let (task, at) = self.places.get(&row.identity)?;
        let OfTask { name, result, answers } = &self.tasks[*task];
        let answers = answers.get_or_init(|| {
            let (reusable, opened) = &self.results[*result];
            let opened = opened.get_or_init(|| context.open_reusable(reusable));
            let read = opened.as_ref().map(|artifact| read(&artifact.folder.join(samples_file(name))));
            read.and_then(Result::ok).unwrap_or_default()
        });
        answers.get(*at)?.clone().filter(|answers| row.fits(answers))
    }
}

/// The answers to the rows of a table of samples.
fn read(path: &Path) -> Result<Vec<Option<Vec<Answer>>>, StageError> {
    let mut table = TableReader::open(path, &["resps"])?;
    let mut rows = Vec::new();
    while let Some(batch) = table.next_batch()? {
        let texts: &StringArray = table.column(&batch, "resps")?;
        rows.extend(texts.iter().map(|text| answers(text?)));
    }
    Ok(rows)
}

/// Answers as [`Answer::json`] writes them. `None` of a number that JSON has not.
fn answers(text: &str) -> Option<Vec<Answer>> {
    serde_json::from_str::<Vec<Value>>(text).ok()?.iter().map(Answer::of_json).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_come_back_to_the_bit_and_what_is_no_number_does_not() {
        let sums = [-1.0 / 3.0, -0.0, f64::MIN_POSITIVE, -123_456.789_012_345_67];
        let of = |sum: f64, is_greedy| Answer::Loglikelihood { sum, is_greedy };
        let mut written: Vec<Answer> = sums.iter().map(|sum| of(*sum, *sum < -1.0)).collect();
        written.push(Answer::Text("\u{0}\"é\"\n".to_owned()));
        let json = |answers: &[Answer]| answers.iter().map(Answer::json).collect::<Value>().to_string();
        let read = answers(&json(&written)).unwrap();
        assert_eq!(read, written);
        let bits = |answer: &Answer| if let Answer::Loglikelihood { sum, .. } = answer { sum.to_bits() } else { 0 };
        assert!(read.iter().zip(&written).all(|(one, other)| bits(one) == bits(other)));
        assert_eq!(answers(&json(&[of(f64::NEG_INFINITY, false)])), None);
        assert_eq!(answers("[[1.0]]"), None);
    }
}
