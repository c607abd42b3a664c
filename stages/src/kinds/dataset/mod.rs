//! `uses: dataset`: rows of text out of files, out of a dataset on the Hub, or out of other datasets.
//!
//! Rows become what later stages need and no more: the columns of a template, a conversation, or plain text. A row that
//! cannot be used is an error that names its file and line, or is left out and counted.
//!
//! The way of a row: a reader ([`read`]) gives a record; the recipe (filter, map, columns) makes a row of it or says
//! what is wrong; the taker counts; the arranger puts rows into their order and writes them.

mod arrange;
mod comparison;
mod conversation;
mod counts;
mod decontaminate;
mod expression;
mod flaw;
mod forecast;
mod form;
mod hub_card;
mod hub_files;
mod hub_metadata;
mod hub_splits;
mod local;
mod lookup;
mod mapping;
mod mix;
mod of_files;
mod parameters;
mod preference;
#[cfg(any(test, fuzzing))]
pub mod properties;
pub mod read;
mod recipe;
mod source;
pub mod split;
mod spool;
mod take;
mod template_choice;
mod tools;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use engine::artifact::Output;
use engine::change::{StoredArtifact, TableChange};
use engine::context::StageContext;
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::forecast::{Ahead, Forecast};
use engine::metadata::FetchedFile;
use engine::parameter::KeyWriter;
use engine::pin::Pinned;
use engine::protocol::Network;
use engine::stage::{InputFacts, Outside, PinRequest, Secret, Smoke, Stage, StageKind};
use engine::suggest;

use crate::data::artifact::{OutputKind, Rows, RowsFacts, Shape, is_part_list};
use crate::hub::forget_working_files;
use crate::smoke::{self, Lowered};
use arrange::Arranger;
pub use expression::{Condition, NewColumn};
pub use flaw::{Flaw, Reason};
pub use form::{Compression, Form, Format, SourceFile};
pub(crate) use hub_files::{fetch as fetch_from_hub, pin as pin_on_hub};
pub(crate) use of_files::rows_of_files;
pub use parameters::{
    Dataset, Mix, OnBadRow, OnEmpty, SampleBy, StoppingStrategy, TrainTestSplit, TurnOrder, WeightedRows,
};
#[cfg(test)]
pub(crate) use preference::judged;
pub use preference::preferences;
use read::Reading;
use recipe::Recipe;
pub use source::{LocalSource, Source};
pub use split::{Split, SplitError};
use take::Taker;
pub use template_choice::TemplateChoice;

/// The split that local files are.
const LOCAL_SPLIT: &str = "train";

impl StageKind for Dataset {
    const NAME: &'static str = "dataset";
    const VERSION: u32 = 9; // 9: of a folder of `save_to_disk` the Arrow files that it lists are rows, and its JSON files are not.
    const ABOUT: &'static str = "Reads rows of text from files, from a dataset on the Hub, or from other datasets.";
    const ALSO_CALLED: &'static [&'static str] = &["data", "load_dataset"];
    const KEYS_ELSEWHERE: &'static [(&'static str, &'static str)] = {
        const SOURCE: &str = "files, or a dataset of a hub, are `source` of a `dataset` stage";
        &[
            ("path", SOURCE),
            ("paths", SOURCE),
            ("file", SOURCE),
            ("files", SOURCE),
            ("data_files", SOURCE),
            ("repo", SOURCE),
            ("split: <a mapping>", "write `train_test_split: { test_size: 0.01 }`: two outputs, `train` and `test`"),
        ]
    };

    fn pin(request: &PinRequest) -> Result<Pinned, StageError> {
        hub_files::pin(request)
    }

    fn smoke(parameters: &serde_json::Value) -> Smoke {
        Lowered::from(parameters)
            .at_most("limit", smoke::ROWS)
            .replace("shuffle", false)
            .replace("train_test_split.test_size", 0.25)
            .done()
    }
}

impl Stage for Dataset {
    fn outputs(&self) -> Vec<Output> {
        match self.train_test_split {
            None => vec![Rows::output(arrange::ROWS)],
            Some(_) => vec![Rows::output(arrange::TRAIN), Rows::output(arrange::TEST)],
        }
    }

    fn check(&self, inputs: &InputFacts, span: Span) -> Vec<Problem> {
        let datasets = self.datasets.as_deref().unwrap_or_default();
        let mut problems = self.problems(span);
        if self.source.is_some() && datasets.is_empty() {
            problems.extend(mapping::check_names(self, span));
        }
        problems.extend(mix::problems(datasets, inputs));
        problems
    }

    fn forecast(&self, ahead: &Ahead<'_>) -> Forecast {
        forecast::forecast(self, ahead)
    }

    fn fetch_metadata(
        &self,
        pinned: &Pinned,
        folder: &Path,
        network: Network,
    ) -> Result<Option<Vec<FetchedFile>>, StageError> {
        hub_metadata::fetch(self, pinned, folder, network)
    }

    fn outside(&self) -> Vec<Outside> {
        let files = self.source.as_ref().map_or_else(Vec::new, Source::outside);
        files.into_iter().chain(self.pin_request().map(Outside::Pin)).collect()
    }

    fn secrets(&self) -> Vec<Secret> {
        let Some(Source::Hub { repository, .. }) = &self.source else { return Vec::new() };
        vec![Secret::token(self.token_env.as_deref(), repository.service().token_variable())]
    }

    fn write_derived_key(&self, key: &mut KeyWriter<'_>) {
        // Columns that say so make rows of preferences, which were conversations or prompts before. Where the
        // parameters say what a row is nothing has changed, and `VERSION` would make every result anew.
        if mapping::columns_decide(self) {
            key.field("preferences", cache::Class::Semantic, |key| key.value("of_columns".to_owned()));
        }
        // They were passed over in rows of preferences before.
        if mapping::may_give_tools_to_preferences(self) {
            key.field("tools", cache::Class::Semantic, |key| key.value("of_preferences".to_owned()));
        }
    }

    fn derived_from(&self, entry: &str) -> &'static [&'static str] {
        if ["preferences", "tools"].contains(&entry) { &["template", "column_map", "map"] } else { &[] }
    }

    fn compare(&self, kind: &str, old: &StoredArtifact, new: &StoredArtifact) -> Option<TableChange> {
        crate::data::artifact::compare(kind, old, new)
    }

    fn run(&self, context: &mut StageContext) -> Result<(), StageError> {
        match write_rows(self, context) {
            Ok(()) => Ok(()),
            // Half of another file reads like a malformed one: that it changed is what the user has to know.
            Err(error) => Err(verify_files(self, context).err().unwrap_or(error)),
        }
    }
}

/// Reads the sources and makes the outputs.
fn write_rows(params: &Dataset, context: &mut StageContext) -> Result<(), StageError> {
    let (taker, what) = match (&params.source, &params.datasets) {
        (Some(source), _) => (take_source(params, source, context)?, source.describe()),
        (None, Some(datasets)) => (mix::take(params, datasets, context)?, "the mix".to_owned()),
        (None, None) => return Err(StageError::bad_data("neither `source` nor `datasets` is set")),
    };
    let (arranger, counts, examples) = taker.finish(context);
    if arranger.count() == 0 {
        return Err(no_rows(params, &what, counts.filtered, &examples));
    }
    // A file that changed while it was read would be stored under the key of what it was.
    verify_files(params, context)?;
    let facts = arranger.facts().clone();
    let made = arranger.finish(&counts, context)?;
    context.report_detail(summary(&facts, &made, counts.dropped, counts.filtered));
    forget_working_files(context.working())
}

fn no_rows(params: &Dataset, what: &str, filtered: u64, examples: &[String]) -> StageError {
    let error = StageError::bad_data(format!("`{}` selects no rows of `{what}`", params.split.text));
    match (filtered, examples.first()) {
        (0, Some(example)) => error.with_help(format!("all of them are unusable, such as {example}")),
        (1.., Some(example)) => error.with_help(format!(
            "`filter` leaves out {filtered} of them, and the others are unusable, such as {example}"
        )),
        (1.., None) => error.with_help(format!("`filter` leaves out all {filtered} of them")),
        (0, None) => error.with_help("there are none: check `split`, and that the file is the right one"),
    }
}

/// Takes the rows of files.
fn take_source<'a>(params: &'a Dataset, source: &Source, context: &mut StageContext) -> Result<Taker<'a>, StageError> {
    let mut reading = params.reading();
    let splits = match source {
        Source::Local(_) => BTreeMap::from([(LOCAL_SPLIT.to_owned(), local_files(params, context)?)]),
        Source::Hub { .. } => {
            let request = params.pin_request().expect("a Hub dataset has a pin");
            let fetched = hub_files::fetch(&request, params.config.as_deref(), &params.split.names(), context)?;
            reading.field = reading.field.or(fetched.field);
            fetched.splits
        }
    };
    let ranges = ranges(params, &splits, &reading)?;
    let files = || ranges.iter().flat_map(|range| splits.get(&range.name).into_iter().flatten());
    let (first, columns) = first_with_columns(files, &reading)?;
    let environment = expression::environment();
    let recipe = Recipe::plan(params, &environment, &columns, first, &reading)?;
    recipe.oddities(&first.name).into_iter().for_each(|oddity| context.warn(oddity));

    let mut taker = Taker::new(params, Arranger::new(params, recipe.facts().clone(), context)?, context)?;
    for range in &ranges {
        let files = splits.get(&range.name).map_or(&[][..], Vec::as_slice);
        let rows = taker.take_files(files, range.rows.clone(), &recipe, &reading, context)?;
        let fewer = range.asked.filter(|asked| *asked > rows && !range.rows.is_empty() && !taker.is_full());
        if let Some(asked) = fewer {
            context.warn(format!("`{}` ends at row {asked}, and there are {rows} rows", params.split.text));
        }
    }
    Ok(taker)
}

/// The first file that has columns, and those. Files without any row say nothing about the others.
fn first_with_columns<'a, I: Iterator<Item = &'a SourceFile>>(
    files: impl Fn() -> I,
    reading: &Reading,
) -> Result<(&'a SourceFile, Vec<String>), StageError> {
    for file in files() {
        let columns = file.columns(reading)?;
        if !columns.is_empty() {
            return Ok((file, columns));
        }
    }
    let Some(first) = files().next() else { return Err(StageError::bad_data("there are no files to read")) };
    for file in files() {
        if let Some(bad) = file.first_bad_row(reading)? {
            let message = format!("{}: {}", file.place(bad.number), bad.flaw.problem);
            return Err(StageError::bad_data(message).with_help("no row of the data is valid: correct the file"));
        }
    }
    let message = format!("`{}` is empty: it has neither columns nor rows", first.name);
    Err(StageError::bad_data(message).with_help("is it the right file? `source` is the path of the rows"))
}

fn summary(facts: &RowsFacts, made: &[(&str, u64)], dropped: u64, filtered: u64) -> String {
    let shape = match facts.shape {
        Shape::Prompt => {
            let template = facts.template.as_ref().map_or("none", |template| template.name.as_str());
            format!("template {template}, columns {}", facts.columns.join(", "))
        }
        Shape::Messages => "conversations".to_owned(),
        Shape::Text | Shape::Pairs | Shape::Judged => facts.shape.describe().to_owned(),
    };
    let rows: Vec<String> = match made {
        [(_, rows)] => vec![format!("{rows} rows")],
        several => several.iter().map(|(name, rows)| format!("{rows} rows {name}")).collect(),
    };
    let filtered = if filtered > 0 { format!(", {filtered} filtered out") } else { String::new() };
    format!("{} ({shape}), {dropped} left out{filtered}", rows.join(", "))
}

/// The roles of the local files, in the order of the sources.
fn roles(params: &Dataset) -> Vec<&str> {
    match &params.source {
        Some(Source::Local(sources)) => sources.iter().map(|source| source.role.as_str()).collect(),
        Some(Source::Hub { .. }) | None => Vec::new(),
    }
}

/// Checks the files that were granted and can be read against the digests that they were planned with.
fn verify_files(params: &Dataset, context: &StageContext) -> Result<(), StageError> {
    let mut granted = roles(params).into_iter().flat_map(|role| context.files(role));
    granted.try_for_each(|grant| if Form::of(&grant.path).is_some() { context.verify(grant) } else { Ok(()) })
}

/// The granted files, each checked against the digest that it was planned with.
fn local_files(params: &Dataset, context: &mut StageContext) -> Result<Vec<SourceFile>, StageError> {
    let mut files = Vec::new();
    for role in roles(params) {
        let granted = context.files(role);
        let mut found = Vec::new();
        for grant in granted {
            // Without the `.` that joining `./rows.jsonl` leaves in it.
            let path: PathBuf = grant.path.components().collect();
            let name = path.display().to_string();
            match SourceFile::new(path, name.clone()) {
                // What this program keeps beside the rows of a stage is none of them.
                Some(file) if granted.len() > 1 && is_part_list(&file.path) => {}
                Some(file) => found.push(file),
                // A folder or glob may hold other things; a file that was named may not be one.
                None if granted.len() > 1 => {}
                None => {
                    return Err(StageError::bad_data(format!("`{name}` does not have a supported format"))
                        .with_help(format!("it should end in {}", Form::known())));
                }
            }
        }
        files.extend(local::files_of_rows(found)?);
    }
    verify_files(params, context)?;
    let splits = splits_by_name(&files);
    if splits.len() > 1 {
        context.warn(format!(
            "files of several splits ({}) are read as one: name those that are meant, as in `source: ./folder/train*`",
            splits.into_iter().collect::<Vec<_>>().join(", ")
        ));
    }
    Ok(files)
}

/// The splits that files are called by, as on the Hub: `test-00000-of-00001.parquet`, `test.jsonl`, `test/0.jsonl`.
fn splits_by_name(files: &[SourceFile]) -> BTreeSet<&'static str> {
    const NAMES: [(&str, &str); 7] = [
        ("train", "train"),
        ("test", "test"),
        ("validation", "validation"),
        ("valid", "validation"),
        ("val", "validation"),
        ("dev", "validation"),
        ("eval", "test"),
    ];
    let of_file = |file: &SourceFile| {
        let parts = file.path.iter().rev().take(2).filter_map(|part| part.to_str());
        let words = parts.map(|part| part.split(['-', '_', '.']).next().unwrap_or(part).to_ascii_lowercase());
        words.filter_map(|word| NAMES.iter().find(|(name, _)| *name == word)).map(|(_, split)| *split).next()
    };
    files.iter().filter_map(of_file).collect()
}

/// The rows to take; rows are counted only where a bound depends on their number.
fn ranges(
    params: &Dataset,
    splits: &BTreeMap<String, Vec<SourceFile>>,
    reading: &Reading,
) -> Result<Vec<split::RowRange>, StageError> {
    let mut counts = BTreeMap::new();
    for (name, files) in splits {
        let mut rows = u64::MAX;
        if params.split.needs_count() && params.split.names().contains(&name.as_str()) {
            rows = files.iter().try_fold(0, |rows, file| Ok::<_, StageError>(rows + file.count(reading)?))?;
        }
        counts.insert(name.clone(), rows);
    }
    params.split.ranges(|name| counts.get(name).copied()).map_err(|error| {
        let help = match &error {
            SplitError::NoSuchSplit { name } => suggest::help(name, "split", counts.keys()),
            SplitError::TooFewRows { .. } => Some("without it, percentages are rounded to the nearest row".to_owned()),
            _ => None,
        };
        StageError { help, ..StageError::bad_data(error.to_string()) }
    })
}

#[cfg(test)]
mod tests;
