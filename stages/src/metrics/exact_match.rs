//! The share of answers that are the reference.

use engine::error::StageError;
use engine::figure::Unit;
use engine::parameter::Parameters;
use serde_json::json;

use super::standard_error::Mean;
use super::{Better, Column, Definition, Found, Headline, Measurement, Observed, Reads};
use crate::data::prompt::python::is_space;

pub(super) const DEFINITION: Definition = Definition {
    reads: Reads::Answer,
    headlines: &[Headline {
        name: "exact_match",
        at: "/value",
        error_at: Some("/stderr"),
        unit: Unit::Share,
        better: Better::Higher,
    }],
    columns: &[Column::Flags("exact_match")],
    start: |options| {
        Box::new(Matches { normalization: options.normalization, matches: 0, rows: 0, mean: Mean::default() })
    },
};

struct Matches {
    normalization: Normalization,
    matches: u64,
    rows: u64,
    mean: Mean,
}

impl Measurement for Matches {
    fn add(&mut self, row: &Observed<'_>) -> Vec<f64> {
        let Observed::Answer { prediction, reference } = row else { return Vec::new() };
        let is_equal = self.normalization.equal(prediction, reference);
        self.rows += 1;
        self.matches += u64::from(is_equal);
        let cell = f64::from(u8::from(is_equal));
        self.mean.add(cell);
        vec![cell]
    }

    fn figure(&self, _: u64) -> Result<Found, StageError> {
        let Self { matches, rows, mean, .. } = *self;
        let words = self.normalization.words();
        let convention = format!("share of answers that are the reference, {words}; answers are greedy");
        let value = matches as f64 / rows as f64;
        Ok(Found {
            meaning: format!("exact_match: {convention}; {matches} of {rows} rows"),
            figure: json!({
                "value": value,
                "stderr": mean.standard_error(),
                "matches": matches,
                "rows": rows,
                "convention": convention,
            }),
        })
    }
}

/// What is done to answer and reference before they are compared.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalization {
    /// White space around them is removed.
    Strip,
    /// As SQuAD's script: lower case, without ASCII punctuation, without the words `a`, `an` and `the`, and with single
    /// blanks.
    Squad,
}

impl Normalization {
    /// Whether two texts are equal under it.
    pub(crate) fn equal(self, answer: &str, reference: &str) -> bool {
        match self {
            Self::Strip => strip(answer) == strip(reference),
            Self::Squad => squad(answer) == squad(reference),
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Strip => "white space around both taken away",
            Self::Squad => "as SQuAD: lower case, without punctuation and articles, single blanks",
        }
    }
}

/// `normalize_answer` of SQuAD's evaluation script.
fn squad(text: &str) -> String {
    let text: String = text.to_lowercase().chars().filter(|letter| !letter.is_ascii_punctuation()).collect();
    // A word is what a regular expression of Python takes for one; it may stand against other signs without a blank.
    let mut words = String::with_capacity(text.len());
    let mut rest = text.as_str();
    while let Some(first) = rest.chars().next() {
        let is_word = first.is_alphanumeric();
        let end = rest.find(|letter: char| letter.is_alphanumeric() != is_word).unwrap_or(rest.len());
        let (run, after) = rest.split_at(end);
        words.push_str(if matches!(run, "a" | "an" | "the") { " " } else { run });
        rest = after;
    }
    let words = words.split(is_space).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join(" ")
}

/// A text without the white space around it, as Python's `strip` gives it.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_compared_as_they_stand_but_for_what_is_around_them() {
        let equal = |answer, reference| Normalization::Strip.equal(answer, reference);
        assert!(equal(" Five rows.\n", "Five rows."));
        assert!(equal("", "  "));
        assert!(equal("\u{1c}five\u{1f}\u{85}", "five\u{a0}"));
        assert!(!equal("five\u{200b}", "five"));
        assert!(!equal("five rows.", "Five rows."));
        assert!(!equal("Five  rows.", "Five rows."));
    }

    /// The right sides are what `normalize_answer` of SQuAD's `evaluate-v1.1.py` gives.
    #[test]
    fn squad_is_as_in_its_script() {
        for (text, expected) in [
            ("The Cat, sat on a mat!", "cat sat on mat"),
            ("an apple a day", "apple day"),
            ("  Another  \t theme\n", "another theme"),
            ("the", ""),
            ("U.S.A.", "usa"),
            ("a-b", "ab"),
            ("«the» café", "« » café"),
            ("1,000", "1000"),
            ("\u{1d}two\u{1e}words\u{1f}", "two words"),
        ] {
            assert_eq!(squad(text), expected, "{text}");
        }
    }
}
