//! The figures of an evaluation, and their file `metrics.json`.

use std::path::Path;

use engine::artifact::Facts;
use engine::error::{Cause, OrFail, StageError};
use serde::{Deserialize, Serialize};

use super::{Normalization, write_text};
use crate::metrics::rouge::Score;

/// The file inside a Metrics artefact.
const FILE: &str = "metrics.json";

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Figures {
    /// Rows evaluated on.
    pub rows: u64,
    /// How well the responses are predicted.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub perplexity: Option<Perplexity>,
    /// How many of their tokens the model finds the most likely.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub token_accuracy: Option<TokenAccuracy>,
    /// How many rows the model answered itself.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub answers: Option<AnswerCounts>,
    /// How close these answers come to the responses.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rouge: Option<Rouge>,
    /// The same, over all rows together.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub bleu: Option<Bleu>,
    /// How many are equal.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub exact_match: Option<ExactMatch>,
    /// Of how many pairs the better response is the likelier one.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub preference_accuracy: Option<PreferenceAccuracy>,
}

/// The share of pairs whose better response is the likelier one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PreferenceAccuracy {
    /// preferred / pairs.
    pub value: f64,
    /// The same by the mean log-probability of a response's tokens.
    pub by_token: f64,
    /// Mean difference of the summed log-probabilities, in nats.
    pub mean_margin: f64,
    /// Pairs whose better response has the larger summed log-probability.
    pub preferred: u64,
    pub pairs: u64,
    /// Rows left out: longer than the model reads, or with a response of which no token is predicted.
    pub skipped_rows: u64,
    /// In words.
    pub convention: String,
}

impl Default for PreferenceAccuracy {
    fn default() -> Self {
        // Words of a convention are part of the artefact: other words are another result.
        let convention = "share of pairs whose chosen response has the larger summed log-probability given the prompt, end of \
                          text included; a tie is no success";
        Self {
            value: 0.0,
            by_token: 0.0,
            mean_margin: 0.0,
            preferred: 0,
            pairs: 0,
            skipped_rows: 0,
            convention: convention.to_owned(),
        }
    }
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

/// The share of response tokens that the model finds the most likely.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TokenAccuracy {
    /// correct / tokens.
    pub value: f64,
    /// Response tokens that the model finds the most likely.
    pub correct: u64,
    /// How many response tokens there are.
    pub tokens: u64,
    /// In words.
    pub convention: String,
}

/// How many rows the model answered, for every figure about answers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AnswerCounts {
    /// Rows answered.
    pub rows: u64,
    /// Rows left out: without a reference, or with a prompt that does not fit the model.
    pub skipped_rows: u64,
    /// Answers without any text.
    pub empty: u64,
    /// Answers that the limit ended, not the model.
    pub cut: u64,
}

/// BLEU of all answers together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Bleu {
    /// From 0 to 100.
    pub score: f64,
    /// Of n-grams of 1 to 4 tokens, from 0 to 100.
    pub precisions: [f64; crate::metrics::bleu::MAX_ORDER],
    /// What is taken off because the answers are shorter than the references; 1 for nothing.
    pub brevity_penalty: f64,
    /// Tokens of the answers.
    pub hypothesis_length: u64,
    /// Tokens of the references.
    pub reference_length: u64,
    pub rows: u64,
    /// As sacrebleu writes it.
    pub signature: String,
    /// In words.
    pub convention: String,
}

/// The share of answers that are the reference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct ExactMatch {
    /// matches / rows.
    pub value: f64,
    /// Answers that are the reference.
    pub matches: u64,
    pub rows: u64,
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

impl Default for TokenAccuracy {
    fn default() -> Self {
        let convention = "share of response tokens that are the model's most likely next token with the response before them given, \
                          end of text included, prompts not";
        Self { value: 0.0, correct: 0, tokens: 0, convention: convention.to_owned() }
    }
}

impl Default for Bleu {
    fn default() -> Self {
        let convention = "as sacrebleu's corpus_bleu: tokenizer 13a, case kept, exponential smoothing, from 0 to 100; answers are \
                          greedy";
        Self {
            score: 0.0,
            precisions: [0.0; crate::metrics::bleu::MAX_ORDER],
            brevity_penalty: 1.0,
            hypothesis_length: 0,
            reference_length: 0,
            rows: 0,
            signature: "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp".to_owned(),
            convention: convention.to_owned(),
        }
    }
}

impl ExactMatch {
    /// So many matches among so many rows.
    pub(super) fn new(matches: u64, rows: u64, normalization: Normalization) -> Self {
        let convention =
            format!("share of answers that are the reference, {}; answers are greedy", normalization.words());
        Self { value: matches as f64 / rows as f64, matches, rows, convention }
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
    pub(super) fn add(&mut self, scores: &crate::metrics::rouge::Rouge) {
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
        let token_accuracy = self.token_accuracy.iter().map(|accuracy| ("token_accuracy", accuracy.value));
        let rouge = self.rouge.iter().flat_map(|rouge| {
            [
                ("rouge1", rouge.rouge1.fmeasure),
                ("rouge2", rouge.rouge2.fmeasure),
                ("rougeL", rouge.rouge_l.fmeasure),
                ("rougeLsum", rouge.rouge_lsum.fmeasure),
            ]
        });
        let bleu = self.bleu.iter().map(|bleu| ("bleu", bleu.score));
        let exact_match = self.exact_match.iter().map(|exact_match| ("exact_match", exact_match.value));
        let preference = self.preference_accuracy.iter().flat_map(|preference| {
            [("preference_accuracy", preference.value), ("preference_margin", preference.mean_margin)]
        });
        perplexity.chain(token_accuracy).chain(rouge).chain(bleu).chain(exact_match).chain(preference).collect()
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
        .or_fail(Cause::BadData, || "`compare_with` has metrics that are not of an evaluation".to_owned())
}
