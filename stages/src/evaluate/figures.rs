//! The figures of an evaluation, and their file `metrics.json`.

use std::path::Path;

use engine::artifact::Facts;
use engine::error::{Cause, OrFail, StageError};
use serde::{Deserialize, Serialize};

use super::write_text;
use crate::rouge::Score;

/// The file inside a Metrics artefact.
const FILE: &str = "metrics.json";

/// All figures.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Figures {
    /// Rows evaluated on.
    pub rows: u64,
    /// How well the responses are predicted.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub perplexity: Option<Perplexity>,
    /// How close the model's own answers come to them.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rouge: Option<Rouge>,
}

/// Perplexity, weighted by tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Perplexity {
    /// exp(nll / tokens).
    pub value: f64,
    /// Summed negative log-likelihood of the response tokens, in nats.
    pub nll: f64,
    /// How many response tokens there are.
    pub tokens: u64,
    /// Rows of which only the beginning was read.
    pub truncated_rows: u64,
    /// Rows of which no token was scored.
    pub rows_without_tokens: u64,
    /// In words.
    pub convention: String,
}

/// ROUGE, as means over rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Rouge {
    /// Single words.
    pub rouge1: Mean,
    /// Pairs of words.
    pub rouge2: Mean,
    /// Longest common subsequence.
    #[serde(rename = "rougeL")]
    pub rouge_l: Mean,
    /// The same by lines.
    #[serde(rename = "rougeLsum")]
    pub rouge_lsum: Mean,
    /// Rows averaged over.
    pub rows: u64,
    /// Rows left out.
    pub skipped_rows: u64,
    /// Whether words are compared by their stems.
    pub use_stemmer: bool,
    /// In words.
    pub convention: String,
}

/// A mean score, from 0 to 1.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Mean {
    /// Mean precision.
    pub precision: f64,
    /// Mean recall.
    pub recall: f64,
    /// Mean F-measure.
    pub fmeasure: f64,
}

impl Default for Perplexity {
    fn default() -> Self {
        let convention = "exp(sum of negative log-likelihoods / number of tokens), over the tokens of all responses \
                          together, end of text included, prompts not";
        let convention = convention.to_owned();
        Self { value: 0.0, nll: 0.0, tokens: 0, truncated_rows: 0, rows_without_tokens: 0, convention }
    }
}

impl Default for Rouge {
    fn default() -> Self {
        let convention =
            "as rouge_score: lower case, a-z and 0-9 only, mean over rows, from 0 to 1; answers are greedy";
        Self {
            rouge1: Mean::default(),
            rouge2: Mean::default(),
            rouge_l: Mean::default(),
            rouge_lsum: Mean::default(),
            rows: 0,
            skipped_rows: 0,
            use_stemmer: false,
            convention: convention.to_owned(),
        }
    }
}

impl Mean {
    fn add(&mut self, score: &Score) {
        self.precision += score.precision;
        self.recall += score.recall;
        self.fmeasure += score.fmeasure;
    }

    fn divide(&mut self, by: f64) {
        self.precision /= by;
        self.recall /= by;
        self.fmeasure /= by;
    }
}

impl Rouge {
    /// Adds a row's scores.
    pub(super) fn add(&mut self, scores: &crate::rouge::Rouge) {
        self.rouge1.add(&scores.rouge1);
        self.rouge2.add(&scores.rouge2);
        self.rouge_l.add(&scores.rouge_l);
        self.rouge_lsum.add(&scores.rouge_lsum);
        self.rows += 1;
    }

    /// Turns sums into means.
    pub(super) fn divide(&mut self) {
        let rows = self.rows as f64;
        for mean in [&mut self.rouge1, &mut self.rouge2, &mut self.rouge_l, &mut self.rouge_lsum] {
            mean.divide(rows);
        }
    }
}

impl Figures {
    /// Name and value of each headline figure.
    pub(super) fn headlines(&self) -> Vec<(&'static str, f64)> {
        let perplexity = self.perplexity.iter().map(|perplexity| ("perplexity", perplexity.value));
        let rouge = self.rouge.iter().flat_map(|rouge| {
            [
                ("rouge1", rouge.rouge1.fmeasure),
                ("rouge2", rouge.rouge2.fmeasure),
                ("rougeL", rouge.rouge_l.fmeasure),
                ("rougeLsum", rouge.rouge_lsum.fmeasure),
            ]
        });
        perplexity.chain(rouge).collect()
    }

    /// The headline figures as facts of the artefact.
    pub(super) fn facts(&self) -> Facts {
        let mut facts: Facts =
            self.headlines().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        facts.insert("rows".to_owned(), self.rows.into());
        facts
    }
}

pub(super) fn write(figures: &Figures, folder: &Path) -> Result<(), StageError> {
    let mut text = serde_json::to_string_pretty(figures).expect("figures are plain data");
    text.push('\n');
    write_text(&folder.join(FILE), &text)
}

/// Reads the figures of another evaluation.
pub(super) fn read(folder: &Path) -> Result<Figures, StageError> {
    let path = folder.join(FILE);
    let text = std::fs::read(&path).or_fail(Cause::BadData, || "`compare_with` has no `metrics.json`".to_owned())?;
    serde_json::from_slice(&text)
        .or_fail(Cause::BadData, || "`compare_with` holds metrics that are not of an evaluation".to_owned())
}
