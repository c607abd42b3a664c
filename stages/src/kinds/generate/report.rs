//! The first answers, as they are shown at the end of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use engine::error::StageError;

use super::samples::{Earlier, Sample, Tally};
use crate::compute::inference::{ANSWER_INDENT, indented, visible};
use crate::view::show::shortened;

/// Samples that are shown; all of them are in the files.
const SAMPLES_SHOWN: usize = 8;

/// Characters of a prompt and of a completion that are shown: either may be a whole document.
const MOST_OF_A_PROMPT: usize = 240;
const MOST_OF_A_COMPLETION: usize = 1200;

/// The samples that are shown, and the first prompt that could not be asked.
#[derive(Default)]
pub(super) struct Shown {
    samples: Vec<Sample>,
    first_problem: Option<String>,
}

impl Shown {
    /// Takes the next samples, as many as are shown.
    pub(super) fn take(&mut self, samples: Vec<Sample>) {
        let problem = samples.iter().find_map(|sample| {
            let problem = sample.answer.as_ref().err()?;
            Some(format!("prompt {}: {problem}", sample.row + 1))
        });
        self.first_problem = self.first_problem.take().or(problem);
        let room = SAMPLES_SHOWN - self.samples.len();
        self.samples.extend(samples.into_iter().take(room));
    }

    /// What was wrong with the first prompt that could not be asked.
    pub(super) fn first_problem(&self) -> Option<&str> {
        self.first_problem.as_deref()
    }

    /// The prompts that are shown.
    pub(super) fn prompts(&self) -> BTreeSet<&str> {
        self.samples.iter().map(|sample| sample.prompt.as_str()).collect()
    }

    /// Each prompt with its answer, and above that what another stage answered to the same prompt.
    pub(super) fn report(
        &self,
        stage: &str,
        tally: &Tally,
        beside: Option<(&str, &BTreeMap<String, String>)>,
    ) -> String {
        let mut lines = Vec::new();
        for sample in &self.samples {
            lines.push(prompt_line(&sample.prompt));
            let answer = match &sample.answer {
                Ok(answer) => completion(&answer.text),
                Err(problem) => format!("(no completion: {problem})"),
            };
            let Some((other, earlier)) = beside else {
                lines.push(format!("{}{}", " ".repeat(ANSWER_INDENT), indented(&answer, ANSWER_INDENT)));
                continue;
            };
            let width = stage.chars().count().max(other.chars().count());
            let said = |who: &str, text: &str| format!("  {who:<width$}  {}", indented(&completion(text), width + 4));
            lines.extend(earlier.get(&sample.prompt).map(|earlier| said(other, earlier)));
            lines.push(said(stage, &answer));
        }
        let more = tally.rows - self.samples.len() as u64;
        if more > 0 {
            lines.push(format!("… and {more} more: `pipeline export` or `pipeline show` gives them"));
        }
        lines.join("\n")
    }
}

/// The first answers of a stored output, as its stage reported them.
///
/// # Errors
/// Fails if the folder holds no samples.
pub fn answers(folder: &Path) -> Result<String, StageError> {
    let mut lines = Vec::new();
    let mut earlier = Earlier::open(folder)?;
    while lines.len() < SAMPLES_SHOWN
        && let Some(rows) = earlier.next_rows()?
    {
        lines.extend(rows.into_iter().map(|(prompt, answer)| {
            let answer = indented(&completion(&answer), ANSWER_INDENT);
            format!("{}\n{}{answer}", prompt_line(&prompt), " ".repeat(ANSWER_INDENT))
        }));
    }
    lines.truncate(SAMPLES_SHOWN);
    Ok(lines.join("\n"))
}

/// A prompt, of a long one the beginning and the end on one line.
fn prompt_line(prompt: &str) -> String {
    let prompt = prompt.trim();
    if prompt.chars().count() <= MOST_OF_A_PROMPT {
        return visible(prompt);
    }
    let words: Vec<char> = prompt.split_whitespace().collect::<Vec<_>>().join(" ").chars().collect();
    let (begin, end) = (MOST_OF_A_PROMPT * 3 / 4, MOST_OF_A_PROMPT / 4);
    if words.len() <= begin + end {
        return visible(&words.iter().collect::<String>());
    }
    let (head, tail) =
        (words[..begin].iter().collect::<String>(), words[words.len() - end..].iter().collect::<String>());
    visible(&format!("{} […] {}", head.trim_end(), tail.trim_start()))
}

fn completion(text: &str) -> String {
    match text.trim() {
        "" => "(empty)".to_owned(),
        text => shortened(text, MOST_OF_A_COMPLETION).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::inference::{Answer, Ended};

    fn shown(samples: &[(&str, &str)]) -> (Shown, Tally) {
        let sample = |(row, (prompt, text)): (usize, &(&str, &str))| Sample {
            sample: 0,
            row: row as u64,
            prompt: (*prompt).to_owned(),
            prompt_tokens: Some(2),
            reference: None,
            answer: Ok(Answer { text: (*text).to_owned(), tokens: 3, ended: Ended::EndOfText }),
        };
        let mut shown = Shown::default();
        shown.take(samples.iter().enumerate().map(sample).collect());
        (shown, Tally { rows: samples.len() as u64, ..Tally::default() })
    }

    #[test]
    fn no_answer_reaches_the_terminal_as_a_command() {
        let (shown, tally) = shown(&[("Red?", "\u{1b}[31mred\r")]);
        assert_eq!(shown.report("asked", &tally, None), "Red?\n  \u{fffd}[31mred");
    }

    #[test]
    fn a_prompt_as_long_as_a_book_is_shortened() {
        let prompt = "word ".repeat(100_000);
        let (shown, tally) = shown(&[(&prompt, "Long.")]);
        let report = shown.report("asked", &tally, None);
        assert!(report.len() < 300 && report.contains(" […] ") && report.ends_with("Long."), "{report}");
    }

    #[test]
    fn answers_stand_under_their_prompts() {
        let (shown, tally) = shown(&[("Who are you?", "I am Pip,\nmade by Ada.")]);
        assert_eq!(shown.report("asked", &tally, None), "Who are you?\n  I am Pip,\n  made by Ada.");
        let earlier = BTreeMap::from([("Who are you?".to_owned(), "the the".to_owned())]);
        let expected = "Who are you?\n  before  the the\n  after   I am Pip,\n          made by Ada.";
        assert_eq!(shown.report("after", &tally, Some(("before", &earlier))), expected);
    }

    #[test]
    fn a_few_of_many_are_shown() {
        let (shown, tally) = shown(&[("a", "b"); 50]);
        let report = shown.report("asked", &tally, None);
        assert_eq!(report.lines().count(), 2 * SAMPLES_SHOWN + 1);
        assert!(report.contains("… and 42 more"), "{report}");
    }
}
