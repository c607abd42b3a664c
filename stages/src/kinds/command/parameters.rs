//! What a pipeline file may say under `with:` for `uses: command`.

use engine::file::problem::Problem;
use engine::file::source::Span;
use engine::file::tree::{Node, Value};
use engine::parameter::{ArtifactKind, Input, KeyWriter, LocalPath, Mapping, Parameter, Parameters, Reader};
use engine::suggest;
use serde_json::json;

use super::placeholders::{self, Named};
use crate::compute::variable::VariableText;
use crate::kinds::dataset::TemplateChoice;

/// Begins the names of the variables that the stage sets itself.
const OWN_PREFIXES: [&str; 4] = ["INPUT_", "FILE_", "OUTPUT_", "PIPELINE_"];

/// An artefact of any kind.
#[derive(Debug, Clone, Copy)]
pub struct Anything;

impl ArtifactKind for Anything {
    const KINDS: &'static [&'static str] = &[];
}

/// What is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Program {
    /// A program and its arguments, without a shell.
    Arguments(Vec<String>),
    /// Lines for `sh`.
    Script(String),
}

impl Parameter for Program {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        match &node.value {
            Value::List(_) => Vec::<String>::read(node, reader).map(Self::Arguments),
            Value::String(text) => Some(Self::Script(text.clone())),
            _ => {
                reader.wrong_type(node, "a list (a program and its arguments) or a string (a script for `sh`)");
                None
            }
        }
    }

    fn write_key(&self, key: &mut KeyWriter<'_>) {
        match self {
            Self::Arguments(arguments) => arguments.write_key(key),
            Self::Script(text) => text.write_key(key),
        }
    }

    fn schema() -> serde_json::Value {
        json!({ "anyOf": [{ "type": "array", "items": { "type": "string" }, "minItems": 1 }, { "type": "string" }] })
    }
}

/// What an output is, and is checked to be.
#[derive(Parameters, Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputForm {
    /// Any files.
    Files,
    /// Data files (jsonl, csv, parquet …), which become rows.
    Rows,
    /// A checkpoint in the Hub's format.
    Model,
    /// The files of a fast tokenizer.
    Tokenizer,
    /// An adapter in PEFT's format.
    Adapter,
    /// Named metrics, in `metrics.json`.
    Metrics,
}

/// An output: its kind, and how data files become rows. A plain text is the kind alone.
#[derive(Debug, Clone)]
pub struct OutputParams {
    pub kind: OutputForm,
    /// How columns become a prompt, as in `dataset`.
    pub template: Option<TemplateChoice>,
    /// Which column fills which placeholder, as in `dataset`.
    pub column_map: Mapping<String>,
}

/// The long form of an output.
#[derive(Parameters, Debug)]
struct OutputMapping {
    /// The kind of the output, which is checked. `counts: metrics` is short for `counts: { kind: metrics }`.
    #[semantic]
    kind: OutputForm,
    /// For rows: how columns become a prompt, as in `dataset`.
    #[semantic]
    template: Option<TemplateChoice>,
    /// For rows: which column fills which placeholder of the template, as in `dataset`.
    #[semantic(default)]
    column_map: Mapping<String>,
}

impl Parameter for OutputParams {
    fn read(node: &Node, reader: &mut Reader) -> Option<Self> {
        if let Value::String(_) = node.value {
            let kind = OutputForm::read(node, reader)?;
            return Some(Self { kind, template: None, column_map: Mapping::new() });
        }
        let OutputMapping { kind, template, column_map } = OutputMapping::read(node, reader)?;
        if kind != OutputForm::Rows && (template.is_some() || !column_map.is_empty()) {
            reader.bad_value(node, "`template` and `column_map` are for `kind: rows`", "another kind, or neither");
            return None;
        }
        Some(Self { kind, template, column_map })
    }

    /// Both spellings of one output write the same.
    fn write_key(&self, key: &mut KeyWriter<'_>) {
        self.kind.write_key(key);
        if let Some(template) = &self.template {
            key.entry("template", |key| template.write_key(key));
        }
        if !self.column_map.is_empty() {
            key.entry("column_map", |key| self.column_map.write_key(key));
        }
    }

    fn schema() -> serde_json::Value {
        json!({ "anyOf": [OutputForm::schema(), OutputMapping::schema()] })
    }
}

/// What a pipeline file may say under `with:` for `uses: command`.
#[derive(Parameters, Debug)]
pub struct Command {
    /// A list is a program and its arguments, started without a shell; a string is a script for `sh`.
    #[semantic]
    pub run: Program,
    /// Outputs of other stages, `stage` or `stage.output`, by names of your choice.
    #[semantic(default)]
    pub inputs: Mapping<Input<Anything>>,
    /// Local files, folders and globs that it reads, including its own script, by names of your choice.
    #[semantic(default)]
    pub files: Mapping<LocalPath>,
    /// Its outputs, by names of your choice: a kind, or a mapping with `kind`.
    #[semantic(default)]
    pub outputs: Mapping<OutputParams>,
    /// Environment variables. Their values may contain `${inputs.x}`, `${files.x}` and `${outputs.x}`. A number or a
    /// boolean is its text.
    #[semantic(default)]
    pub env: Mapping<VariableText>,
    /// Environment variables that are passed on from the environment of `pipeline run`: secrets, and values that
    /// change no result. Their names are in the key, their values are not.
    #[semantic(default)]
    pub pass_env: Vec<String>,
}

impl Command {
    /// Everything that can be known to be wrong without running.
    pub(super) fn problems(&self, span: Span) -> Vec<Problem> {
        let mut problems = self.problems_of_the_program(span);
        problems.extend(self.problems_of_references(span));
        if self.texts().any(|text| text.contains('\0')) {
            let problem = Problem::error("bad-value", span, "`run` or `env` contains a zero byte", "in this stage");
            problems.push(problem.with_help("no word and no variable of a program can hold one"));
        }
        let named = [
            ("inputs", self.inputs.keys().collect::<Vec<_>>()),
            ("files", self.files.keys().collect()),
            ("outputs", self.outputs.keys().collect()),
            ("env", self.env.keys().collect()),
            ("pass_env", self.pass_env.iter().collect()),
        ];
        for (field, names) in named {
            problems.extend(names.into_iter().filter(|name| !is_name(name)).map(|name| {
                let message = format!("`{name}` of `{field}` cannot be part of an environment variable's name");
                Problem::error("bad-value", span, message, "in this stage")
                    .with_help("a name has letters, digits and `_`, and begins with no digit")
            }));
        }
        problems.extend(self.problems_of_the_environment(span));
        problems
    }

    fn problems_of_the_program(&self, span: Span) -> Vec<Problem> {
        let wrong = |message: String, label: &str| Problem::error("bad-value", span, message, label);
        match &self.run {
            Program::Script(text) if text.trim().is_empty() => {
                vec![wrong("`run` is empty".to_owned(), "there is nothing to run")]
            }
            Program::Arguments(arguments) => match arguments.first().map(String::as_str) {
                None | Some("") => vec![wrong("`run` is empty".to_owned(), "there is nothing to run")],
                Some(program) if program.starts_with("./") || program.starts_with("../") => {
                    let help = "name the file under `files:`, say `script`, and write `${files.script}`; its content is then in the key";
                    vec![
                        wrong(format!("`{program}` does not exist: the program runs in a separate folder"), "in `run`")
                            .with_help(help),
                    ]
                }
                Some(_) => Vec::new(),
            },
            Program::Script(_) => Vec::new(),
        }
    }

    /// What `run` and `env` say.
    fn texts(&self) -> impl Iterator<Item = &str> {
        let run = match &self.run {
            Program::Arguments(arguments) => arguments.as_slice(),
            Program::Script(text) => std::slice::from_ref(text),
        };
        self.env.values().map(|value| &value.0).chain(run).map(String::as_str)
    }

    /// References in `run` and `env` that lead nowhere.
    fn problems_of_references(&self, span: Span) -> Vec<Problem> {
        let mut problems = Vec::new();
        for Named { group, name } in self.texts().flat_map(placeholders::named) {
            let known: Vec<&str> = match group {
                placeholders::INPUTS => self.inputs.keys().map(String::as_str).collect(),
                placeholders::FILES => self.files.keys().map(String::as_str).collect(),
                _ => self.outputs.keys().map(String::as_str).collect(),
            };
            if !known.contains(&name) {
                let message = format!("`${{{group}.{name}}}` is unknown: `{group}` has no `{name}`");
                problems.push(
                    Problem::error("bad-reference", span, message, "in this stage").with_help_if(suggest::help(
                        name,
                        group,
                        known.iter().copied(),
                    )),
                );
            }
        }
        problems
    }

    fn problems_of_the_environment(&self, span: Span) -> Vec<Problem> {
        let mut problems = Vec::new();
        for name in self.env.keys().chain(&self.pass_env) {
            if OWN_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && name != super::SMOKE {
                let message = format!("`{name}` is a name that this stage gives itself");
                let help = format!("variables that begin with {} are reserved", OWN_PREFIXES.join(", "));
                problems.push(Problem::error("bad-value", span, message, "in this stage").with_help(help));
            }
        }
        for name in self.pass_env.iter().filter(|name| self.env.contains_key(*name)) {
            let message = format!("`{name}` is in `env` and in `pass_env`");
            problems.push(Problem::error("bad-value", span, message, "which of the two?"));
        }
        for (name, value) in &self.env {
            if engine::file::interpolate::is_secret(name) && value.0.parse::<f64>().is_err() {
                let message = format!("`{name}` looks like a secret, and its value is written into keys and records");
                let help = format!("set it in the environment of `pipeline run`, and say `pass_env: [{name}]`");
                problems.push(Problem::warning("secret-in-file", span, message, "in `env`").with_help(help));
            }
        }
        problems
    }
}

fn is_name(text: &str) -> bool {
    let mut letters = text.bytes();
    letters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == b'_')
        && letters.all(|letter| letter.is_ascii_alphanumeric() || letter == b'_')
}
