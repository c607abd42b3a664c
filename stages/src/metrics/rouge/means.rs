//! ROUGE as a metric of `evaluate`: means over rows.

use engine::error::StageError;
use engine::figure::Unit;
use serde_json::json;

use super::{Rouge, Score, Stemming, rouge};
use crate::metrics::{Better, Column, Definition, Found, Headline, Measurement, Observed, Reads};

pub(in crate::metrics) const DEFINITION: Definition = Definition {
    reads: Reads::Answer,
    headlines: &[
        Headline { name: "rouge1", at: "/rouge1/fmeasure", unit: Unit::Share, better: Better::Higher },
        Headline { name: "rouge2", at: "/rouge2/fmeasure", unit: Unit::Share, better: Better::Higher },
        Headline { name: "rougeL", at: "/rougeL/fmeasure", unit: Unit::Share, better: Better::Higher },
        Headline { name: "rougeLsum", at: "/rougeLsum/fmeasure", unit: Unit::Share, better: Better::Higher },
    ],
    columns: &[
        Column::Numbers("rouge1"),
        Column::Numbers("rouge2"),
        Column::Numbers("rougeL"),
        Column::Numbers("rougeLsum"),
    ],
    start: |options| Box::new(Sums { use_stemmer: options.use_stemmer, rows: 0, sums: [Score::default(); 4] }),
};

const CONVENTION: &str =
    "as rouge_score: lower case, a-z and 0-9 only, mean over rows, from 0 to 1; answers are greedy";

struct Sums {
    use_stemmer: bool,
    rows: u64,
    sums: [Score; 4],
}

impl Measurement for Sums {
    fn add(&mut self, row: &Observed<'_>) -> Vec<f64> {
        let Observed::Answer { prediction, reference } = row else { return Vec::new() };
        let stemming = if self.use_stemmer { Stemming::Porter } else { Stemming::Off };
        let Rouge { rouge1, rouge2, rouge_l, rouge_lsum } = rouge(prediction, reference, stemming);
        let scores = [rouge1, rouge2, rouge_l, rouge_lsum];
        self.rows += 1;
        for (sum, score) in self.sums.iter_mut().zip(scores) {
            sum.precision += score.precision;
            sum.recall += score.recall;
            sum.fmeasure += score.fmeasure;
        }
        scores.map(|score| score.fmeasure).to_vec()
    }

    fn figure(&self, skipped_rows: u64) -> Result<Found, StageError> {
        let Self { use_stemmer, rows, sums } = *self;
        let by = rows as f64;
        let [rouge1, rouge2, rouge_l, rouge_lsum] = sums.map(|Score { precision, recall, fmeasure }| Score {
            precision: precision / by,
            recall: recall / by,
            fmeasure: fmeasure / by,
        });
        let stems = if use_stemmer { "by stems" } else { "word by word" };
        Ok(Found {
            figure: json!({
                "rouge1": rouge1,
                "rouge2": rouge2,
                "rougeL": rouge_l,
                "rougeLsum": rouge_lsum,
                "rows": rows,
                "skipped_rows": skipped_rows,
                "use_stemmer": use_stemmer,
                "convention": CONVENTION,
            }),
            meaning: format!("ROUGE: F-measure {stems}, {CONVENTION}; {rows} rows"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::MetricOptions;
    use crate::metrics::exact_match::Normalization;

    #[test]
    fn a_figure_is_the_mean_of_the_rows() {
        let options = MetricOptions { use_stemmer: true, normalization: Normalization::Strip };
        let mut sums = (DEFINITION.start)(&options);
        for prediction in ["one two", "three"] {
            let cells = sums.add(&Observed::Answer { prediction, reference: "one two" });
            assert_eq!(cells.len(), DEFINITION.columns.len());
        }
        let Found { figure, meaning } = sums.figure(3).unwrap();
        let means = DEFINITION.headlines.iter().map(|headline| figure.pointer(headline.at).unwrap().as_f64().unwrap());
        assert_eq!(means.collect::<Vec<_>>(), [0.5, 0.5, 0.5, 0.5]);
        assert_eq!(figure["skipped_rows"], 3);
        assert!(meaning.contains("by stems") && meaning.ends_with("; 2 rows"), "{meaning}");
    }
}
