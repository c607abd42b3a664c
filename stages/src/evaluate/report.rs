//! The table that a person reads.

use super::figures::{AnswerCounts, Figures};

/// The headline figures, beside those of another evaluation where there is one, and what they mean.
pub(super) fn text(stage: &str, figures: &Figures, beside: Option<(&str, &Figures)>) -> String {
    let other: Vec<(&str, f64)> = beside.map_or_else(Vec::new, |(_, figures)| figures.headlines());
    let mut rows = vec![[String::new(), beside.map_or("", |(stage, _)| stage).to_owned(), stage.to_owned()]];
    for (name, value) in figures.headlines() {
        let other = other.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        rows.push([name.to_owned(), other.map_or_else(String::new, number), number(value)]);
    }
    let widths: [usize; 3] =
        std::array::from_fn(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let mut lines: Vec<String> = rows
        .iter()
        .map(|[name, other, value]| {
            let name = format!("{name:<width$}", width = widths[0]);
            let other = if beside.is_some() { format!("  {other:>width$}", width = widths[1]) } else { String::new() };
            format!("{name}{other}  {value:>width$}", width = widths[2])
        })
        .collect();
    lines.extend(conventions(figures));
    lines.join("\n")
}

/// What each figure means.
fn conventions(figures: &Figures) -> Vec<String> {
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
    if let Some(answers) = figures.answers.as_ref().filter(|answers| answers.empty + answers.cut > 0) {
        let AnswerCounts { rows, empty, cut, .. } = answers;
        lines.push(format!("of {rows} answers {empty} are empty and {cut} are cut off"));
    }
    lines
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
        let text = text("after", &figures(3.25, 0.875), Some(("before", &figures(1234.56, 0.0))));
        let expected = "            before   after\n\
                        perplexity  1234.6  3.2500\n\
                        rouge1      0.0000  0.8750\n\
                        rouge2      0.0000  0.0000\n\
                        rougeL      0.0000  0.0000\n\
                        rougeLsum   0.0000  0.0000\n";
        assert!(text.starts_with(expected), "{text}");
        assert!(text.contains("345 tokens") && text.contains("by stems") && text.contains("12 rows"), "{text}");
    }

    #[test]
    fn one_evaluation_stands_alone() {
        let only = Figures { rouge: None, ..figures(3.25, 0.0) };
        assert!(text("scores", &only, None).starts_with("            scores\nperplexity  3.2500\n"));
    }
}
