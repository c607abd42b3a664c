//! The codes of problems: for each what it means, what to do, and a file that has it beside one that has not.
//!
//! The one place that knows them: `pipeline explain`, the SARIF rules, `docs/problems.md` and the tests read this
//! table. Examples are whole pipeline files, checked beside the files of [`BESIDE`].

mod data;
mod names;
mod stages;
mod sweeps;
mod text;
mod values;

use super::problem::Severity;

/// One code.
#[derive(Debug, Clone, Copy)]
pub struct ProblemCode {
    /// Its stable name.
    pub code: &'static str,
    /// Whether it stops a run, as a rule: what is usually an error may be a warning where it does no harm.
    pub severity: Severity,
    /// What it is, in a few words.
    pub title: &'static str,
    /// What it means, and where it comes from.
    pub meaning: &'static str,
    /// What to do about it.
    pub advice: &'static str,
    /// A case of it.
    pub example: Example,
}

/// A case of a code, and how it is put right.
#[derive(Debug, Clone, Copy)]
pub enum Example {
    /// Pipeline files.
    File {
        /// A file with the mistake.
        wrong: &'static str,
        /// The same file without it.
        right: &'static str,
    },
    /// Overrides on the command line of [`OVERRIDDEN`].
    Override {
        /// One with the mistake.
        wrong: &'static str,
        /// The same without it.
        right: &'static str,
    },
    /// A file that is too large, or no text at all.
    Made {
        /// What it is, in words.
        told: &'static str,
        /// Makes it.
        wrong: fn() -> Vec<u8>,
        /// A file without the mistake.
        right: &'static str,
    },
}

/// The file that examples of overrides change.
pub const OVERRIDDEN: &str = "\
version: 1
stages:
  rows:
    uses: dataset
    with: { source: [./rows.jsonl], split: train }
";

/// What examples call the files beside them, and what is in those.
pub const BESIDE: [(&str, &str); 6] = [
    ("rows.jsonl", "{\"input\": \"What is water?\", \"output\": \"Two parts hydrogen, one part oxygen.\"}\n"),
    (
        "chats.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}, {\"role\": \"assistant\", \"content\": \"Hi\"}]}\n",
    ),
    ("data/rows.jsonl", "{\"input\": \"a\", \"output\": \"b\"}\n"),
    ("counts.jsonl", "{\"input\": \"a\", \"output\": 7}\n"),
    ("questions.jsonl", "{\"question\": \"What is water?\", \"answer\": \"Two parts hydrogen, one part oxygen.\"}\n"),
    ("notes.md", "Notes\n"),
];

/// All codes, by name.
pub fn all() -> impl Iterator<Item = &'static ProblemCode> {
    let mut codes: Vec<&ProblemCode> =
        [text::CODES, names::CODES, values::CODES, data::CODES, stages::CODES, sweeps::CODES]
            .into_iter()
            .flatten()
            .collect();
    codes.sort_by_key(|code| code.code);
    codes.into_iter()
}

/// The code of a name.
pub fn find(name: &str) -> Option<&'static ProblemCode> {
    all().find(|code| code.code == name)
}
