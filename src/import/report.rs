//! The three lists: what was carried over, what with another meaning, and what was not.

use std::fmt::Write as _;

use engine::file::problem::{Problem, Severity};
use engine::file::source::{SourceId, Sources};
use serde::Serialize;
use serde_json::Value as Json;

use super::job::Method;
use super::reading::{Item, Lists};
use crate::render::ProblemView;
use crate::terminal::{Look, wrapped};
use crate::words::plural;

/// Columns that reasons are wrapped at in a pipe.
const WIDTH: usize = 110;

/// Characters that are shown of a value, and columns for the indent and the ellipsis of one that has a line of its own.
const LONGEST_VALUE: usize = 60;
const ROOM_BESIDE_VALUE: usize = 8;

/// What is known once a job was read.
pub(super) struct Report<'a> {
    pub(super) tool: &'a str,
    pub(super) lists: &'a Lists,
    pub(super) sources: &'a Sources,
    pub(super) method: Method,
}

/// The same as a program reads it.
#[derive(Serialize)]
pub(super) struct ReportView<'a> {
    tool: &'a str,
    carried_over: Vec<ItemView<'a>>,
    other_meaning: Vec<ItemView<'a>>,
    not_carried_over: Vec<ItemView<'a>>,
    /// What the tool's own defaults are, where they are written out.
    defaults: Vec<ItemView<'a>>,
    problems: Vec<ProblemView<'a>>,
    /// The pipeline file, where there is one.
    pipeline: Option<&'a str>,
}

/// A key of the tool's configuration.
#[derive(Serialize)]
struct ItemView<'a> {
    key: &'a str,
    value: &'a Json,
    file: Option<&'a str>,
    line: Option<usize>,
    /// The path in the pipeline file.
    becomes: Option<String>,
    reason: Option<&'a str>,
}

impl Report<'_> {
    /// For a person.
    pub(super) fn text(&self, look: Look) -> String {
        let Lists { same, differing, missing } = self.lists;
        let (given, defaults): (Vec<&Item>, Vec<&Item>) = same.iter().partition(|item| item.span.is_some());
        let counts = format!(
            "{}: {} carried over, {} with another meaning, {} not; {} written out",
            self.tool,
            plural(given.len(), "key"),
            differing.len(),
            missing.len(),
            plural(defaults.len(), "default"),
        );
        let mut text = look.wrap(&counts, 2) + "\n";
        self.list(&mut text, "carried over", given.into_iter(), look);
        self.list(&mut text, "carried over with another meaning", differing.iter(), look);
        self.list(&mut text, "not carried over", missing.iter(), look);
        text
    }

    fn list<'i>(&self, text: &mut String, title: &str, items: impl Iterator<Item = &'i Item>, look: Look) {
        let columns = if look.live { look.width } else { WIDTH };
        let mut items = items.peekable();
        if items.peek().is_none() {
            return;
        }
        let _ = writeln!(text, "\n{title}:");
        for item in items {
            let place = match item.span {
                Some(span) if span.source == SourceId(0) => format!(" (line {})", self.sources.line_column(span).0),
                Some(span) => {
                    let name = self.sources.get(span.source).map_or("", |source| source.name.as_str());
                    format!(" ({name}, line {})", self.sources.line_column(span).0)
                }
                None => format!(" (default of {})", self.tool),
            };
            let becomes = item.becomes.as_deref().map_or_else(String::new, |path| format!(" → {}", self.path(path)));
            let value = short(&item.value, LONGEST_VALUE.min(columns.saturating_sub(ROOM_BESIDE_VALUE)));
            let _ = writeln!(text, "{}", look.wrap(&format!("  {}: {value}{place}{becomes}", item.key), 4));
            if let Some(reason) = item.reason.as_deref().filter(|reason| !reason.is_empty()) {
                let words: Vec<&str> = reason.split_whitespace().collect();
                let _ = writeln!(text, "{}", wrapped(&format!("      {}", words.join(" ")), columns, 0));
            }
        }
    }

    /// For a program.
    pub(super) fn view<'v>(&'v self, pipeline: Option<&'v str>, problems: &'v [Problem]) -> ReportView<'v> {
        let Lists { same, differing, missing } = self.lists;
        let (given, defaults): (Vec<&Item>, Vec<&Item>) = same.iter().partition(|item| item.span.is_some());
        ReportView {
            tool: self.tool,
            carried_over: given.into_iter().map(|item| self.item(item)).collect(),
            other_meaning: differing.iter().map(|item| self.item(item)).collect(),
            not_carried_over: missing.iter().map(|item| self.item(item)).collect(),
            defaults: defaults.into_iter().map(|item| self.item(item)).collect(),
            problems: ProblemView::of_all(self.sources, problems),
            pipeline,
        }
    }

    fn item<'v>(&'v self, item: &'v Item) -> ItemView<'v> {
        let source = item.span.and_then(|span| self.sources.get(span.source));
        ItemView {
            key: &item.key,
            value: &item.value,
            file: source.map(|source| source.name.as_str()),
            line: item.span.map(|span| self.sources.line_column(span).0),
            becomes: item.becomes.as_deref().map(|path| self.path(path)),
            reason: item.reason.as_deref(),
        }
    }

    /// A path as the pipeline file has it: the stage that trains is called by what it makes.
    fn path(&self, path: &str) -> String {
        let stage = match self.method {
            Method::Lora => "adapter",
            Method::Full => "model",
        };
        match path.split_once('.') {
            Some(("train", rest)) => format!("{stage}.{rest}"),
            Some(("resources", rest)) => format!("{stage}.resources.{rest}"),
            None if path == "train" => stage.to_owned(),
            _ => path.to_owned(),
        }
    }

    /// What is not carried over, as problems at their places.
    pub(super) fn problems(&self, severity: Severity) -> Vec<Problem> {
        let problem = |item: &Item| {
            let span = item.span.unwrap_or_default();
            let message = format!("`{}` is not carried over", item.key);
            let reason = item.reason.clone().unwrap_or_default();
            Problem { severity, ..Problem::error("not-carried-over", span, message, reason) }
        };
        self.lists.missing.iter().map(problem).collect()
    }
}

fn short(value: &Json, longest: usize) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned).replace('\n', " ");
    match text.char_indices().nth(longest) {
        Some((at, _)) => format!("{} …", &text[..at]),
        None => text,
    }
}
