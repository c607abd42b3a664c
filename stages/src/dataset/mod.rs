//! `uses: dataset`: rows of text out of files or out of a dataset on the Hub.
//!
//! Rows become what later stages need and no more: the columns of a template, a conversation, or plain text. A row that
//! cannot be used is an error that names its file and line, or is left out and counted.

mod hub_files;
mod mapping;
pub mod read;
mod source;
pub mod split;
mod template_choice;

use std::collections::BTreeMap;
use std::path::PathBuf;

use engine::artifact::Output;
use engine::context::StageContext;
use engine::error::StageError;
use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::parameter::{Mapping, Parameters};
use engine::protocol::WorkerEvent;
use engine::stage::{InputFacts, Outside, PinRequest, Stage};
use engine::suggest;

use crate::artifact::{OutputKind, Rows, RowsFacts, RowsWriter, Shape};
use crate::download::forget_working_files;
use crate::tokenize::stop_if_cancelled;
use mapping::RowMapping;
use read::{BadRecord, Record};
use source::{EXTENSIONS, Format};
pub use source::{Source, SourceFile};
pub use split::{Split, SplitError};
pub use template_choice::TemplateChoice;

/// The role of local files.
const ROLE: &str = "source";

/// The split that local files are.
const LOCAL_SPLIT: &str = "train";

/// What happens to a row that cannot be used: not an object, a column missing or without text, bytes that are not UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum OnBadRow {
    /// The stage fails and names it.
    Error,
    /// It is left out, and counted.
    Drop,
}

/// What is one text of a plain text file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum SampleBy {
    /// Each line that is not blank.
    Line,
    /// Lines up to a blank one.
    Paragraph,
    /// The whole file.
    Document,
}

/// What a pipeline file may say under `with:` for `uses: dataset`.
#[derive(Debug, Parameters)]
pub struct DatasetParams {
    /// Files (a path, a folder or a glob), or a dataset on the Hub, `owner/name`.
    pub source: Source,
    /// Which rows, in the grammar of Hugging Face datasets. Local files are one split, `train`.
    #[semantic(default = Split::parse("train").expect("`train` is a split"))]
    pub split: Split,
    /// The branch, tag or commit of a dataset on the Hub; by default `main`, or the Hub's own conversion to Parquet where
    /// `main` has no data files.
    pub revision: Option<String>,
    /// The configuration of a dataset on the Hub that has several.
    pub config: Option<String>,
    /// Which column of the data fills which placeholder of the template; `output` is the response. For rows without a
    /// template: `messages` or `text`.
    #[semantic(default)]
    pub column_map: Mapping<String>,
    /// How columns become a prompt: `summarize`, `alpaca`, `grammar`, `question_answer`, or a text with `{placeholders}`.
    /// Without it rows hold `messages`, or `input` and `output`, or `text`.
    pub template: Option<TemplateChoice>,
    /// What is one text of a plain text file.
    #[semantic(default = SampleBy::Line)]
    pub sample_by: SampleBy,
    /// What happens to a row that cannot be used.
    #[semantic(default = OnBadRow::Error)]
    pub on_bad_row: OnBadRow,
}

impl DatasetParams {
    fn pin_request(&self) -> Option<PinRequest> {
        let Source::Hub { repository, span } = &self.source else { return None };
        Some(PinRequest {
            kind: repository.kind().pin_kind().to_owned(),
            name: repository.name().to_owned(),
            revision: self.revision.clone().unwrap_or_else(|| "main".to_owned()),
            span: *span,
        })
    }
}

/// The stage kind.
pub struct Dataset;

impl Stage for Dataset {
    const NAME: &'static str = "dataset";
    const VERSION: u32 = 1;
    const ABOUT: &'static str = "Takes rows of text out of files or out of a dataset on the Hub.";
    type Params = DatasetParams;

    fn outputs(_: &DatasetParams) -> Vec<Output> {
        vec![Rows::output("rows")]
    }

    fn check(params: &DatasetParams, _: &InputFacts, span: Span) -> Vec<Problem> {
        let mut problems = mapping::check_names(params, span);
        if let Source::Local { span, pattern } = &params.source {
            let local_only = |name: &&str| *name != LOCAL_SPLIT;
            problems.extend(params.split.names().into_iter().filter(local_only).map(|name| {
                let message = format!("there is no split `{name}`: local files are one split, `{LOCAL_SPLIT}`");
                Problem::error(
                    "bad-value",
                    params.split.span.unwrap_or(*span),
                    message,
                    format!("`{pattern}` is local"),
                )
                .with_help(format!("say `split: {}`", params.split.text.replace(name, LOCAL_SPLIT)))
            }));
            let hub_only = [("revision", &params.revision), ("config", &params.config)];
            problems.extend(hub_only.into_iter().filter(|(_, value)| value.is_some()).map(|(name, _)| {
                let message = format!("`{name}` is for datasets on the Hub, and `{pattern}` is local");
                Problem::error("bad-value", *span, message, "local files")
            }));
        }
        problems
    }

    fn outside(params: &DatasetParams) -> Vec<Outside> {
        match &params.source {
            Source::Local { pattern, span } => {
                vec![Outside::Files { role: ROLE.to_owned(), pattern: pattern.clone(), span: *span }]
            }
            Source::Hub { .. } => params.pin_request().map(Outside::Pin).into_iter().collect(),
        }
    }

    fn pin(request: &PinRequest) -> Result<String, StageError> {
        hub_files::pin(request)
    }

    fn run(params: &DatasetParams, context: &mut StageContext) -> Result<(), StageError> {
        match write_rows(params, context) {
            Ok(()) => Ok(()),
            // Half of another file reads like a malformed one: that it changed is what the user has to know.
            Err(error) => Err(verify_files(context).err().unwrap_or(error)),
        }
    }
}

/// Reads the files and makes the output.
fn write_rows(params: &DatasetParams, context: &mut StageContext) -> Result<(), StageError> {
    let splits = match &params.source {
        Source::Local { .. } => BTreeMap::from([(LOCAL_SPLIT.to_owned(), local_files(context)?)]),
        Source::Hub { repository, .. } => hub_files::fetch(repository, params, context)?,
    };
    let ranges = ranges(params, &splits)?;
    let first = ranges.iter().find_map(|range| splits.get(&range.name)?.first());
    let first = first.ok_or_else(|| StageError::bad_data("there are no files to read"))?;
    let mapping = RowMapping::plan(params, &first.columns()?, &first.name)?;

    let draft = context.create("rows")?;
    let mut taker = Taker {
        writer: RowsWriter::create(&draft.folder, mapping.facts.clone()),
        mapping: &mapping,
        on_bad_row: params.on_bad_row,
        dropped: Vec::new(),
        dropped_count: 0,
        taken: 0,
    };
    for range in &ranges {
        let files = splits.get(&range.name).map_or(&[][..], Vec::as_slice);
        let rows = taker.take(files, range.rows.clone(), params.sample_by, context)?;
        if let Some(asked) = range.asked.filter(|asked| *asked > rows && !range.rows.is_empty()) {
            context.warn(format!("`{}` ends at row {asked}, and there are {rows} rows", params.split.text));
        }
    }
    let Taker { writer, dropped, dropped_count, taken, .. } = taker;
    if dropped_count > 0 {
        context.warn(format!("{dropped_count} unusable rows are left out, such as {}", dropped.join("; ")));
    }
    let (facts, identity) = writer.finish(dropped_count)?;
    if taken == 0 {
        return Err(StageError::bad_data(format!("`{}` takes no rows of `{}`", params.split.text, first.name)));
    }
    // A file that changed while it was read would be stored under the key of what it was.
    verify_files(context)?;
    context.emit(WorkerEvent::Report { text: summary(&mapping.facts, taken, dropped_count) });
    context.seal(draft, facts, Some(identity))?;
    forget_working_files(context.working())
}

fn summary(facts: &RowsFacts, taken: u64, dropped: u64) -> String {
    let shape = match facts.shape {
        Shape::Prompt => {
            let template = facts.template.as_ref().map_or("none", |template| template.name.as_str());
            format!("template {template}, columns {}", facts.columns.join(", "))
        }
        Shape::Messages => "conversations".to_owned(),
        Shape::Text => "plain text".to_owned(),
    };
    format!("{taken} rows ({shape}), {dropped} left out")
}

/// Checks the files that were granted and can be read against the digests that they were planned with.
fn verify_files(context: &StageContext) -> Result<(), StageError> {
    let mut read = context.files(ROLE).iter().filter(|grant| Format::of(&grant.path).is_some());
    read.try_for_each(|grant| context.verify(grant))
}

/// The granted files, each checked against the digest that it was planned with.
fn local_files(context: &mut StageContext) -> Result<Vec<SourceFile>, StageError> {
    let granted = context.files(ROLE).to_vec();
    let mut files = Vec::new();
    for grant in &granted {
        let Some(format) = Format::of(&grant.path) else {
            // A folder or glob may hold other things; a file that was named may not be one.
            if granted.len() > 1 {
                continue;
            }
            let known: Vec<_> = EXTENSIONS.iter().map(|(extension, _)| *extension).collect();
            return Err(StageError::bad_data(format!("`{}` is of no form that can be read", grant.path.display()))
                .with_help(format!("it should end in {}", known.join(", "))));
        };
        // Without the `.` that joining `./rows.jsonl` leaves in it.
        let path: PathBuf = grant.path.components().collect();
        files.push(SourceFile { name: path.display().to_string(), path, format });
    }
    verify_files(context)?;
    Ok(files)
}

/// The rows to take; rows are counted only where a bound depends on their number.
fn ranges(
    params: &DatasetParams,
    splits: &BTreeMap<String, Vec<SourceFile>>,
) -> Result<Vec<split::RowRange>, StageError> {
    let mut counts = BTreeMap::new();
    for (name, files) in splits {
        let mut rows = u64::MAX;
        if params.split.needs_count() && params.split.names().contains(&name.as_str()) {
            rows = files.iter().try_fold(0, |rows, file| Ok::<_, StageError>(rows + file.count(params.sample_by)?))?;
        }
        counts.insert(name.clone(), rows);
    }
    params.split.ranges(|name| counts.get(name).copied()).map_err(|error| {
        let help = suggest::help(&params.split.text, "split", counts.keys());
        StageError { help, ..StageError::bad_data(error.to_string()) }
    })
}

/// Takes rows from files and writes them.
struct Taker<'a> {
    writer: RowsWriter,
    mapping: &'a RowMapping,
    on_bad_row: OnBadRow,
    /// The first few that were left out.
    dropped: Vec<String>,
    dropped_count: u64,
    taken: u64,
}

impl Taker<'_> {
    /// Takes the rows of a range out of files that follow each other, and returns how many rows there are up to its end.
    fn take(
        &mut self,
        files: &[SourceFile],
        range: std::ops::Range<u64>,
        sample_by: SampleBy,
        context: &mut StageContext,
    ) -> Result<u64, StageError> {
        let mut before = 0;
        for file in files {
            if before >= range.end || range.is_empty() {
                break;
            }
            let here = range.start.saturating_sub(before)..range.end - before;
            before +=
                file.read(here, &self.mapping.wanted, sample_by, &mut |record| self.row(file, record, context))?;
        }
        Ok(before)
    }

    fn row(
        &mut self,
        file: &SourceFile,
        record: Result<Record, BadRecord>,
        context: &mut StageContext,
    ) -> Result<(), StageError> {
        let row = record.and_then(|Record { fields, number }| {
            self.mapping.row(fields).map_err(|problem| BadRecord { number, problem })
        });
        match (row, self.on_bad_row) {
            (Ok(row), _) => {
                self.writer.write(row)?;
                self.taken += 1;
            }
            (Err(bad), OnBadRow::Error) => return Err(file.bad_row(&bad)),
            (Err(bad), OnBadRow::Drop) => {
                self.dropped_count += 1;
                if self.dropped.len() < 3 {
                    self.dropped.push(file.bad_row(&bad).message);
                }
            }
        }
        if (self.taken + self.dropped_count).is_multiple_of(1024) {
            stop_if_cancelled(context)?;
            context.progress("rows", self.taken, None, None);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
