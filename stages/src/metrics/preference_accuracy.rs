//! The share of pairs whose better response is the likelier one.

use engine::error::StageError;
use engine::figure::Unit;
use serde_json::json;

use super::{Better, Definition, Found, Headline, Measurement, Observed, Reads};

pub(super) const DEFINITION: Definition = Definition {
    reads: Reads::Pair,
    headlines: &[
        Headline { name: "preference_accuracy", at: "/value", unit: Unit::Share, better: Better::Higher },
        Headline { name: "preference_margin", at: "/mean_margin", unit: Unit::Nats, better: Better::Higher },
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
        Vec::new()
    }

    fn figure(&self, skipped_rows: u64) -> Result<Found, StageError> {
        let Self { pairs, preferred, .. } = *self;
        let of_pairs = |sum: f64| sum / pairs as f64;
        let by_token = of_pairs(self.preferred_by_token as f64);
        Ok(Found {
            figure: json!({
                "value": of_pairs(preferred as f64),
                "by_token": by_token,
                "mean_margin": of_pairs(self.margin),
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
