//! BLEU, equal to the figures of the `sacrebleu` package with its defaults.
//!
//! The convention: tokenizer `13a`, case kept, one reference, n-grams of 1 to 4 tokens, exponential smoothing, and for
//! a corpus one score from the counts of all pairs together (not the mean of theirs). From 0 to 100.
//!
//! Source: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation", ACL 2002; Post, "A Call
//! for Clarity in Reporting BLEU Scores", arXiv:1804.08771.

mod corpus;
mod tokenize_13a;

use std::collections::HashMap;

pub(super) use corpus::DEFINITION;
pub use tokenize_13a::tokenize_13a;

/// The longest n-gram.
pub const MAX_ORDER: usize = 4;

/// What a BLEU score is made of; the counts of several pairs add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// N-grams of the hypothesis that the reference has, for 1 to 4 tokens.
    pub matches: [u64; MAX_ORDER],
    /// N-grams of the hypothesis.
    pub totals: [u64; MAX_ORDER],
    /// Tokens of the hypothesis.
    pub hypothesis_length: u64,
    /// Tokens of the reference.
    pub reference_length: u64,
}

/// A score and its parts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bleu {
    /// From 0 to 100.
    pub score: f64,
    /// Of n-grams of 1 to 4 tokens, smoothed, from 0 to 100.
    pub precisions: [f64; MAX_ORDER],
    /// What is taken off because the hypothesis is shorter than the reference; 1 for nothing.
    pub brevity_penalty: f64,
}

/// Up to which n-grams a score goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// All four: for a corpus.
    All,
    /// Those that the hypothesis is long enough for: for a single sentence.
    Effective,
}

impl Counts {
    /// Counts one pair.
    pub fn of(hypothesis: &str, reference: &str) -> Self {
        let (hypothesis, reference) = (tokenize_13a(hypothesis), tokenize_13a(reference));
        let mut counts = Self {
            hypothesis_length: hypothesis.len() as u64,
            reference_length: reference.len() as u64,
            ..Self::default()
        };
        for n in 1..=MAX_ORDER {
            let mut left: HashMap<&[String], u64> = HashMap::new();
            reference.windows(n).for_each(|gram| *left.entry(gram).or_default() += 1);
            for gram in hypothesis.windows(n) {
                counts.totals[n - 1] += 1;
                if let Some(count) = left.get_mut(gram).filter(|count| **count > 0) {
                    *count -= 1;
                    counts.matches[n - 1] += 1;
                }
            }
        }
        counts
    }

    /// The score of these counts, as sacrebleu's `corpus_bleu`.
    pub fn corpus(&self) -> Bleu {
        self.score(Order::All)
    }

    /// The score of one pair alone, as sacrebleu's `sentence_bleu`: it goes up to the longest n-gram that the
    /// hypothesis has.
    pub fn sentence(&self) -> Bleu {
        self.score(Order::Effective)
    }

    fn score(&self, order: Order) -> Bleu {
        let brevity_penalty = match (self.hypothesis_length, self.reference_length) {
            (hypothesis, reference) if hypothesis >= reference => 1.0,
            (0, _) => 0.0,
            (hypothesis, reference) => (1.0 - reference as f64 / hypothesis as f64).exp(),
        };
        let mut bleu = Bleu { score: 0.0, precisions: [0.0; MAX_ORDER], brevity_penalty };
        if self.matches == [0; MAX_ORDER] {
            return bleu;
        }
        let mut smoothing = 1.0;
        let mut effective = 0;
        for (precision, (matches, total)) in bleu.precisions.iter_mut().zip(self.matches.iter().zip(&self.totals)) {
            if *total == 0 {
                break;
            }
            effective += 1;
            if *matches == 0 {
                smoothing *= 2.0;
                *precision = 100.0 / (smoothing * *total as f64);
            } else {
                *precision = 100.0 * *matches as f64 / *total as f64;
            }
        }
        let orders = match order {
            Order::All => MAX_ORDER,
            Order::Effective => effective,
        };
        // A precision of 0 has a logarithm of minus infinity, and then the score is 0.
        let sum: f64 = bleu.precisions[..orders].iter().map(|precision| precision.ln()).sum();
        bleu.score = brevity_penalty * (sum / orders as f64).exp();
        bleu
    }
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        for n in 0..MAX_ORDER {
            self.matches[n] += other.matches[n];
            self.totals[n] += other.totals[n];
        }
        self.hypothesis_length += other.hypothesis_length;
        self.reference_length += other.reference_length;
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Golden {
        pairs: Vec<Pair>,
        corpora: Vec<Corpus>,
    }

    #[derive(Deserialize)]
    struct Pair {
        hypothesis: String,
        reference: String,
        tokens: String,
        #[serde(flatten)]
        figures: Figures,
    }

    #[derive(Deserialize)]
    struct Corpus {
        rows: Vec<usize>,
        #[serde(flatten)]
        figures: Figures,
    }

    #[derive(Deserialize)]
    struct Figures {
        score: f64,
        precisions: [f64; MAX_ORDER],
        brevity_penalty: f64,
        counts: [u64; MAX_ORDER],
        totals: [u64; MAX_ORDER],
        hypothesis_length: u64,
        reference_length: u64,
    }

    fn compare(counts: &Counts, bleu: &Bleu, expected: &Figures, what: &str) {
        let found = (counts.matches, counts.totals, counts.hypothesis_length, counts.reference_length);
        let figures = (expected.counts, expected.totals, expected.hypothesis_length, expected.reference_length);
        assert_eq!(found, figures, "{what}");
        let pairs = bleu.precisions.iter().zip(&expected.precisions);
        let all = pairs.chain([(&bleu.score, &expected.score), (&bleu.brevity_penalty, &expected.brevity_penalty)]);
        for (found, expected) in all {
            assert!((found - expected).abs() <= 1e-9, "{what}: {bleu:?}, not {expected}");
        }
    }

    #[test]
    fn equals_the_reference_package() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/bleu.json");
        let golden: Golden = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        assert!(golden.pairs.len() >= 38 && golden.corpora.len() >= 12, "the golden file is shortened");
        for pair in &golden.pairs {
            assert_eq!(tokenize_13a(&pair.hypothesis).join(" "), pair.tokens);
            let counts = Counts::of(&pair.hypothesis, &pair.reference);
            compare(&counts, &counts.sentence(), &pair.figures, &pair.hypothesis);
        }
        for corpus in &golden.corpora {
            let mut counts = Counts::default();
            for row in &corpus.rows {
                counts += Counts::of(&golden.pairs[*row].hypothesis, &golden.pairs[*row].reference);
            }
            compare(&counts, &counts.corpus(), &corpus.figures, &format!("rows {:?}", corpus.rows));
        }
    }
}
