//! What is wrong with a pipeline file before it is written, and whether it is written all the same.

use std::path::Path;

use engine::file::problem::{Problem, Severity};
use engine::plan::Rejected;
use engine::publish::{Moment, check_targets};

use super::columns::{self, listed};
use super::rows::Rows;
use super::{COLUMNS_NAMED, chat_template};
use crate::Global;
use crate::import::validated;
use crate::recipes::edit::Draft;
use crate::render::{self, Failure, Message};
use crate::terminal::{self, Look};
use crate::words;

/// The text of a draft, and what is wrong with it.
pub(super) struct Checked {
    pub(super) text: String,
    rejected: Option<Rejected>,
}

impl Checked {
    pub(super) fn of(draft: &Draft, file: &Path) -> Self {
        let text = draft.write(file);
        let rejected = validated(file, &text);
        Self { text, rejected }
    }

    /// What keeps a run from beginning.
    fn errors(&self) -> impl Iterator<Item = &Problem> {
        let problems = self.rejected.iter().flat_map(|rejected| &rejected.problems);
        problems.filter(|problem| problem.severity == Severity::Error)
    }

    fn has(&self, code: &str) -> bool {
        self.errors().any(|problem| problem.code == code)
    }

    pub(super) fn lacks_chat_template(&self) -> bool {
        self.has("no-chat-template")
    }

    /// Whether it has a chat template, and no error that the other does not have.
    pub(super) fn is_no_worse_than(&self, other: &Self) -> bool {
        !self.lacks_chat_template() && self.errors().all(|problem| other.has(problem.code))
    }

    /// Whether only the rows are at fault, which a person corrects beside the file.
    fn is_of_rows(&self) -> bool {
        self.errors().all(|problem| ["bad-row", "unclear-rows"].contains(&problem.code))
    }

    /// Shows what is wrong at its place in the file, which will be there.
    fn show(&self) {
        if let Some(rejected) = &self.rejected {
            terminal::tell(render::problems(&rejected.sources, &rejected.problems, Look::stderr()));
        }
    }

    /// Shows what is wrong with a file that will not be there.
    fn refused(&self) -> Failure {
        for problem in self.errors() {
            let text = format!("{} [{}]", problem.message, problem.code);
            render::message(&Message::new(text).with_help_if(problem.help.clone()));
        }
        Failure::wrong("nothing is written: a file for this model and these rows does not validate")
    }
}

/// A text to write.
pub(super) struct Writable {
    pub(super) text: String,
    /// What has to be done before a run of it can succeed.
    pub(super) until: Option<String>,
}

/// The text of a draft that validates, or does but for the rows. A checkpoint that has no chat template gets one.
pub(super) fn check(
    draft: &mut Draft,
    file: &Path,
    rows: &Rows,
    missing_tokens: Option<&[&str]>,
) -> Result<Writable, Failure> {
    let mut checked = Checked::of(draft, file);
    if checked.lacks_chat_template() {
        checked = chat_template::give(draft, file, missing_tokens);
    }
    if !checked.is_of_rows() {
        return Err(checked.refused());
    }
    let until = if checked.has("unclear-rows") {
        draft.remark("dataset", &about_columns(rows));
        checked = Checked::of(draft, file);
        Some(match &rows.field {
            Some(field) => format!("the stage of the rows has `field: {}`", words::visible(field)),
            None => format!("columns are chosen, as a comment in it shows, or by `--columns {}`", columns::EXAMPLE),
        })
    } else {
        checked.has("bad-row").then(|| "these rows are as they should be".to_owned())
    };
    checked.show();
    Ok(Writable { text: checked.text, until })
}

/// What a comment says of columns that do not say what a row is.
fn about_columns(rows: &Rows) -> Vec<String> {
    let (named, more) = rows.columns.split_at(rows.columns.len().min(COLUMNS_NAMED));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    let columns = listed(named);
    vec![
        format!("A run fails until it is said what a row is. The columns are {columns}{more}."),
        "Put in front of `source:` what is meant, such as".to_owned(),
        format!("  {},", rows.example()),
    ]
}

/// Publishes nothing where a target would take along what the file reads or keeps.
pub(super) fn check_publish(draft: &mut Draft, file: &Path, global: &Global) {
    let Ok(plan) = engine::plan::load_text(file, &draft.write(file), &[], &stages::registry()) else { return };
    let problems = check_targets(&plan, &global.home_to_look(file), Moment::Ahead);
    if let Some(problem) = problems.iter().find(|problem| problem.code == "unsafe-target") {
        draft.publish_nothing();
        terminal::tell_line(format_args!("the file publishes nothing: {}", problem.message));
    }
}
