//! What a pipeline file may say under `with:` for `uses: dataset`.

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::file::tree::Node;
use engine::parameter::{ByteSize, Input, Later, Mapping, Parameter as _, Parameters, Reader};
use engine::stage::PinRequest;

use super::LOCAL_SPLIT;
use super::decontaminate::HeldOut;
use super::expression::{Condition, NewColumn};
use super::read::Reading;
use super::source::Source;
use super::split::Split;
use super::template_choice::TemplateChoice;
use crate::data::artifact::Rows;

/// What happens to a row that cannot be used: not an object, a column missing or without text, bytes that are not
/// UTF-8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum OnBadRow {
    /// The stage fails and names it.
    Error,
    /// It is left out, and counted.
    Drop,
}

/// What happens to a row with an empty string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum OnEmpty {
    /// It is kept, and counted.
    Keep,
    /// It is left out, and counted.
    Drop,
    /// The stage fails and names it.
    Error,
}

/// What is one row of a plain text file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum SampleBy {
    /// Each line that is not blank.
    Line,
    /// Lines up to a blank one.
    Paragraph,
    /// The whole file.
    Document,
}

/// Which conversations are rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum TurnOrder {
    /// Those in which the user is first, after the instructions, and user and assistant alternate.
    Alternate,
    /// All of them.
    Any,
}

/// How several datasets become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum Mix {
    /// One after the other.
    Concat,
    /// Rows alternate between the datasets, or are drawn with their weights.
    Interleave,
}

/// When interleaving ends, as in Hugging Face datasets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Parameters)]
pub enum StoppingStrategy {
    /// As soon as one of them has no more rows.
    FirstExhausted,
    /// When all rows of all of them were used at least once; a shorter one starts again.
    AllExhausted,
    /// When all rows of all of them were used once; a shorter one does not start again.
    AllExhaustedWithoutReplacement,
}

/// One of several datasets.
#[derive(Debug, Clone, Parameters)]
pub struct WeightedRows {
    /// Its rows.
    #[semantic]
    pub rows: Input<Rows>,
    /// The weight of its rows in the random choice when datasets are interleaved, relative to the others.
    #[semantic(above = 0.0)]
    pub weight: Option<f64>,
}

/// Two outputs in the place of one.
#[derive(Debug, Clone, Parameters)]
pub struct TrainTestSplit {
    /// The size of `test`: a share of the rows below 1, or a number of rows.
    #[semantic(above = 0.0)]
    pub test_size: f64,
    /// Random seed of the split.
    #[semantic(default = 0)]
    pub seed: u64,
}

impl TrainTestSplit {
    /// How many of `rows` are `test`: a share is rounded up, as in Hugging Face datasets.
    pub fn test_rows(&self, rows: u64) -> u64 {
        if self.test_size < 1.0 { (self.test_size * rows as f64).ceil() as u64 } else { self.test_size as u64 }
    }
}

/// What a pipeline file may say under `with:` for `uses: dataset`.
///
/// Rows are taken in this order: source, split, filter, map, columns and template, shuffle, limit, train and test.
#[derive(Debug, Parameters)]
pub struct Dataset {
    /// Local files (a path, a folder, a glob, or a list of those), or a dataset on the Hub, `owner/name`, or on
    /// ModelScope, `modelscope:owner/name`. A string that begins with `.`, `/` or `~`, contains a glob, or ends in a
    /// known extension is a path. The content of files is in the key. Give either this or `datasets`.
    #[semantic]
    pub source: Option<Source>,
    /// Rows of other stages to combine, instead of `source`. `{ collect: stage }` means all children of a sweep.
    #[semantic]
    pub datasets: Option<Vec<WeightedRows>>,
    /// How `datasets` are combined.
    #[semantic(default = Mix::Concat)]
    pub mix: Mix,
    /// When interleaving `datasets` ends.
    #[semantic(default = StoppingStrategy::FirstExhausted)]
    pub stopping_strategy: StoppingStrategy,
    /// Which rows, in the grammar of Hugging Face datasets. Local files are one split, `train`.
    #[semantic(default = Split::parse("train").expect("`train` is a split"))]
    pub split: Split,
    /// The branch, tag or commit of a dataset on the Hub; by default `main`, or the Hub's own conversion to Parquet if
    /// `main` has no data files; on ModelScope `master`.
    #[semantic]
    pub revision: Option<String>,
    /// The configuration of a dataset on the Hub that has several.
    #[semantic]
    pub config: Option<String>,
    /// The environment variable with the access token; default: `HF_TOKEN`, for ModelScope `MODELSCOPE_API_TOKEN`.
    #[cosmetic]
    pub token_env: Option<String>,
    /// The key of the array of rows, if a `.json` file contains an object.
    #[semantic]
    pub field: Option<String>,
    /// What is one row of a plain text file.
    #[semantic(default = SampleBy::Line)]
    pub sample_by: SampleBy,
    /// Keeps the rows for which this expression over the columns is true, such as `lang == 'en' and text|length > 10`.
    #[semantic]
    pub filter: Option<Condition>,
    /// New or replaced columns: strings with `{{ expressions }}` over the columns.
    #[semantic(default)]
    pub map: Mapping<NewColumn>,
    /// The column of the data for each placeholder of the template; `output` is the response and `weight` the row's
    /// weight in the loss. For rows without a template: `messages` or `conversations`, with `tools` for the functions
    /// that may be called, `text`, or `input` and `output`; for preferences `prompt`, `chosen` and `rejected`, or
    /// `prompt`, `completion` and `label`.
    #[semantic(default)]
    pub column_map: Mapping<String>,
    /// How columns become a prompt: `summarize`, `alpaca`, `grammar`, `question_answer`, or a string with
    /// `{placeholders}`. Without it rows have `messages`, or `input` and `output`, or `text`.
    #[semantic]
    pub template: Option<TemplateChoice>,
    /// Which conversations are valid rows.
    #[semantic(default = TurnOrder::Alternate)]
    pub turn_order: TurnOrder,
    /// What happens to an invalid row.
    #[semantic(default = OnBadRow::Error)]
    pub on_bad_row: OnBadRow,
    /// What happens to a row with an empty string.
    #[semantic(default = OnEmpty::Keep)]
    pub on_empty: OnEmpty,
    /// The maximum size of a row's text. Default: 8MiB, or 256MiB if a whole file is one row.
    #[semantic]
    pub max_row_size: Option<ByteSize>,
    /// Rows that are held out.
    #[semantic(flatten)]
    pub held_out: Later<HeldOut>,
    /// Whether the rows are shuffled.
    #[semantic(default = false)]
    pub shuffle: bool,
    /// Random seed of `shuffle` and of interleaving.
    #[semantic(default = 0)]
    pub seed: u64,
    /// Maximum number of rows.
    #[semantic(range = 1..)]
    pub limit: Option<u64>,
    /// Two outputs, `train` and `test`, instead of `rows`.
    #[semantic]
    pub train_test_split: Option<TrainTestSplit>,
}

/// The longest row by default, in bytes.
const MAX_ROW_SIZE: u64 = 8 << 20;

/// The same for whole files.
const MAX_DOCUMENT_SIZE: u64 = 256 << 20;

/// The least share of the draws that a dataset may have.
const RAREST: f64 = 1e-6;

impl Dataset {
    /// The parameters for files that a stage made itself: everything but columns and template is as by default.
    pub(super) fn of_files(template: Option<TemplateChoice>, column_map: Mapping<String>) -> Self {
        let node = Node::from_json(&serde_json::json!({ "source": "./rows.jsonl" }));
        let defaults = Self::read(&node, &mut Reader::default()).expect("a source is all that has to be given");
        Self { template, column_map, ..defaults }
    }

    /// The dataset on the Hub that has to be pinned.
    pub(super) fn pin_request(&self) -> Option<PinRequest> {
        let Some(Source::Hub { repository, span }) = &self.source else { return None };
        let by_default = || repository.service().default_revision().to_owned();
        Some(PinRequest {
            kind: repository.pin_kind().to_owned(),
            name: repository.name().to_owned(),
            revision: self.revision.clone().unwrap_or_else(by_default),
            token_env: self.token_env.clone(),
            span: *span,
        })
    }

    /// How files are read.
    pub(super) fn reading(&self) -> Reading {
        Reading { sample_by: self.sample_by, field: self.field.clone() }
    }

    /// The longest row, in bytes of text.
    pub(super) fn max_row_bytes(&self) -> u64 {
        let by_default = match self.sample_by {
            SampleBy::Document => MAX_DOCUMENT_SIZE,
            SampleBy::Line | SampleBy::Paragraph => MAX_ROW_SIZE,
        };
        self.max_row_size.map_or(by_default, |size| size.0)
    }

    /// Everything that can be known to be wrong without data.
    pub(super) fn problems(&self, span: Span) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self.problem_of_the_split(span).into_iter().collect();
        if self.split.is_empty() {
            let message = format!("`{}` selects no rows, whatever the data", self.split.text);
            let span = self.split.span.unwrap_or(span);
            let problem = Problem::error("bad-value", span, message, "from a row to the same, or to one before it");
            problems.push(problem.with_help("`train[:100]` selects the first 100, `train[-100:]` the last"));
        }
        match (&self.source, &self.datasets) {
            (Some(source), None) => {
                problems.extend(self.problems_of_a_source(source));
            }
            (None, Some(datasets)) => problems.extend(self.problems_of_a_mix(datasets, span)),
            (Some(_), Some(_)) => {
                let message = "`source` and `datasets` exclude each other";
                let help = "`datasets` mixes the rows of other stages; put the source into a separate stage";
                let problem = Problem::error("bad-value", span, message, "both are set").with_help(help);
                problems.push(problem.at("datasets"));
            }
            (None, None) => {
                let message = "`source` is missing";
                problems.push(Problem::error("missing-key", span, message, "`source` or `datasets` is required"));
            }
        }
        problems
    }

    fn problem_of_the_split(&self, span: Span) -> Option<Problem> {
        let size = self.train_test_split.as_ref()?.test_size;
        let message = "`train_test_split.test_size` is neither a share below 1 nor an integer number of rows";
        (size >= 1.0 && size.fract() != 0.0).then(|| {
            Problem::error("bad-value", span, message, format!("{size} is given"))
                .with_help("say 0.1 or 500, for example")
                .at("train_test_split.test_size")
        })
    }

    fn problems_of_a_source(&self, source: &Source) -> Vec<Problem> {
        let mut problems = Vec::new();
        let error = |span, message: String, label: String| Problem::error("bad-value", span, message, label);
        let mixes = [
            ("mix", self.mix != Mix::Concat),
            ("stopping_strategy", self.stopping_strategy != StoppingStrategy::FirstExhausted),
        ];
        problems.extend(mixes.into_iter().filter(|(_, set)| *set).map(|(name, _)| {
            error(
                source.span(),
                format!("`{name}` is for `datasets`, and this stage reads a source"),
                "not for a source".to_owned(),
            )
            .at(name)
        }));
        if let Source::Local(_) = source {
            let (span, what) = (source.span(), source.describe());
            let local_only = |name: &&str| *name != LOCAL_SPLIT;
            problems.extend(self.split.names().into_iter().filter(local_only).map(|name| {
                let message = format!("there is no split `{name}`: local files are one split, `{LOCAL_SPLIT}`");
                error(self.split.span.unwrap_or(span), message, format!("`{what}` is local"))
                    .with_help(format!("say `split: {}`", self.split.text.replace(name, LOCAL_SPLIT)))
            }));
            let hub_only = [("revision", &self.revision), ("config", &self.config), ("token_env", &self.token_env)];
            problems.extend(hub_only.into_iter().filter(|(_, value)| value.is_some()).map(|(name, _)| {
                error(
                    span,
                    format!("`{name}` is for datasets on the Hub, and `{what}` is local"),
                    "local files".to_owned(),
                )
                .at(name)
            }));
        }
        problems
    }

    fn problems_of_a_mix(&self, datasets: &[WeightedRows], span: Span) -> Vec<Problem> {
        let error = |message: String, label: &str| Problem::error("bad-value", span, message, label);
        let mut problems = Vec::new();
        if datasets.is_empty() {
            problems.push(error("`datasets` is empty".to_owned(), "there would be no rows").at("datasets"));
        }
        let of_sources = [
            ("split", self.split.text != "train"),
            ("revision", self.revision.is_some()),
            ("config", self.config.is_some()),
            ("token_env", self.token_env.is_some()),
            ("field", self.field.is_some()),
            ("map", !self.map.is_empty()),
            ("column_map", !self.column_map.is_empty()),
            ("template", self.template.is_some()),
            ("sample_by", self.sample_by != SampleBy::Line),
            ("turn_order", self.turn_order != TurnOrder::Alternate),
            ("on_empty", self.on_empty != OnEmpty::Keep),
            ("max_row_size", self.max_row_size.is_some()),
        ];
        problems.extend(of_sources.into_iter().filter(|(_, set)| *set).map(|(name, _)| {
            error(
                format!("`{name}` is for a source, and this stage mixes rows that are made already"),
                "`datasets` is set",
            )
            .with_help(format!("set `{name}` in the stages that make the rows"))
            .at(name)
        }));
        if datasets.iter().filter_map(|dataset| dataset.weight).any(f64::is_infinite) {
            problems.push(error("a `weight` is infinite".to_owned(), "the others would never be drawn").at("datasets"));
        }
        let sum: f64 = datasets.iter().filter_map(|dataset| dataset.weight).sum();
        let never = |weight: &f64| weight / sum < RAREST;
        if let Some(weight) = datasets.iter().filter_map(|dataset| dataset.weight).find(never) {
            let message = format!("the `weight` {weight:e} is less than a millionth of their sum");
            problems.push(
                error(message, "its rows would hardly be drawn").with_help("leave that dataset out").at("datasets"),
            );
        }
        let weights = datasets.iter().filter(|dataset| dataset.weight.is_some()).count();
        if weights > 0 && self.mix == Mix::Concat {
            let problem = error("a `weight` is for `mix: interleave`".to_owned(), "the datasets follow each other");
            problems.push(problem.with_help("say `mix: interleave`").at("datasets"));
        } else if weights > 0 && weights < datasets.len() {
            let message = "some of the datasets have a `weight`, and some have none".to_owned();
            problems.push(error(message, "all or none").at("datasets"));
        }
        problems
    }
}
