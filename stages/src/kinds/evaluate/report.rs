//! The table that a person reads.

use super::figures::Figures;

/// The headline figures, beside those of other evaluations where there are any.
pub(super) fn table(stage: &str, figures: &Figures, others: &[(&str, Figures)]) -> String {
    let all: Vec<(&str, &Figures)> =
        others.iter().map(|(stage, figures)| (*stage, figures)).chain([(stage, figures)]).collect();
    // Two stand side by side; of more, each has a line.
    let rows = if all.len() <= 2 { transposed(&by_stage(&all, figures)) } else { by_stage(&all, figures) };
    aligned(&rows).join("\n")
}

/// A heading, then a row for each evaluation with the figures that `of` has.
fn by_stage(all: &[(&str, &Figures)], of: &Figures) -> Vec<Vec<String>> {
    let names: Vec<&str> = of.headlines().into_iter().map(|(name, _)| name).collect();
    let heading = std::iter::once("").chain(names.iter().copied()).map(str::to_owned).collect();
    let row = |(stage, figures): &(&str, &Figures)| {
        let known = figures.headlines();
        let value = |name: &&str| {
            let value = known.iter().find(|(known, _)| known == name);
            value.map_or_else(String::new, |(_, value)| number(*value))
        };
        std::iter::once((*stage).to_owned()).chain(names.iter().map(value)).collect()
    };
    std::iter::once(heading).chain(all.iter().map(row)).collect()
}

fn transposed(rows: &[Vec<String>]) -> Vec<Vec<String>> {
    (0..rows[0].len()).map(|column| rows.iter().map(|row| row[column].clone()).collect()).collect()
}

/// Lines with the first column to the left and the others to the right.
pub(super) fn aligned(rows: &[Vec<String>]) -> Vec<String> {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let first = format!("{:<width$}", row[0], width = widths[0]);
        let others = row.iter().zip(&widths).skip(1).map(|(cell, width)| format!("  {cell:>width$}"));
        first + &others.collect::<String>()
    };
    rows.iter().map(line).collect()
}

/// Four places after the point, fewer for large numbers.
fn number(value: f64) -> String {
    if value >= 1e6 {
        format!("{value:.3e}")
    } else if value >= 1000.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.4}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn figures(perplexity: f64, rouge: Option<[f64; 4]>) -> Figures {
        let mut figures = Figures::of_rows(12);
        figures.insert("perplexity", json!({ "value": perplexity }));
        if let Some([rouge1, rouge2, rouge_l, rouge_lsum]) =
            rouge.map(|means| means.map(|mean| json!({ "fmeasure": mean })))
        {
            let means = json!({ "rouge1": rouge1, "rouge2": rouge2, "rougeL": rouge_l, "rougeLsum": rouge_lsum });
            figures.insert("rouge", means);
        }
        figures
    }

    #[test]
    fn two_evaluations_stand_side_by_side() {
        let text = table(
            "after",
            &figures(3.25, Some([0.875, 0.0, 0.0, 0.0])),
            &[("before", figures(1234.56, Some([0.0; 4])))],
        );
        let expected = "            before   after\n\
                        perplexity  1234.6  3.2500\n\
                        rouge1      0.0000  0.8750\n\
                        rouge2      0.0000  0.0000\n\
                        rougeL      0.0000  0.0000\n\
                        rougeLsum   0.0000  0.0000";
        assert_eq!(text, expected);
    }

    #[test]
    fn of_several_evaluations_each_has_a_line() {
        let only = |perplexity| figures(perplexity, None);
        let text = table("last", &only(3.0), &[("scores[rank=4]", only(10.5)), ("scores[rank=16]", only(2.25))]);
        let expected = "                 perplexity\n\
                        scores[rank=4]      10.5000\n\
                        scores[rank=16]      2.2500\n\
                        last                 3.0000";
        assert_eq!(text, expected);
    }

    #[test]
    fn one_evaluation_stands_alone() {
        assert_eq!(table("scores", &figures(3.25, None), &[]), "            scores\nperplexity  3.2500");
    }
}
