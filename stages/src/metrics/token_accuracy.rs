//! The share of response tokens that the model finds the most likely.

use engine::error::StageError;
use engine::figure::Unit;
use serde_json::json;

use super::standard_error::Ratio;
use super::{Better, Definition, Found, Headline, Measurement, Observed, Reads};

pub(super) const DEFINITION: Definition = Definition {
    reads: Reads::Likelihood,
    headlines: &[Headline {
        name: "token_accuracy",
        at: "/value",
        error_at: Some("/stderr"),
        unit: Unit::Share,
        better: Better::Higher,
    }],
    columns: &[],
    start: |_| Box::new(TokenAccuracy::default()),
};

const CONVENTION: &str = "share of response tokens that are the model's most likely next token with the response before them given, \
                          end of text included, prompts not";

#[derive(Default)]
struct TokenAccuracy {
    correct: u64,
    tokens: u64,
    /// The same for each row.
    rows: Ratio,
}

impl Measurement for TokenAccuracy {
    fn add(&mut self, row: &Observed<'_>) -> Vec<f64> {
        let Observed::Likelihood { score, .. } = row else { return Vec::new() };
        self.correct += score.correct;
        self.tokens += score.tokens;
        self.rows.add(score.correct as f64, score.tokens);
        Vec::new()
    }

    fn figure(&self, _: u64) -> Result<Found, StageError> {
        let Self { correct, tokens, rows } = *self;
        let value = correct as f64 / tokens as f64;
        Ok(Found {
            figure: json!({
                "value": value,
                "stderr": rows.standard_error(),
                "correct": correct,
                "tokens": tokens,
                "convention": CONVENTION,
            }),
            meaning: format!("token_accuracy: {CONVENTION}; {correct} of {tokens} tokens"),
        })
    }
}
