//! Task files: the harness's own keys, read as it reads them, and what is wrong with them by file, line and key.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::file::parse;
use engine::file::source::{SourceId, Sources};
use engine::file::tree::{Node, Value as Tree};
use engine::suggest;
use model::sampling::{Sampler as TokenSampler, Sampling};
use serde_json::{Map, Value};

use super::TaskError;
use super::documents::Document;
use super::fewshot::SEED;
use super::filter::Pipeline;
use super::functions::{Function, Python};
use super::group::{Group, Overrides};
use super::metric::{Metric, Reading};
use super::processor::RowProcessor;

/// What stands for a value tagged `!function`: a mapping with this key alone.
const FUNCTION: &str = "!function";

/// Keys of a task that are read.
const KEYS: [&str; 26] = [
    "task",
    "dataset_path",
    "dataset_name",
    "dataset_kwargs",
    "training_split",
    "validation_split",
    "test_split",
    "fewshot_split",
    "fewshot_config",
    "doc_to_text",
    "doc_to_target",
    "doc_to_choice",
    "description",
    "target_delimiter",
    "fewshot_delimiter",
    "gen_prefix",
    "num_fewshot",
    "output_type",
    "generation_kwargs",
    "filter_list",
    "metric_list",
    "process_results",
    "repeats",
    "metadata",
    "process_docs",
    "custom_dataset",
];

/// Keys that change no result. `unsafe_code` says what functions do, which run only where they are let.
pub(super) const WITHOUT_EFFECT: [&str; 6] =
    ["task_alias", "tag", "should_decontaminate", "doc_to_decontamination_query", "include", "unsafe_code"];

/// Keys of a group.
pub(super) const GROUP_KEYS: [&str; 7] =
    ["group", "group_alias", "task", "aggregate_metric_list", "metadata", "tag", "include"];

/// What is asked of the model for each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputType {
    /// How likely each of several continuations is.
    MultipleChoice,
    /// How likely the target is.
    Loglikelihood,
    /// How likely a whole text is.
    LoglikelihoodRolling,
    /// A continuation.
    GenerateUntil,
}

/// How few shots are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sampler {
    /// At random, by CPython's generator.
    Random,
    /// The first.
    FirstN,
}

/// What a key says that makes something of each row: a value, by which [`super::template::Field`] goes, or a function.
#[derive(Debug, Clone, PartialEq)]
pub enum FieldValue {
    Value(Value),
    Function(Function),
}

impl From<&str> for FieldValue {
    fn from(text: &str) -> Self {
        Self::Value(text.into())
    }
}

/// Rows that a file has.
#[derive(Debug, Clone, PartialEq)]
pub enum Samples {
    Rows(Vec<Document>),
    /// It returns them.
    Function(Function),
}

/// `fewshot_config`: which rows are shown, and how, where that is not as for the row that is asked about.
#[derive(Debug, Clone, PartialEq)]
pub struct FewshotConfig {
    pub sampler: Sampler,
    /// Rows that the file itself has; a split goes before them.
    pub samples: Option<Samples>,
    pub doc_to_text: Option<FieldValue>,
    pub doc_to_target: Option<FieldValue>,
    pub doc_to_choice: Option<FieldValue>,
}

/// What replaces the usual metrics of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum Processor {
    /// `utils.process_results_mc2` of TruthfulQA.
    TruthfulQaMc2,
    /// `preprocess_wikitext.process_results`: words and bytes are those of the column `page`.
    OfPage,
    /// It returns what each metric is of.
    Function(Function),
}

/// How a generation ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// It is cut at the first occurrence of each of these.
    pub until: Vec<String>,
    /// It has so many tokens at most.
    pub max_new_tokens: usize,
    /// How its tokens are chosen.
    pub sampling: Sampling,
}

/// A task.
#[derive(Debug, Clone)]
pub struct Task {
    /// The file, as messages name it.
    pub file: PathBuf,
    pub name: String,
    pub output_type: OutputType,
    /// `dataset_path`: `json` and `parquet` stand for the local files of [`Task::data_files`].
    pub dataset_path: Option<String>,
    pub dataset_name: Option<String>,
    /// Local files by split, as they are written.
    pub data_files: BTreeMap<String, Vec<PathBuf>>,
    pub training_split: Option<String>,
    pub validation_split: Option<String>,
    pub test_split: Option<String>,
    pub fewshot_split: Option<String>,
    pub fewshot: FewshotConfig,
    pub doc_to_text: FieldValue,
    pub doc_to_target: FieldValue,
    pub doc_to_choice: Option<FieldValue>,
    /// As `doc_to_text`, made of the row that is asked about.
    pub description: FieldValue,
    pub target_delimiter: String,
    pub fewshot_delimiter: String,
    /// As `doc_to_text`, made of each row.
    pub gen_prefix: Option<FieldValue>,
    /// Rows that are shown before each, if the file says.
    pub num_fewshot: Option<usize>,
    pub generation: Generation,
    /// Responses to each row. Where none is drawn they are all the same, and the model is asked once.
    pub repeats: usize,
    pub filters: Vec<Pipeline>,
    pub metrics: Vec<Metric>,
    /// What is made of each row before anything else.
    pub process_docs: Option<RowProcessor>,
    pub process_results: Option<Processor>,
    pub version: Value,
    /// What a group that names the task sets otherwise than its file.
    pub overrides: Overrides,
}

/// What a file holds.
#[derive(Debug, Clone)]
pub enum TaskFile {
    Task(Box<Task>),
    Group(Group),
}

impl Generation {
    /// Whether tokens are drawn, so that another response to the same prompt is another one.
    pub fn draws(&self) -> bool {
        self.sampling.temperature > 0.0
    }
}

impl Task {
    /// Rows that are shown before each, where a stage asks for `asked`: a task that says 0 is meant without.
    pub fn shots(&self, asked: Option<usize>) -> usize {
        match self.num_fewshot {
            Some(0) => 0,
            own => asked.or(own).unwrap_or(0),
        }
    }

    /// Whether a function makes figures of the answers to a row.
    pub fn has_own_results(&self) -> bool {
        matches!(self.process_results, Some(Processor::Function(_)))
    }

    /// The functions that it names.
    pub fn functions(&self) -> Vec<&Function> {
        let FewshotConfig { samples, doc_to_text, doc_to_target, doc_to_choice, sampler: _ } = &self.fewshot;
        let shown = [doc_to_text, doc_to_target, doc_to_choice].into_iter().flatten();
        let fields = [&self.doc_to_text, &self.doc_to_target].into_iter().chain(&self.doc_to_choice).chain(shown);
        let fields = fields.filter_map(|field| if let FieldValue::Function(of) = field { Some(of) } else { None });
        let samples = samples.iter().filter_map(|rows| if let Samples::Function(of) = rows { Some(of) } else { None });
        let of_rows = self.process_docs.iter().filter_map(RowProcessor::function);
        let of_results = self.process_results.iter().filter_map(|processor| match processor {
            Processor::Function(function) => Some(function),
            Processor::TruthfulQaMc2 | Processor::OfPage => None,
        });
        let filters = self.filters.iter().flat_map(Pipeline::functions);
        let metrics = self.metrics.iter().flat_map(Metric::functions);
        fields.chain(samples).chain(of_rows).chain(of_results).chain(filters).chain(metrics).collect()
    }

    /// Responses that the model is asked for to each prompt.
    pub fn responses(&self) -> usize {
        if self.generation.draws() { self.repeats } else { 1 }
    }
}

impl TaskFile {
    /// Reads a file, with those that it includes; `python` runs the functions that it names. Without one they are
    /// errors, but for those that are known here.
    ///
    /// # Errors
    /// Fails with the file and, where there is one, the line and the key.
    pub fn read(path: &Path, python: Option<&Arc<Python>>) -> Result<Self, TaskError> {
        Self::read_with_includes(path, &Overrides::default(), python).map(|(file, _)| file)
    }

    /// As [`TaskFile::read`], with all files that were read or have a function; a task has these keys in place of its
    /// own.
    ///
    /// # Errors
    /// As [`TaskFile::read`].
    pub fn read_with_includes(
        path: &Path,
        overrides: &Overrides,
        python: Option<&Arc<Python>>,
    ) -> Result<(Self, Vec<PathBuf>), TaskError> {
        let mut read = Vec::new();
        let keys = Keys::read(path, &mut BTreeSet::new(), &mut read)?;
        let keys = Keys { python: python.cloned(), ..keys };
        let file = Self::of(keys, overrides)?;
        if let Self::Task(task) = &file {
            read.extend(task.functions().into_iter().map(|function| function.module().to_owned()));
        }
        Ok((file, read))
    }

    /// Reads the definition of a task of the program; it has these keys in place of its own.
    ///
    /// # Errors
    /// As [`TaskFile::read`].
    pub fn shipped(name: &str, definition: &str, overrides: &Overrides) -> Result<Self, TaskError> {
        let no_includes = |path: &Path| Err(TaskError::in_file(path, "a task of the program includes nothing"));
        Self::of(Keys::of_text(Path::new(name), definition, &mut |path| no_includes(&path))?, overrides)
    }

    fn of(mut keys: Keys, overrides: &Overrides) -> Result<Self, TaskError> {
        if keys.has("group") {
            return Group::read(&keys).map(Self::Group);
        }
        for (key, value) in &overrides.values {
            keys.values.insert(key.clone(), (value.clone(), overrides.file.clone(), overrides.line));
        }
        let task = keys.task()?;
        Ok(Self::Task(Box::new(Task { overrides: overrides.clone(), ..task })))
    }

    /// The name that its figures have.
    pub fn name(&self) -> &str {
        match self {
            Self::Task(task) => &task.name,
            Self::Group(group) => &group.name,
        }
    }

    /// What a file says that it is, without anything else of it: its name, of a task or group, and its tags. Nothing of
    /// a file that is neither.
    pub fn name_and_tags(path: &Path) -> Option<(String, Vec<String>)> {
        let text = std::fs::read_to_string(path).ok()?;
        let mut sources = Sources::default();
        let source = sources.add(path.display().to_string(), text.clone());
        let root = tree(source, &text, &sources).ok()?;
        let texts = |key: &str| match root.get(key).map(|node| json(node, &text)) {
            Some(Value::String(text)) => vec![text],
            Some(Value::Array(texts)) => texts.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            _ => Vec::new(),
        };
        let name = ["group", "task"].iter().find(|key| root.get(key).is_some())?;
        Some((texts(name).into_iter().next()?, texts("tag")))
    }
}

/// The keys of a file with the lines where they stand; of what is included, the file too.
#[derive(Default)]
pub(super) struct Keys {
    pub(super) file: PathBuf,
    values: BTreeMap<String, (Value, PathBuf, usize)>,
    /// What runs functions.
    python: Option<Arc<Python>>,
}

impl Keys {
    /// Reads a file; `read` hears of each that is read.
    fn read(path: &Path, including: &mut BTreeSet<PathBuf>, read: &mut Vec<PathBuf>) -> Result<Self, TaskError> {
        let in_file = |message: String| TaskError::in_file(path, message);
        if !including.insert(path.to_owned()) {
            return Err(in_file("the file includes itself".to_owned()));
        }
        let text = std::fs::read_to_string(path).map_err(|error| in_file(format!("cannot be read: {error}")))?;
        read.push(path.to_owned());
        let keys = Self::of_text(path, &text, &mut |included| Self::read(&included, including, read))?;
        including.remove(path);
        Ok(keys)
    }

    fn of_text(
        path: &Path,
        text: &str,
        include: &mut dyn FnMut(PathBuf) -> Result<Self, TaskError>,
    ) -> Result<Self, TaskError> {
        let in_file = |message: String| TaskError::in_file(path, message);
        let mut sources = Sources::default();
        let source = sources.add(path.display().to_string(), text.to_owned());
        let root = tree(source, text, &sources).map_err(|(message, line)| TaskError::at(path, line, None, message))?;
        let Tree::Map(entries) = &root.value else {
            return Err(in_file("a task is a mapping of keys".to_owned()));
        };
        let mut keys = Self { file: path.to_owned(), ..Self::default() };
        if let Some(named) = root.get("include") {
            let folder = path.parent().unwrap_or_else(|| Path::new("."));
            let Tree::String(included) = &named.value else {
                return Err(in_file("`include` names a file".to_owned()));
            };
            keys.values = include(folder.join(included))?.values;
        }
        let is_group = root.get("group").is_some() && root.get("output_type").is_none();
        for entry in entries {
            let line = sources.line_column(entry.key_span).0;
            if let Some(message) = unknown(&entry.key, is_group) {
                return Err(TaskError::at(path, line, Some(&entry.key), message));
            }
            let value = json(&entry.value, text);
            keys.values.insert(entry.key.clone(), (value, path.to_owned(), line));
        }
        Ok(keys)
    }

    fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// The value of a key, where it is something.
    pub(super) fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(key).map(|(value, ..)| value).filter(|value| !value.is_null())
    }

    pub(super) fn wrong(&self, key: &str, message: impl Into<String>) -> TaskError {
        match self.values.get(key) {
            Some((_, file, line)) => TaskError::at(file, *line, Some(key), message),
            None => TaskError::key(&self.file, key, message),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<String>, TaskError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(self.wrong(key, "is to be a string")),
        }
    }

    /// A template, a column's name, a value as it is, or a function.
    fn field(&self, key: &str) -> Result<Option<FieldValue>, TaskError> {
        self.value(key).map(|value| self.field_of(key, value)).transpose()
    }

    /// The same of a value within that of a key.
    fn field_of(&self, key: &str, value: &Value) -> Result<FieldValue, TaskError> {
        match self.function(key, value) {
            Ok(Some(function)) => Ok(FieldValue::Function(function)),
            Ok(None) => Ok(FieldValue::Value(value.clone())),
            Err(message) => Err(self.wrong(key, message)),
        }
    }

    /// The function that a value within that of a key names with `!function`.
    ///
    /// # Errors
    /// Fails where nothing runs it, or its module is not there.
    fn function(&self, key: &str, value: &Value) -> Result<Option<Function>, String> {
        let Some(written) = function(value) else { return Ok(None) };
        let python = self.python.as_ref();
        let python = python
            .ok_or_else(|| format!("the function `{written}` is Python, which `task_functions: true` lets run"))?;
        let file = self.values.get(key).map_or(&self.file, |(_, file, _)| file);
        Function::named(written, file, python).map(Some)
    }

    pub(super) fn list(&self, key: &str) -> Result<Vec<Map<String, Value>>, TaskError> {
        let Some(value) = self.value(key) else { return Ok(Vec::new()) };
        let list = value.as_array().ok_or_else(|| self.wrong(key, "is to be a list"))?;
        let object = |item: &Value| item.as_object().cloned().ok_or_else(|| self.wrong(key, "must contain mappings"));
        list.iter().map(object).collect()
    }

    /// Refuses keys of a mapping that are none of these: what is not known is not passed over.
    pub(super) fn only(&self, key: &str, mapping: &Map<String, Value>, known: &[&str]) -> Result<(), TaskError> {
        match mapping.keys().find(|name| !known.contains(&name.as_str())) {
            Some(other) => Err(self.wrong(key, format!("`{other}` is not supported; {} are", listed(known)))),
            None => Ok(()),
        }
    }

    /// The line of a key in its file.
    pub(super) fn line(&self, key: &str) -> usize {
        self.values.get(key).map_or(0, |(.., line)| *line)
    }

    fn task(&self) -> Result<Task, TaskError> {
        if let Some(value) = self.value("custom_dataset") {
            let function = function(value).unwrap_or("");
            let message = format!(
                "the rows are made by the function `{function}`, and would be in no key: write what it returns for each \
                 split as JSON lines, and name these in its place with `dataset_path: json` and `dataset_kwargs: {{ data_files: \
                 {{ test: rows.jsonl }} }}`"
            );
            return Err(self.wrong("custom_dataset", message));
        }
        let dataset_path = self.text("dataset_path")?;
        let process_docs = self.row_processor(dataset_path.as_deref())?;
        let repeats = match self.value("repeats").map(|repeats| (repeats, repeats.as_u64())) {
            None => 1,
            Some((_, Some(repeats @ 1..))) => repeats as usize,
            Some((other, _)) => return Err(self.wrong("repeats", format!("`{other}` is no number of responses"))),
        };
        let filters = self.filters()?;
        if let Some(needed) = filters.iter().map(Pipeline::least_responses).max().filter(|needed| *needed > repeats) {
            let message = format!("`take_first_k` needs {needed} responses, and `repeats` is {repeats}");
            return Err(self.wrong("filter_list", message));
        }
        let output_type = match self.text("output_type")?.as_deref() {
            None | Some("generate_until") => OutputType::GenerateUntil,
            Some("multiple_choice") => OutputType::MultipleChoice,
            Some("loglikelihood") => OutputType::Loglikelihood,
            Some("loglikelihood_rolling") => OutputType::LoglikelihoodRolling,
            Some(other) => return Err(self.wrong("output_type", format!("`{other}` is none"))),
        };
        let process_results = self.processor()?;
        let (fewshot, config_split) = self.fewshot_config()?;
        let fewshot_delimiter = self.text("fewshot_delimiter")?.unwrap_or_else(|| "\n\n".to_owned());
        let doc_to_choice = self.field("doc_to_choice")?;
        if output_type == OutputType::MultipleChoice && doc_to_choice.is_none() {
            return Err(self.wrong("doc_to_choice", "is missing, and `output_type` is `multiple_choice`"));
        }
        let test_split = self.text("test_split")?;
        let validation_split = self.text("validation_split")?;
        if test_split.is_none() && validation_split.is_none() {
            return Err(self.wrong("test_split", "is missing, and so is `validation_split`: no rows to evaluate on"));
        }
        let num_fewshot = match self.value("num_fewshot") {
            None => None,
            Some(value) => {
                Some(value.as_u64().ok_or_else(|| self.wrong("num_fewshot", "is to be a number of rows"))? as usize)
            }
        };
        Ok(Task {
            file: self.file.clone(),
            name: self.text("task")?.ok_or_else(|| self.wrong("task", "is missing: the task's name"))?,
            output_type,
            dataset_path,
            process_docs,
            dataset_name: self.text("dataset_name")?,
            data_files: self.data_files()?,
            training_split: self.text("training_split")?,
            validation_split,
            test_split,
            fewshot_split: config_split.or(self.text("fewshot_split")?),
            fewshot,
            doc_to_text: self.field("doc_to_text")?.unwrap_or_else(|| "".into()),
            doc_to_target: self.field("doc_to_target")?.ok_or_else(|| self.wrong("doc_to_target", "is missing"))?,
            doc_to_choice,
            description: self.text("description")?.unwrap_or_default().as_str().into(),
            target_delimiter: self.text("target_delimiter")?.unwrap_or_else(|| " ".to_owned()),
            generation: self.generation(&fewshot_delimiter)?,
            fewshot_delimiter,
            gen_prefix: self.text("gen_prefix")?.filter(|prefix| !prefix.is_empty()).map(|text| text.as_str().into()),
            num_fewshot,
            repeats,
            filters,
            metrics: self.metrics(output_type, matches!(process_results, Some(Processor::Function(_))))?,
            process_results,
            version: self.value("metadata").and_then(|data| data.get("version")).cloned().unwrap_or(Value::Null),
            overrides: Overrides::default(),
        })
    }

    fn data_files(&self) -> Result<BTreeMap<String, Vec<PathBuf>>, TaskError> {
        let key = "dataset_kwargs";
        if let Some(arguments) = self.value(key) {
            let arguments = arguments.as_object().ok_or_else(|| self.wrong(key, "is to be a mapping"))?;
            // Others of `datasets.load_dataset` change what the rows are.
            self.only(key, arguments, &["data_files", "trust_remote_code", "cache_dir", "streaming", "revision"])?;
        }
        let Some(files) = self.value(key).and_then(|arguments| arguments.get("data_files")) else {
            return Ok(BTreeMap::new());
        };
        let paths = |value: &Value| -> Option<Vec<PathBuf>> {
            match value {
                Value::String(path) => Some(vec![PathBuf::from(path)]),
                Value::Array(paths) => paths.iter().map(|path| path.as_str().map(PathBuf::from)).collect(),
                _ => None,
            }
        };
        let wrong = || self.wrong(key, "`data_files` has a path or a list of paths for each split");
        match files {
            Value::Object(splits) => {
                splits.iter().map(|(split, files)| Ok((split.clone(), paths(files).ok_or_else(wrong)?))).collect()
            }
            files => Ok(BTreeMap::from([("train".to_owned(), paths(files).ok_or_else(wrong)?)])),
        }
    }

    fn fewshot_config(&self) -> Result<(FewshotConfig, Option<String>), TaskError> {
        let key = "fewshot_config";
        let none = Map::new();
        let config = match self.value(key) {
            None => &none,
            Some(value) => value.as_object().ok_or_else(|| self.wrong(key, "is to be a mapping"))?,
        };
        self.only(key, config, &["sampler", "split", "samples", "doc_to_text", "doc_to_target", "doc_to_choice"])?;
        let sampler = match config.get("sampler").and_then(Value::as_str) {
            None | Some("default") => Sampler::Random,
            Some("first_n") => Sampler::FirstN,
            Some(other) => {
                return Err(self.wrong(key, format!("`sampler: {other}` is neither `default` nor `first_n`")));
            }
        };
        let rows = |rows: &Value| -> Option<Vec<Document>> {
            rows.as_array()?.iter().map(|row| row.as_object().cloned()).collect()
        };
        let given = |name: &str| config.get(name).filter(|value| !value.is_null());
        let samples = |samples: &Value| match self.field_of(key, samples)? {
            FieldValue::Function(function) => Ok(Samples::Function(function)),
            FieldValue::Value(samples) => {
                rows(&samples).map(Samples::Rows).ok_or_else(|| self.wrong(key, "`samples` is a list of rows"))
            }
        };
        let samples = given("samples").map(samples).transpose()?;
        let field = |name: &str| given(name).map(|value| self.field_of(key, value)).transpose();
        let (doc_to_text, doc_to_target) = (field("doc_to_text")?, field("doc_to_target")?);
        let doc_to_choice = field("doc_to_choice")?;
        let fewshot = FewshotConfig { sampler, samples, doc_to_text, doc_to_target, doc_to_choice };
        Ok((fewshot, config.get("split").and_then(Value::as_str).map(str::to_owned)))
    }

    fn generation(&self, fewshot_delimiter: &str) -> Result<Generation, TaskError> {
        let key = "generation_kwargs";
        let none = Map::new();
        let arguments = match self.value(key) {
            None => &none,
            Some(value) => value.as_object().ok_or_else(|| self.wrong(key, "is to be a mapping"))?,
        };
        let sampling = Sampling { seed: SEED, ..Sampling::GREEDY };
        let mut generation = Generation { until: vec![fewshot_delimiter.to_owned()], max_new_tokens: 256, sampling };
        let samples = match arguments.get("do_sample") {
            None => None,
            Some(samples) => {
                Some(samples.as_bool().ok_or_else(|| self.wrong(key, "`do_sample` is to be true or false"))?)
            }
        };
        for (name, value) in arguments {
            match (name.as_str(), value) {
                ("until", Value::String(text)) => generation.until = vec![text.clone()],
                ("until", Value::Array(texts)) => {
                    let text = |text: &Value| text.as_str().map(str::to_owned);
                    let texts: Option<Vec<String>> = texts.iter().map(text).collect();
                    generation.until = texts.ok_or_else(|| self.wrong(key, "`until` must contain strings"))?;
                }
                ("max_gen_toks" | "max_new_tokens", Value::Number(tokens)) => {
                    let tokens = tokens.as_u64().ok_or_else(|| self.wrong(key, format!("`{name}` counts tokens")))?;
                    generation.max_new_tokens = tokens as usize;
                }
                ("do_sample", _) => {}
                // That is greedy search.
                ("num_beams", Value::Number(beams)) if beams.as_u64() == Some(1) => {}
                ("temperature", Value::Number(number)) => {
                    generation.sampling.temperature = number.as_f64().unwrap_or(f64::NAN);
                }
                ("top_p", Value::Number(number)) => generation.sampling.top_p = number.as_f64(),
                ("top_k", Value::Number(number)) if number.as_u64().is_some_and(|k| k > 0) => {
                    generation.sampling.top_k = number.as_u64().map(|k| k as usize);
                }
                _ => return Err(self.wrong(key, format!("`{name}: {value}` is not supported"))),
            }
        }
        match (samples, generation.sampling.temperature) {
            (Some(true), temperature) if temperature <= 0.0 => {
                return Err(self.wrong(key, "`do_sample: true` needs a `temperature` above 0"));
            }
            (Some(false), _) | (None, 0.0) => generation.sampling = sampling,
            _ => drop(TokenSampler::new(generation.sampling).map_err(|error| self.wrong(key, error.to_string()))?),
        }
        Ok(generation)
    }

    fn filters(&self) -> Result<Vec<Pipeline>, TaskError> {
        let key = "filter_list";
        let pipelines: Vec<Pipeline> = self
            .list(key)?
            .iter()
            .map(|entry| {
                Pipeline::read(entry, &|value| self.function(key, value)).map_err(|message| self.wrong(key, message))
            })
            .collect::<Result<_, _>>()?;
        Ok(if pipelines.is_empty() { vec![Pipeline::take_first()] } else { pipelines })
    }

    fn metrics(&self, output_type: OutputType, are_processed: bool) -> Result<Vec<Metric>, TaskError> {
        let key = "metric_list";
        if self.value(key).is_none() {
            return Ok(Metric::defaults(output_type, are_processed));
        }
        let reading = Reading { output_type, are_processed, function: &|value| self.function(key, value) };
        let metrics: Vec<Metric> = self
            .list(key)?
            .iter()
            .map(|entry| Metric::read(entry, &reading).map_err(|message| self.wrong(key, message)))
            .collect::<Result<_, _>>()?;
        if metrics.is_empty() {
            return Err(self.wrong(key, "is empty: what the task is measured by"));
        }
        Ok(metrics)
    }

    fn row_processor(&self, dataset: Option<&str>) -> Result<Option<RowProcessor>, TaskError> {
        let key = "process_docs";
        let Some(value) = self.value(key) else { return Ok(None) };
        if let Some(known) = function(value).and_then(|function| RowProcessor::of(function, dataset)) {
            return Ok(Some(known));
        }
        match self.field_of(key, value)? {
            FieldValue::Function(function) => Ok(Some(RowProcessor::Function(function))),
            FieldValue::Value(_) => Err(self.wrong(key, "is to be a `!function`")),
        }
    }

    fn processor(&self) -> Result<Option<Processor>, TaskError> {
        let key = "process_results";
        let Some(value) = self.value(key) else { return Ok(None) };
        match function(value) {
            Some("utils.process_results_mc2") => return Ok(Some(Processor::TruthfulQaMc2)),
            Some("preprocess_wikitext.process_results") => return Ok(Some(Processor::OfPage)),
            _ => {}
        }
        match self.field_of(key, value)? {
            FieldValue::Function(function) => Ok(Some(Processor::Function(function))),
            FieldValue::Value(_) => Err(self.wrong(key, "is to be a `!function`")),
        }
    }
}

/// What is wrong with a key that neither a task nor, where it is of one, a group has.
pub(super) fn unknown(key: &str, is_group: bool) -> Option<String> {
    let of_task = || KEYS.into_iter().chain(WITHOUT_EFFECT);
    let known: Vec<&str> = if is_group { GROUP_KEYS.to_vec() } else { of_task().collect() };
    if known.contains(&key) {
        return None;
    }
    let nearest = suggest::nearest(key, known.iter().copied());
    let hint = nearest.map_or_else(String::new, |name| format!(": did you mean `{name}`?"));
    Some(format!("no key of a task{hint}"))
}

/// Names for a message.
fn listed(names: &[&str]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

fn tree(source: SourceId, text: &str, sources: &Sources) -> Result<Node, (String, usize)> {
    let mut problems = Vec::new();
    let placed =
        |problem: &engine::file::problem::Problem| (problem.message.clone(), sources.line_column(problem.span).0);
    let root = parse::parse_tagged(source, text, &mut problems).map_err(|problem| placed(&problem))?;
    problems.first().map_or(Ok(root), |problem| Err(placed(problem)))
}

/// The function that a value names with `!function`.
fn function(value: &Value) -> Option<&str> {
    value.as_object()?.get(FUNCTION)?.as_str()
}

/// A value as PyYAML reads it.
fn json(node: &Node, text: &str) -> Value {
    match &node.value {
        Tree::List(items) => items.iter().map(|item| json(item, text)).collect(),
        Tree::Map(entries) => {
            entries.iter().map(|entry| (entry.key.clone(), json(&entry.value, text))).collect::<Map<_, _>>().into()
        }
        _ => scalar(node, text),
    }
}

/// A scalar: one without quotes by the rules of YAML 1.1, in which `no` is a boolean and `1e5` a text.
fn scalar(node: &Node, text: &str) -> Value {
    let written = text.get(node.span.offset..node.span.end()).unwrap_or("");
    let before = text.get(..node.span.offset).unwrap_or("").trim_end();
    if let Tree::String(tagged) = &node.value
        && (before.ends_with(FUNCTION) || written.starts_with(FUNCTION))
    {
        let name = tagged.trim_start_matches(FUNCTION).trim().to_owned();
        return Map::from_iter([(FUNCTION.to_owned(), Value::String(name))]).into();
    }
    let is_octal =
        |text: &str| text.len() > 1 && text.starts_with('0') && text.bytes().all(|digit| matches!(digit, b'0'..=b'7'));
    match written {
        "yes" | "Yes" | "YES" | "on" | "On" | "ON" => Value::Bool(true),
        "no" | "No" | "NO" | "off" | "Off" | "OFF" => Value::Bool(false),
        digits if is_octal(digits) => i64::from_str_radix(digits, 8).map_or(Value::Null, Value::from),
        number if matches!(node.value, Tree::Float(_)) && !number.contains(['.', 'n', 'N']) => Value::from(number),
        _ => node.to_json(),
    }
}
