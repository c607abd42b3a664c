//! What the first rows of files say before anything runs: what a row is, whether the columns asked for are there, and
//! whether the rows can be used.

use std::fs;
use std::io::Read as _;
use std::ops::{ControlFlow, Range};

use engine::artifact::Facts;
use engine::error::StageError;
use engine::file::problem::{Problem, Severity};
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast};
use engine::local_files::{Extent, LocalFile, LocalFiles, MOST_READ, PINNED};
use engine::stage::InputFacts;

use super::arrange::{ROWS, TEST, TRAIN};
use super::flaw::{Flaw, Reason, TO_UTF8};
use super::form::{Compression, Form, Format, SourceFile};
use super::hub_metadata::{self, FIRST_BYTES, README};
use super::parameters::{Dataset, Mix, WeightedRows};
use super::read::Reading;
use super::recipe::{Misfit, Recipe};
use super::source::{LocalSource, Source};
use super::{counts, expression, first_with_columns, local, mapping, take};
use crate::data::artifact::{HAS_TURNS, MEDIUM, Medium, Row, RowsFacts, is_part_list};

const ROWS_TRIED: u64 = 64;

/// What a row is and how many there will be, as far as that is known, and what is wrong with the sources.
pub(super) fn forecast(params: &Dataset, ahead: &Ahead<'_>) -> Forecast {
    let Ahead { files, span, .. } = *ahead;
    let (mut forecast, mut of_sources) = (Forecast::default(), None);
    let outputs: &[&str] = if params.train_test_split.is_some() { &[TRAIN, TEST] } else { &[ROWS] };
    let facts = match (&params.source, &params.datasets) {
        (Some(Source::Local(sources)), None) => {
            let files = source_files(sources, files, &mut forecast.problems);
            of_sources = lines(&files);
            of_files(params, &params.reading(), &files, Trial::FirstRows, span, &mut forecast.problems)
        }
        (Some(Source::Hub { .. }), None) => match files.files(PINNED) {
            [] => mapping::facts_asked_for(params).map(Seen::from),
            listed => of_repository(params, listed, span, &mut forecast.problems),
        },
        (None, Some(datasets)) => of_mix(params, datasets, ahead.certain),
        _ => None,
    };
    if let Some(facts) = facts.map(Seen::into_facts) {
        outputs.iter().for_each(|output| forecast.facts(output, facts.clone()));
    } else if let Some(shape) = mapping::shape_asked_for(params) {
        let shape = serde_json::to_value(shape).expect("a shape is JSON");
        outputs.iter().for_each(|output| forecast.expect(output, "shape", shape.clone()));
    }
    for (output, rows) in counts::expected(params, ahead.expected, of_sources) {
        forecast.expect(output, "rows", rows);
    }
    forecast
}

/// What rows of a repository are, as far as its README and the first of its files tell that is read; what is wrong with
/// it is reported.
fn of_repository(params: &Dataset, listed: &[LocalFile], span: Span, problems: &mut Vec<Problem>) -> Option<Seen> {
    let asked_for = || mapping::facts_asked_for(params).map(Seen::from);
    let whole = |file: &&LocalFile| file.relative == README && file.extent == Extent::Whole;
    let readme = listed.iter().find(whole).and_then(|file| fs::read(&file.path).ok());
    let paths: Vec<&str> = listed.iter().map(|file| file.relative.as_str()).collect();
    // A README that is too long to be read ahead may say anything.
    if readme.is_none() && paths.contains(&README) {
        return asked_for();
    }
    let (configuration, splits) = match hub_metadata::splits(params, readme.as_deref(), &paths) {
        Ok(found) => found,
        Err(error) => {
            let field = if params.config.is_some() && !error.message.contains("split") { "config" } else { "split" };
            let problem = Problem::error("bad-value", span, chain(&error), "not a part of the dataset").at(field);
            problems.push(problem.with_help_if(error.help));
            return asked_for();
        }
    };
    let first = hub_metadata::first_file(params, &splits)?;
    let seen = listed.iter().find(|file| file.relative == first && file.extent != Extent::Name);
    let Some(file) = seen.and_then(|file| SourceFile::new(file.path.clone(), file.name.clone())) else {
        return asked_for();
    };
    let field = params.field.clone().or(configuration.and_then(|configuration| configuration.field));
    let reading = Reading { field, ..params.reading() };
    let is_whole = seen.is_some_and(|file| file.extent == Extent::Whole);
    let file = SourceFile { at_most: Some(if is_whole { MOST_READ } else { FIRST_BYTES }), ..file };
    // Where the first file says nothing, the next one may.
    if first_with_columns(|| [&file].into_iter(), &reading).is_err() {
        return asked_for();
    }
    let rows_are_here = is_whole || file.form.format.has_lines();
    let trial = if rows_are_here { Trial::FirstRows } else { Trial::ColumnsAlone };
    of_files(params, &reading, &[file], trial, span, problems)
}

/// What of a file is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trial {
    FirstRows,
    /// Its columns: its rows are not here.
    ColumnsAlone,
}

/// What the first rows of a source show.
struct Seen {
    facts: RowsFacts,
    /// Whether one with judged responses has turns of a conversation.
    has_turns: bool,
    /// An image, a video or sound in one of them, where that is sure to be among the rows that are made.
    medium: Option<Medium>,
}

impl From<RowsFacts> for Seen {
    fn from(facts: RowsFacts) -> Self {
        Self { facts, has_turns: false, medium: None }
    }
}

impl Seen {
    /// What is known without having counted anything.
    fn into_facts(self) -> Facts {
        let mut facts = self.facts.to_facts();
        for count in ["rows", "dropped", "filtered", "empty"] {
            facts.remove(count);
        }
        if self.has_turns {
            facts.insert(HAS_TURNS.to_owned(), true.into());
        }
        if let Some(medium) = self.medium {
            facts.insert(MEDIUM.to_owned(), serde_json::to_value(medium).expect("a medium is JSON"));
        }
        facts
    }
}

/// A mix has the rows of its parts.
fn of_mix(params: &Dataset, datasets: &[WeightedRows], inputs: &InputFacts) -> Option<Seen> {
    let parts = || datasets.iter().filter_map(|dataset| dataset.rows.reference.facts_in(inputs));
    let facts = parts().find_map(RowsFacts::from_facts)?;
    let medium = parts().find_map(|facts| serde_json::from_value(facts.get(MEDIUM)?.clone()).ok());
    let medium = medium.filter(|_| !may_lose_rows(params));
    Some(Seen { facts, has_turns: parts().any(|facts| facts.contains_key(HAS_TURNS)), medium })
}

/// Whether a row that was seen ahead, and made, may not be among the rows of an output.
fn may_lose_rows(params: &Dataset) -> bool {
    let is_mixed = params.datasets.is_some();
    let is_chosen = is_mixed && (params.filter.is_some() || params.mix == Mix::Interleave);
    let is_limited = params.limit.is_some() && (is_mixed || params.shuffle);
    is_chosen || is_limited || params.train_test_split.is_some() || params.held_out.0.decontaminate.is_some()
}

/// The files that can be read; one that was named and cannot be is reported.
fn source_files(sources: &[LocalSource], files: &LocalFiles, problems: &mut Vec<Problem>) -> Vec<SourceFile> {
    let mut all = Vec::new();
    for source in sources {
        let named = files.files(&source.role);
        let mut found = Vec::new();
        for file in named {
            match SourceFile::new(file.path.clone(), file.name.clone()) {
                Some(file) if named.len() > 1 && is_part_list(&file.path) => {}
                Some(file) => found.push(SourceFile { at_most: Some(MOST_READ), ..file }),
                None if named.len() > 1 => {}
                None => {
                    let message = format!("`{}` does not have a supported format", file.name);
                    let problem = Problem::error("unreadable-rows", source.span, message, "a file of rows?");
                    problems.push(problem.with_help(format!("it should end in {}", Form::known())));
                }
            }
        }
        match local::files_of_rows(found) {
            Ok(found) => all.extend(found),
            Err(error) => {
                let problem = Problem::error("unreadable-rows", source.span, error.message, "cannot be read as rows");
                problems.push(problem.with_help_if(error.help));
            }
        }
    }
    all
}

/// How many rows files have that hold one per line, as far as they are read ahead: of a longer one as many as its
/// length lets expect. Quoted line breaks of CSV count as rows; nothing is checked by this number.
fn lines(files: &[SourceFile]) -> Option<u64> {
    if files.is_empty() {
        return None;
    }
    let of_file = |file: &SourceFile| {
        let (header, is_plain) = match file.form.format {
            Format::JsonLines | Format::Text => (0, true),
            Format::Csv | Format::Tsv => (1, true),
            Format::Json | Format::Parquet | Format::Arrow => (0, false),
        };
        if !is_plain || file.form.compression != Compression::None {
            return None;
        }
        let mut begin = Vec::new();
        let opened = cache::regular::open(&file.path).ok()?;
        let length = opened.metadata().ok()?.len();
        opened.take(MOST_READ).read_to_end(&mut begin).ok()?;
        let found = begin.split(|byte| *byte == b'\n').filter(|line| !line.trim_ascii().is_empty()).count() as u64;
        let read = begin.len() as u64;
        let all = if read < length { (found as f64 * length as f64 / read as f64).round() as u64 } else { found };
        Some(all.saturating_sub(header))
    };
    files.iter().map(of_file).sum()
}

/// What rows of files are, as far as the first file tells; what is wrong with it is reported.
fn of_files(
    params: &Dataset,
    reading: &Reading,
    files: &[SourceFile],
    trial: Trial,
    span: Span,
    problems: &mut Vec<Problem>,
) -> Option<Seen> {
    if files.is_empty() {
        return None;
    }
    let unreadable = |error: &StageError| {
        let field = if params.field.is_some() { "field" } else { "source" };
        let problem = Problem::error("unreadable-rows", span, chain(error), "cannot be read as rows").at(field);
        problem.with_help_if(error.help.clone())
    };
    let (first, columns) = match first_with_columns(|| files.iter(), reading) {
        Ok(found) => found,
        // What lies beyond the bytes that are read may be all that is missing.
        Err(_) if files.iter().any(SourceFile::is_cut) => return None,
        Err(error) => {
            problems.push(unreadable(&error));
            return None;
        }
    };
    let environment = expression::environment();
    let recipe = match Recipe::plan(params, &environment, &columns, first, reading) {
        Ok(recipe) => recipe,
        Err(Misfit::Columns(misfit)) => {
            problems.push(misfit.problem(span));
            return None;
        }
        Err(Misfit::Stage(error)) => {
            problems.push(unreadable(&error));
            return None;
        }
    };
    let oddities = recipe.oddities(&first.name).into_iter();
    problems
        .extend(oddities.map(|oddity| Problem::warning("unknown-column", span, oddity, "not a column").at("filter")));
    let mut seen = Seen::from(recipe.facts().clone());
    let rows = first_rows(params).filter(|_| trial == Trial::FirstRows);
    if let Some(mut problem) = rows.and_then(|rows| try_rows(params, reading, first, rows, &recipe, span, &mut seen)) {
        if problem.code == "unknown-column" {
            problem.help = Some(format!("its columns are {}", mapping::list(&columns)));
        }
        problems.push(problem);
    }
    Some(seen)
}

/// The first rows that the split takes of its first file, where that does not depend on how many there are.
fn first_rows(params: &Dataset) -> Option<Range<u64>> {
    if params.split.needs_count() {
        return None;
    }
    let ranges = params.split.ranges(|_| Some(u64::MAX)).ok()?;
    let rows = &ranges.first()?.rows;
    // Those far behind are not looked for.
    (rows.start < ROWS_TRIED).then(|| rows.start..rows.end.min(rows.start + ROWS_TRIED))
}

/// What was found in the rows that were tried.
#[derive(Default)]
struct Tried {
    /// Those that a filter leaves out among them.
    usable: u64,
    kept: u64,
    unusable: u64,
    /// The place of the first that cannot be used, and why.
    first: Option<(u64, Flaw)>,
    /// The first that the stage fails over.
    fails: Option<(u64, Flaw)>,
}

/// Makes rows of the first records, and says what the stage would stumble over.
fn try_rows(
    params: &Dataset,
    reading: &Reading,
    file: &SourceFile,
    rows: Range<u64>,
    recipe: &Recipe<'_>,
    span: Span,
    seen: &mut Seen,
) -> Option<Problem> {
    let mut tried = Tried::default();
    let loses_rows = may_lose_rows(params);
    let read = file.read(rows, &recipe.wanted(), reading, &mut |record| {
        let (number, made) = match record {
            Ok(record) => (record.number, recipe.row(record)),
            Err(bad) => (bad.number, Err(bad.flaw)),
        };
        match made {
            Ok(made) => {
                tried.usable += 1;
                if let ControlFlow::Continue(made) = made {
                    tried.kept += 1;
                    let medium = made.row.medium().filter(|_| !loses_rows).map(|(turn, role, kind)| Medium {
                        place: file.place(number),
                        turn,
                        role: role.to_owned(),
                        kind: kind.to_owned(),
                    });
                    seen.medium = seen.medium.take().or(medium);
                    seen.has_turns |= matches!(made.row, Row::Judged(judged) if judged.has_turns());
                }
            }
            Err(flaw) if take::policy(&flaw, params.on_empty, params.on_bad_row).1 => {
                tried.fails = Some((number, flaw));
            }
            Err(flaw) => {
                tried.unusable += 1;
                tried.first.get_or_insert((number, flaw));
            }
        }
        // The rows behind those that are taken are not looked at.
        let is_full = !params.shuffle && params.limit.is_some_and(|limit| tried.kept >= limit);
        Ok(if is_full || tried.fails.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    });
    if let Err(error) = read
        && !file.is_cut()
    {
        let problem = Problem::error("unreadable-rows", span, chain(&error), "cannot be read as rows").at("source");
        return Some(problem.with_help_if(error.help));
    }
    let (severity, number, flaw) = match (tried.fails, tried.first) {
        (Some((number, flaw)), _) => (Severity::Error, number, flaw),
        (None, Some((number, flaw))) if tried.usable == 0 => (Severity::Warning, number, flaw),
        (None, _) => return None,
    };
    let field = flaw.field.clone().unwrap_or_else(|| "source".to_owned());
    let place = file.place(number);
    let message = match severity {
        Severity::Error => format!("{place}: {}", flaw.problem),
        Severity::Warning => {
            format!("none of the first {} rows can be used; {place}: {}", tried.unusable, flaw.problem)
        }
    };
    let (policy, _) = take::policy(&flaw, params.on_empty, params.on_bad_row);
    let mend = if flaw.reason == Reason::NotUtf8 { TO_UTF8 } else { "correct the data, name other columns" };
    let help = format!("{mend}, or leave such rows out with `{policy}: drop`");
    // An expression that asks for what is not there is at fault itself.
    let problem = match (flaw.reason, flaw.field) {
        (Reason::Missing, Some(_)) => Problem::error("unknown-column", span, message, "no column of the data"),
        _ => Problem::error("bad-row", span, message, "a row of this cannot be used").with_help(help),
    };
    Some(Problem { severity, ..problem }.at(field))
}

/// An error and what lay beneath it, in one line.
fn chain(error: &StageError) -> String {
    let sources = std::iter::successors(std::error::Error::source(error), |error| error.source());
    sources.fold(error.to_string(), |text, source| format!("{text}: {source}"))
}
