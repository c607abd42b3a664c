//! The table that a person reads.

use super::figures::{AnswerCounts, Figures};

/// The headline figures, beside those of other evaluations where there are any.
pub(super) fn table(stage: &str, figures: &Figures, others: &[(&str, Figures)]) -> String {
    let all: Vec<(&str, &Figures)> =
        others.iter().map(|(stage, figures)| (*stage, figures)).chain([(stage, figures)]).collect();
    // Two stand side by side; of more, each has a line.
    let rows = if all.len() <= 2 { transposed(&by_stage(&all, figures)) } else { by_stage(&all, figures) };
    let mut lines = aligned(&rows);
    lines.extend(figures.answers.as_ref().and_then(unfinished));
    lines.join("\n")
}

/// How many completions are empty or cut off, where any are: then the figures say less than they seem to.
fn unfinished(answers: &AnswerCounts) -> Option<String> {
    let AnswerCounts { rows, empty, cut, .. } = answers;
    let parts = [(empty, "empty"), (cut, "cut off by `max_new_tokens`")];
    let parts = parts.iter().filter(|(count, _)| **count > 0).map(|(count, what)| match *count == rows {
        true => format!("all {rows} completions are {what}"),
        false => format!("{count} of {rows} completions are {what}"),
    });
    let parts: Vec<String> = parts.collect();
    (!parts.is_empty()).then(|| parts.join("; "))
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

/// What each figure means, a line each.
pub(super) fn conventions(figures: &Figures) -> String {
    let mut lines = Vec::new();
    if let Some(perplexity) = &figures.perplexity {
        lines.push(format!("perplexity: {}; {} tokens", perplexity.convention, perplexity.tokens));
    }
    if let Some(accuracy) = &figures.token_accuracy {
        lines.push(format!(
            "token_accuracy: {}; {} of {} tokens",
            accuracy.convention, accuracy.correct, accuracy.tokens
        ));
    }
    if let Some(rouge) = &figures.rouge {
        let stems = if rouge.use_stemmer { "by stems" } else { "word by word" };
        lines.push(format!("ROUGE: F-measure {stems}, {}; {} rows", rouge.convention, rouge.rows));
    }
    if let Some(bleu) = &figures.bleu {
        let precisions = bleu.precisions.map(|precision| format!("{precision:.1}")).join("/");
        lines.push(format!(
            "BLEU: {}; precisions {precisions}, brevity penalty {:.3}, {} tokens against {}; {} rows; {}",
            bleu.convention,
            bleu.brevity_penalty,
            bleu.hypothesis_length,
            bleu.reference_length,
            bleu.rows,
            bleu.signature
        ));
    }
    if let Some(exact) = &figures.exact_match {
        lines.push(format!("exact_match: {}; {} of {} rows", exact.convention, exact.matches, exact.rows));
    }
    if let Some(preference) = &figures.preference_accuracy {
        lines.push(format!(
            "preference_accuracy: {}; {} of {} pairs, {:.4} by the mean of the tokens; preference_margin: mean difference in nats",
            preference.convention, preference.preferred, preference.pairs, preference.by_token
        ));
    }
    lines.join("\n")
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
    use super::super::figures::{Mean, Perplexity, Rouge};
    use super::*;

    fn figures(perplexity: f64, rouge1: f64) -> Figures {
        let mean = Mean { fmeasure: rouge1, ..Mean::default() };
        Figures {
            rows: 12,
            perplexity: Some(Perplexity { value: perplexity, tokens: 345, ..Perplexity::default() }),
            rouge: Some(Rouge { rouge1: mean, rows: 12, use_stemmer: true, ..Rouge::default() }),
            ..Figures::default()
        }
    }

    #[test]
    fn two_evaluations_stand_side_by_side() {
        let text = table("after", &figures(3.25, 0.875), &[("before", figures(1234.56, 0.0))]);
        let expected = "            before   after\n\
                        perplexity  1234.6  3.2500\n\
                        rouge1      0.0000  0.8750\n\
                        rouge2      0.0000  0.0000\n\
                        rougeL      0.0000  0.0000\n\
                        rougeLsum   0.0000  0.0000";
        assert_eq!(text, expected);
        let text = conventions(&figures(3.25, 0.875));
        assert!(text.contains("345 tokens") && text.contains("by stems") && text.contains("12 rows"), "{text}");
    }

    #[test]
    fn of_several_evaluations_each_has_a_line() {
        let only = |perplexity| Figures { rouge: None, ..figures(perplexity, 0.0) };
        let text = table("last", &only(3.0), &[("scores[rank=4]", only(10.5)), ("scores[rank=16]", only(2.25))]);
        let expected = "                 perplexity\n\
                        scores[rank=4]      10.5000\n\
                        scores[rank=16]      2.2500\n\
                        last                 3.0000";
        assert_eq!(text, expected);
    }

    #[test]
    fn one_evaluation_stands_alone() {
        let only = Figures { rouge: None, ..figures(3.25, 0.0) };
        assert_eq!(table("scores", &only, &[]), "            scores\nperplexity  3.2500");
    }
}
