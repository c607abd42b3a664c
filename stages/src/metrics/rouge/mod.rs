//! ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum, equal to the figures of the `rouge_score` package.
//!
//! The convention: lower case, everything but `a`–`z` and `0`–`9` separates tokens, F is the harmonic mean. Text in
//! other scripts therefore has no tokens and scores 0. The stemmer, where it is used, changes tokens of more than three
//! letters only.
//!
//! Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004, as in google-research/rouge.

mod means;
mod stemmer;

use std::collections::HashMap;

pub(super) use means::DEFINITION;
use serde::Serialize;

/// How words are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stemming {
    /// As they stand.
    Off,
    /// By their stems (Porter's, with NLTK's extensions).
    Porter,
}

/// Precision, recall and their harmonic mean.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Score {
    /// The part of the prediction that the reference has.
    pub precision: f64,
    /// The part of the reference that the prediction has.
    pub recall: f64,
    /// The harmonic mean of both; 0 where both are 0.
    pub fmeasure: f64,
}

/// The four scores of one prediction.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rouge {
    /// Single tokens.
    pub rouge1: Score,
    /// Pairs of neighbouring tokens.
    pub rouge2: Score,
    /// Longest common subsequence of the whole texts.
    pub rouge_l: Score,
    /// Longest common subsequences line by line, united per line of the reference.
    pub rouge_lsum: Score,
}

/// Scores a prediction against a reference.
pub fn rouge(prediction: &str, reference: &str, stemming: Stemming) -> Rouge {
    let predicted = tokenize(prediction, stemming);
    let expected = tokenize(reference, stemming);
    Rouge {
        rouge1: rouge_n(&predicted, &expected, 1),
        rouge2: rouge_n(&predicted, &expected, 2),
        rouge_l: rouge_l(&predicted, &expected),
        rouge_lsum: rouge_lsum(&lines(prediction, stemming), &lines(reference, stemming)),
    }
}

impl Score {
    fn new(hits: usize, predicted: usize, expected: usize) -> Self {
        if predicted == 0 || expected == 0 {
            return Self::default();
        }
        let precision = hits as f64 / predicted as f64;
        let recall = hits as f64 / expected as f64;
        let sum = precision + recall;
        Self { precision, recall, fmeasure: if sum > 0.0 { 2.0 * precision * recall / sum } else { 0.0 } }
    }
}

fn tokenize(text: &str, stemming: Stemming) -> Vec<String> {
    text.to_lowercase()
        .split(|character: char| !matches!(character, 'a'..='z' | '0'..='9'))
        .filter(|token| !token.is_empty())
        .map(|token| match stemming {
            Stemming::Porter if token.len() > 3 => stemmer::stem(token),
            _ => token.to_owned(),
        })
        .collect()
}

/// The lines of a text that hold anything, as tokens.
fn lines(text: &str, stemming: Stemming) -> Vec<Vec<String>> {
    text.split('\n').filter(|line| !line.is_empty()).map(|line| tokenize(line, stemming)).collect()
}

fn rouge_n(predicted: &[String], expected: &[String], n: usize) -> Score {
    let mut left = counts(expected.windows(n));
    let hits = predicted.windows(n).filter(|gram| take_one(&mut left, gram)).count();
    let grams = |tokens: &[String]| (tokens.len() + 1).saturating_sub(n);
    Score::new(hits, grams(predicted), grams(expected))
}

fn rouge_l(predicted: &[String], expected: &[String]) -> Score {
    Score::new(lcs_length(expected, predicted, |_, _| ()), predicted.len(), expected.len())
}

fn rouge_lsum(predicted: &[Vec<String>], expected: &[Vec<String>]) -> Score {
    let mut left_in_prediction = counts(predicted.iter().flatten());
    let mut left_in_reference = counts(expected.iter().flatten());
    let mut hits = 0;
    for line in expected {
        let mut in_union = vec![false; line.len()];
        for other in predicted {
            mark_lcs(line, other, &mut in_union);
        }
        for (token, _) in line.iter().zip(in_union).filter(|(_, common)| *common) {
            // A token counts at most as often as it stands in both texts.
            if left_in_reference[token] > 0 && take_one(&mut left_in_prediction, token) {
                take_one(&mut left_in_reference, token);
                hits += 1;
            }
        }
    }
    Score::new(hits, predicted.iter().map(Vec::len).sum(), expected.iter().map(Vec::len).sum())
}

fn counts<T: std::hash::Hash + Eq>(items: impl Iterator<Item = T>) -> HashMap<T, usize> {
    let mut counts = HashMap::new();
    for item in items {
        *counts.entry(item).or_insert(0) += 1;
    }
    counts
}

/// Takes one of an item away; false where none is left.
fn take_one<T: std::hash::Hash + Eq>(counts: &mut HashMap<T, usize>, item: T) -> bool {
    match counts.get_mut(&item) {
        Some(count) if *count > 0 => {
            *count -= 1;
            true
        }
        _ => false,
    }
}

/// The length of the longest common subsequence. `leads_left` hears of the pairs of unequal tokens before which leaving
/// out the predicted token keeps a longer subsequence than leaving out the expected one.
///
/// One row of the table of lengths is held, not all: a reference may be a book.
fn lcs_length(expected: &[String], predicted: &[String], mut leads_left: impl FnMut(usize, usize)) -> usize {
    let mut lengths = vec![0; predicted.len() + 1];
    for (i, token) in expected.iter().enumerate() {
        let mut diagonal = 0;
        for (j, other) in predicted.iter().enumerate() {
            let (left, above) = (lengths[j], lengths[j + 1]);
            lengths[j + 1] = if token == other { diagonal + 1 } else { left.max(above) };
            if token != other && left > above {
                leads_left(i, j);
            }
            diagonal = above;
        }
    }
    lengths[predicted.len()]
}

/// Marks the tokens of `expected` that lie on its longest common subsequence with `predicted`. Of several equally long
/// ones the choice is the reference implementation's: it decides what the union over lines holds.
fn mark_lcs(expected: &[String], predicted: &[String], marks: &mut [bool]) {
    // A bit per pair of tokens: which way back.
    let mut left = vec![0_u64; (expected.len() * predicted.len()).div_ceil(64)];
    let bit = |i: usize, j: usize| ((i * predicted.len() + j) / 64, 1_u64 << ((i * predicted.len() + j) % 64));
    lcs_length(expected, predicted, |i, j| {
        let (word, mask) = bit(i, j);
        left[word] |= mask;
    });
    let leads_left = |i, j| {
        let (word, mask) = bit(i, j);
        left[word] & mask != 0
    };
    let (mut i, mut j) = (expected.len(), predicted.len());
    while i > 0 && j > 0 {
        if expected[i - 1] == predicted[j - 1] {
            marks[i - 1] = true;
            i -= 1;
            j -= 1;
        } else if leads_left(i - 1, j - 1) {
            j -= 1;
        } else {
            i -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize)]
    struct Case {
        prediction: String,
        reference: String,
        use_stemmer: bool,
        scores: HashMap<String, HashMap<String, f64>>,
    }

    #[test]
    fn equals_the_reference_package() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/rouge.json");
        let cases: Vec<Case> = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert!(cases.len() >= 62, "the golden file is shortened");
        for case in &cases {
            let stemming = if case.use_stemmer { Stemming::Porter } else { Stemming::Off };
            let found = rouge(&case.prediction, &case.reference, stemming);
            for (name, score) in [
                ("rouge1", found.rouge1),
                ("rouge2", found.rouge2),
                ("rougeL", found.rouge_l),
                ("rougeLsum", found.rouge_lsum),
            ] {
                for (figure, value) in
                    [("precision", score.precision), ("recall", score.recall), ("fmeasure", score.fmeasure)]
                {
                    let expected = case.scores[name][figure];
                    assert!(
                        (value - expected).abs() <= 1e-9,
                        "{name} {figure} ({stemming:?}): {value}, expected {expected}\n{}\n{}",
                        case.prediction,
                        case.reference
                    );
                }
            }
        }
    }

    #[test]
    fn a_text_without_latin_letters_scores_nothing() {
        assert_eq!(rouge("你是谁", "你是谁", Stemming::Porter), Rouge::default());
    }
}
