//! The share of pairs whose better response is the likelier one.

use engine::error::StageError;
use engine::figure::Unit;
use serde_json::json;

use super::standard_error::Mean;
use super::{Better, Definition, Found, Headline, Measurement, Observed, Reads};

pub(super) const DEFINITION: Definition = Definition {
    reads: Reads::Pair,
    headlines: &[
        Headline {
            name: "preference_accuracy",
            at: "/value",
            error_at: Some("/stderr"),
            unit: Unit::Share,
            better: Better::Higher,
        },
        Headline {
            name: "preference_margin",
            at: "/mean_margin",
            error_at: Some("/mean_margin_stderr"),
            unit: Unit::Nats,
            better: Better::Higher,
        },
    ],
    columns: &[],
    start: |_| Box::new(Preferred::default()),
};

const CONVENTION: &str = "share of pairs whose chosen response has the larger summed log-probability given the prompt, end of \
                          text included; a tie is no success";

#[derive(Default)]
struct Preferred {
    pairs: u64,
    /// Pairs whose better response has the larger summed log-probability.
    preferred: u64,
    /// The same by the mean log-probability of a response's tokens.
    preferred_by_token: u64,
    /// Summed difference of the log-probabilities, in nats.
    margin: f64,
    /// Successes and margins of each pair.
    success: Mean,
    margins: Mean,
}

impl Measurement for Preferred {
    fn add(&mut self, row: &Observed<'_>) -> Vec<f64> {
        let Observed::Pair { chosen, rejected } = row else { return Vec::new() };
        let by_token = rejected.nll / rejected.tokens as f64 - chosen.nll / chosen.tokens as f64;
        let margin = rejected.nll - chosen.nll;
        self.pairs += 1;
        self.preferred += u64::from(margin > 0.0);
        self.preferred_by_token += u64::from(by_token > 0.0);
        self.margin += margin;
        self.success.add(f64::from(u8::from(margin > 0.0)));
        self.margins.add(margin);
        Vec::new()
    }

    fn figure(&self, skipped_rows: u64) -> Result<Found, StageError> {
        let Self { pairs, preferred, .. } = *self;
        let of_pairs = |sum: f64| sum / pairs as f64;
        let by_token = of_pairs(self.preferred_by_token as f64);
        Ok(Found {
            figure: json!({
                "value": of_pairs(preferred as f64),
                "stderr": self.success.standard_error(),
                "by_token": by_token,
                "mean_margin": of_pairs(self.margin),
                "mean_margin_stderr": self.margins.standard_error(),
                "preferred": preferred,
                "pairs": pairs,
                "skipped_rows": skipped_rows,
                "convention": CONVENTION,
            }),
            meaning: format!(
                "preference_accuracy: {CONVENTION}; {preferred} of {pairs} pairs, {by_token:.4} by the mean of the tokens; \
                 preference_margin: mean difference in nats"
            ),
        })
    }
}
