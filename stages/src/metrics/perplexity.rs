//! Perplexity of the responses, weighted by tokens.

use engine::error::{Cause, StageError};
use engine::figure::Unit;
use serde_json::json;

use super::standard_error::Ratio;
use super::{Better, Definition, Found, Headline, Measurement, Observed, Reads};

pub(super) const DEFINITION: Definition = Definition {
    reads: Reads::Likelihood,
    headlines: &[Headline {
        name: "perplexity",
        at: "/value",
        error_at: Some("/stderr"),
        unit: Unit::Number,
        better: Better::Lower,
    }],
    columns: &[],
    start: |_| Box::new(Perplexity::default()),
};

const CONVENTION: &str = "exp(sum of negative log-likelihoods / number of tokens), over the tokens of all responses \
                          together, end of text included, prompts not";

#[derive(Default)]
struct Perplexity {
    /// Summed negative log-likelihood of the response tokens, in nats.
    nll: f64,
    tokens: u64,
    /// The same for each row.
    rows: Ratio,
    /// Rows of which only the beginning was read.
    truncated_rows: u64,
    rows_without_tokens: u64,
}

impl Measurement for Perplexity {
    fn add(&mut self, row: &Observed<'_>) -> Vec<f64> {
        let Observed::Likelihood { score, is_cut } = row else { return Vec::new() };
        self.nll += score.nll;
        self.tokens += score.tokens;
        self.rows.add(score.nll, score.tokens);
        self.truncated_rows += u64::from(*is_cut);
        self.rows_without_tokens += u64::from(score.tokens == 0);
        Vec::new()
    }

    fn figure(&self, _: u64) -> Result<Found, StageError> {
        let Self { nll, tokens, rows, truncated_rows, rows_without_tokens } = *self;
        let mean = nll / tokens as f64;
        let value = mean.exp();
        if !value.is_finite() {
            let message = format!("the mean negative log-likelihood is {mean:.3e}: its perplexity is no number");
            let help = "is this model trained, and on this tokenizer?";
            return Err(StageError::new(Cause::Numeric, message).with_help(help));
        }
        Ok(Found {
            figure: json!({
                "value": value,
                // That of the mean, through the slope of `exp` there.
                "stderr": rows.standard_error().map(|error| value * error),
                "nll": nll,
                "tokens": tokens,
                "truncated_rows": truncated_rows,
                "rows_without_tokens": rows_without_tokens,
                "convention": CONVENTION,
            }),
            meaning: format!("perplexity: {CONVENTION}; {tokens} tokens"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::inference::RowScore;

    #[test]
    fn every_token_weighs_the_same() {
        let mut perplexity = Perplexity::default();
        for (nll, tokens, is_cut) in [(1.0, 1, false), (0.0, 3, true), (0.0, 0, false)] {
            perplexity.add(&Observed::Likelihood { score: RowScore { nll, tokens, correct: 0 }, is_cut });
        }
        let Found { figure, meaning } = perplexity.figure(0).unwrap();
        assert_eq!(figure["value"], 0.25_f64.exp());
        assert_eq!((&figure["truncated_rows"], &figure["rows_without_tokens"]), (&json!(1), &json!(1)));
        assert!(meaning.ends_with("; 4 tokens"), "{meaning}");
        // Linearised, over the two rows with tokens: √(2/1 · Σ (nll − 1/4 · tokens)²) / 4, times the perplexity.
        let error = (2.0 * (0.75_f64.powi(2) + 0.75_f64.powi(2))).sqrt() / 4.0 * 0.25_f64.exp();
        assert!((figure["stderr"].as_f64().unwrap() - error).abs() < 1e-12, "{figure}");
        assert!(Perplexity { nll: 1e6, tokens: 1, ..perplexity }.figure(0).is_err());
    }
}
