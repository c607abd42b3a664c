//! The catalogue of problem codes: what each means, what to do, and an example with and without the problem.
//!
//! Its source is `docs/problems.md`. `pipeline explain`, the SARIF rules and the tests read it from here.

use std::sync::LazyLock;

use serde::Serialize;

use super::problem::Severity;

/// The source of the catalogue. A row of its table gives a code, its severity and its title; a section gives the rest.
const PAGE: &str = include_str!("../../../docs/problems.md");

static CODES: LazyLock<Vec<ProblemCode>> = LazyLock::new(|| {
    let mut codes: Vec<ProblemCode> = PAGE.lines().filter_map(row).collect();
    codes.sort_by_key(|code| code.code);
    codes
});

#[derive(Debug, Serialize)]
pub struct ProblemCode {
    /// Does not change between versions of the program.
    pub code: &'static str,
    /// The usual severity: an error may be reported as a warning where it does no harm.
    pub severity: Severity,
    pub title: &'static str,
    /// What the code means, and what causes it.
    pub meaning: String,
    /// What to do about it.
    pub advice: String,
    /// A pipeline file with the problem; or one with an override on the command line, or a description, as a comment.
    pub wrong: &'static str,
    /// The same without the problem.
    pub right: &'static str,
}

/// All codes, by name.
pub fn all() -> impl Iterator<Item = &'static ProblemCode> {
    CODES.iter()
}

pub fn find(name: &str) -> Option<&'static ProblemCode> {
    all().find(|code| code.code == name)
}

/// The code of a row of the table, ``| [`code`](#code) | severity | title |``, with the text of its section.
fn row(line: &'static str) -> Option<ProblemCode> {
    let (code, rest) = line.strip_prefix("| [`")?.split_once("`]")?;
    let mut cells = rest.split(" | ").skip(1);
    let severity = match cells.next()? {
        "error" => Severity::Error,
        "warning" => Severity::Warning,
        _ => return None,
    };
    let title = cells.next()?.strip_suffix(" |")?;
    let (_, section) = PAGE.split_once(&format!("\n## `{code}`\n\n"))?;
    let mut paragraphs = section.split("\n\n").map(|paragraph| paragraph.replace('\n', " "));
    let (meaning, advice) = (paragraphs.next()?, paragraphs.next()?);
    let mut examples = section.split("```yaml\n").skip(1).map_while(|text| Some(text.split_once("```\n")?.0));
    Some(ProblemCode { code, severity, title, meaning, advice, wrong: examples.next()?, right: examples.next()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_and_the_sections_have_the_same_codes_in_the_same_order() {
        let sections: Vec<&str> =
            PAGE.lines().filter_map(|line| line.strip_prefix("## `")?.strip_suffix('`')).collect();
        let rows: Vec<&str> = all().map(|code| code.code).collect();
        assert_eq!(rows, sections);
        assert_eq!(PAGE.lines().filter(|line| line.starts_with("| [`")).count(), rows.len(), "a row is not readable");
        assert!(rows.windows(2).all(|pair| pair[0] < pair[1]), "{rows:?}");
        let is_name =
            |code: &str| code.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-');
        assert!(rows.iter().all(|code| is_name(code)), "{rows:?}");
    }

    #[test]
    fn every_section_has_its_paragraphs_and_its_two_examples() {
        for code in all() {
            for text in [&code.meaning, &code.advice] {
                assert!(text.ends_with(['.', '?']) && !text.contains("```"), "{}: {text}", code.code);
            }
            let (_, section) = PAGE.split_once(&format!("\n## `{}`\n", code.code)).expect("has a section");
            let section = section.split("\n## ").next().expect("is not empty");
            assert_eq!(section.matches("```yaml\n").count(), 2, "{}", code.code);
            assert!(section.contains("\nWrong:\n") && section.contains("\nRight:\n"), "{}", code.code);
        }
    }
}
