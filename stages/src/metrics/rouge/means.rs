//! ROUGE as a metric of `evaluate`: means over rows.

use engine::error::StageError;
use engine::figure::Unit;
use serde_json::json;

use super::{Rouge, Score, Stemming, rouge};
use crate::metrics::standard_error::Mean;
use crate::metrics::{Better, Column, Definition, Found, Headline, Measurement, Observed, Reads};

pub(in crate::metrics) const DEFINITION: Definition = Definition {
    reads: Reads::Answer,
    headlines: &[
        of("rouge1", "/rouge1/fmeasure", "/stderr/rouge1"),
        of("rouge2", "/rouge2/fmeasure", "/stderr/rouge2"),
        of("rougeL", "/rougeL/fmeasure", "/stderr/rougeL"),
        of("rougeLsum", "/rougeLsum/fmeasure", "/stderr/rougeLsum"),
    ],
    columns: &[
        Column::Numbers("rouge1"),
        Column::Numbers("rouge2"),
        Column::Numbers("rougeL"),
        Column::Numbers("rougeLsum"),
    ],
    start: |options| {
        Box::new(Sums {
            use_stemmer: options.use_stemmer,
            rows: 0,
            sums: Default::default(),
            means: Default::default(),
        })
    },
};

const fn of(name: &'static str, at: &'static str, error_at: &'static str) -> Headline {
    Headline { name, at, error_at: Some(error_at), unit: Unit::Share, better: Better::Higher }
}

const CONVENTION: &str =
    "as rouge_score: lower case, a-z and 0-9 only, mean over rows, from 0 to 1; answers are greedy";

struct Sums {
    use_stemmer: bool,
    rows: u64,
    sums: [Score; 4],
    /// The F-measures.
    means: [Mean; 4],
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
        let cells = scores.map(|score| score.fmeasure);
        self.means.iter_mut().zip(cells).for_each(|(mean, cell)| mean.add(cell));
        cells.to_vec()
    }

    fn figure(&self, skipped_rows: u64) -> Result<Found, StageError> {
        let Self { use_stemmer, rows, sums, means } = *self;
        let by = rows as f64;
        let [rouge1, rouge2, rouge_l, rouge_lsum] = sums.map(|Score { precision, recall, fmeasure }| Score {
            precision: precision / by,
            recall: recall / by,
            fmeasure: fmeasure / by,
        });
        let errors = means.map(|mean| mean.standard_error());
        let stems = if use_stemmer { "by stems" } else { "word by word" };
        Ok(Found {
            figure: json!({
                "rouge1": rouge1,
                "rouge2": rouge2,
                "rougeL": rouge_l,
                "rougeLsum": rouge_lsum,
                "stderr": {
                    "rouge1": errors[0],
                    "rouge2": errors[1],
                    "rougeL": errors[2],
                    "rougeLsum": errors[3],
                },
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
        // Of 1 and 0: √(1/2) / √2.
        let errors = DEFINITION.headlines.iter().filter_map(|headline| figure.pointer(headline.error_at?)?.as_f64());
        assert_eq!(errors.collect::<Vec<_>>(), [0.5, 0.5, 0.5, 0.5]);
        assert_eq!(figure["skipped_rows"], 3);
        assert!(meaning.contains("by stems") && meaning.ends_with("; 2 rows"), "{meaning}");
    }
}
