//! chrF and chrF++, equal to the figures of the `sacrebleu` package with its defaults.
//!
//! The convention: n-grams of 1 to 6 characters without white space, and for chrF++ of 1 and 2 words; recall counts
//! four times as much as precision (β is 2); one reference; case kept. Precision and recall are means over the orders
//! that both texts are long enough for. Of a corpus one score, from the counts of all pairs together. From 0 to 100.
//!
//! Source: Popović, "chrF: character n-gram F-score for automatic MT evaluation", WMT 2015; "chrF++: words helping
//! character n-grams", WMT 2017.

use std::collections::HashMap;

use crate::data::prompt::python::is_space;

/// The longest n-gram of characters.
const CHARACTERS: usize = 6;

/// The longest n-gram of words, of chrF++.
const WORDS: usize = 2;

/// What precision counts, where recall counts β².
const BETA_SQUARED: f64 = 4.0;

/// What a score is made of, for each order: n-grams of the hypothesis, of the reference, and those that both have. The
/// counts of several pairs add up.
pub type Counts = Vec<[u64; 3]>;

/// Counts one pair; with n-grams of words for chrF++.
pub fn counts(hypothesis: &str, reference: &str, words: bool) -> Counts {
    let characters = |text: &str| -> Vec<String> { text.chars().filter(|c| !is_space(*c)).map(String::from).collect() };
    let mut counts = of_orders(&characters(hypothesis), &characters(reference), CHARACTERS);
    if words {
        counts.extend(of_orders(&split(hypothesis), &split(reference), WORDS));
    }
    counts
}

fn of_orders(hypothesis: &[String], reference: &[String], longest: usize) -> Counts {
    let of_order = |n: usize| {
        let mut left: HashMap<&[String], u64> = HashMap::new();
        reference.windows(n).for_each(|gram| *left.entry(gram).or_default() += 1);
        let of_reference = left.values().sum();
        let matches = hypothesis.windows(n).filter(|gram| match left.get_mut(*gram) {
            Some(count) if *count > 0 => {
                *count -= 1;
                true
            }
            _ => false,
        });
        let matches = matches.count() as u64;
        // Without n-grams in the reference those of the hypothesis do not count.
        let of_hypothesis = if of_reference == 0 { 0 } else { hypothesis.windows(n).len() as u64 };
        [of_hypothesis, of_reference, matches]
    };
    (1..=longest).map(of_order).collect()
}

/// Words, a punctuation mark at an end apart from its word: of two ends the last.
fn split(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    for word in text.split(is_space).filter(|word| !word.is_empty()) {
        let is_mark = |letter: Option<char>| letter.is_some_and(|letter| letter.is_ascii_punctuation());
        let (first, last) = (word.chars().next(), word.chars().next_back());
        match word.chars().nth(1) {
            Some(_) if is_mark(last) => words.extend([&word[..word.len() - 1], &word[word.len() - 1..]]),
            Some(_) if is_mark(first) => words.extend([&word[..1], &word[1..]]),
            _ => words.push(word),
        }
    }
    words.into_iter().map(str::to_owned).collect()
}

/// The score of some counts.
pub fn score(counts: &[[u64; 3]]) -> f64 {
    let (mut precision, mut recall, mut orders) = (0.0, 0.0, 0.0);
    for [of_hypothesis, of_reference, matches] in counts {
        if *of_hypothesis > 0 && *of_reference > 0 {
            precision += *matches as f64 / *of_hypothesis as f64;
            recall += *matches as f64 / *of_reference as f64;
            orders += 1.0;
        }
    }
    if orders == 0.0 || precision + recall == 0.0 {
        return 0.0;
    }
    (precision, recall) = (precision / orders, recall / orders);
    100.0 * ((1.0 + BETA_SQUARED) * precision * recall / (BETA_SQUARED * precision + recall))
}

#[cfg(test)]
pub(super) mod tests {
    use serde::Deserialize;

    use super::*;

    /// What sacrebleu makes of texts: `tests/reference/make_golden_translation.py`.
    #[derive(Deserialize)]
    pub(in crate::metrics) struct Golden {
        pub(in crate::metrics) pairs: Vec<Pair>,
        pub(in crate::metrics) together: Figures,
    }

    #[derive(Debug, Deserialize)]
    pub(in crate::metrics) struct Pair {
        pub(in crate::metrics) hypothesis: String,
        pub(in crate::metrics) reference: String,
        #[serde(flatten)]
        pub(in crate::metrics) figures: Figures,
    }

    #[derive(Debug, Deserialize)]
    pub(in crate::metrics) struct Figures {
        chrf: f64,
        chrf_plus_plus: f64,
        pub(in crate::metrics) ter: f64,
        pub(in crate::metrics) edits: u64,
    }

    impl Golden {
        pub(in crate::metrics) fn read() -> Self {
            let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/translation.json");
            let golden: Self = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
            assert!(golden.pairs.len() >= 128, "the golden file is shortened");
            golden
        }
    }

    #[test]
    fn equals_the_reference_package() {
        let golden = Golden::read();
        for words in [false, true] {
            let expected = |figures: &Figures| if words { figures.chrf_plus_plus } else { figures.chrf };
            let mut together: Counts = Vec::new();
            for pair in &golden.pairs {
                let counts = counts(&pair.hypothesis, &pair.reference, words);
                assert!((score(&counts) - expected(&pair.figures)).abs() <= 1e-9, "{pair:?}: {counts:?}");
                together.resize(counts.len(), [0; 3]);
                let sums = together.iter_mut().flatten();
                sums.zip(counts.into_iter().flatten()).for_each(|(sum, count)| *sum += count);
            }
            assert!((score(&together) - expected(&golden.together)).abs() <= 1e-9, "{together:?}");
        }
    }
}
