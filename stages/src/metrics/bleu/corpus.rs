//! BLEU as a metric of `evaluate`: of all answers together.

use engine::error::StageError;
use engine::figure::Unit;
use serde_json::json;

use super::{Bleu, Counts};
use crate::metrics::{Better, Column, Definition, Found, Headline, Measurement, Observed, Reads};

pub(in crate::metrics) const DEFINITION: Definition = Definition {
    reads: Reads::Answer,
    headlines: &[Headline {
        name: "bleu",
        at: "/score",
        // It is of all rows together, and no mean of theirs.
        error_at: None,
        unit: Unit::Points,
        better: Better::Higher,
    }],
    columns: &[Column::Numbers("bleu")],
    start: |_| Box::new(Corpus::default()),
};

const CONVENTION: &str =
    "as sacrebleu's corpus_bleu: tokenizer 13a, case kept, exponential smoothing, from 0 to 100; answers are greedy";
const SIGNATURE: &str = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp";

#[derive(Default)]
struct Corpus {
    counts: Counts,
    rows: u64,
}

impl Measurement for Corpus {
    fn add(&mut self, row: &Observed<'_>) -> Vec<f64> {
        let Observed::Answer { prediction, reference } = row else { return Vec::new() };
        let counts = Counts::of(prediction, reference);
        self.counts += counts;
        self.rows += 1;
        vec![counts.sentence().score]
    }

    fn figure(&self, _: u64) -> Result<Found, StageError> {
        let Bleu { score, precisions, brevity_penalty } = self.counts.corpus();
        let Counts { hypothesis_length, reference_length, .. } = self.counts;
        let rows = self.rows;
        let shown = precisions.map(|precision| format!("{precision:.1}")).join("/");
        Ok(Found {
            figure: json!({
                "score": score,
                "precisions": precisions,
                "brevity_penalty": brevity_penalty,
                "hypothesis_length": hypothesis_length,
                "reference_length": reference_length,
                "rows": rows,
                "signature": SIGNATURE,
                "convention": CONVENTION,
            }),
            meaning: format!(
                "BLEU: {CONVENTION}; precisions {shown}, brevity penalty {brevity_penalty:.3}, {hypothesis_length} tokens against \
                 {reference_length}; {rows} rows; {SIGNATURE}"
            ),
        })
    }
}
