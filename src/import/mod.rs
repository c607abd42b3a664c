//! `pipeline import`: another tool's configuration or command as a pipeline file.
//!
//! A file each: [`configuration`] finds the configuration in what was given, with what its [`launcher`] decides,
//! [`reading`] reads it by a table of keys ([`key`]), one per tool ([`torchtune`], [`axolotl`], [`llama_factory`],
//! [`ms_swift`], [`trl`], over what they share: [`hugging_face`], [`rows`], [`preference`], [`places`]), into a [`job`]
//! with its [`parameters`], which [`mod@write`] writes with comments; [`report`] has the three lists.

mod axolotl;
mod command_line;
mod configuration;
mod hugging_face;
mod job;
mod key;
mod launcher;
mod llama_factory;
mod ms_swift;
pub(crate) mod parameters;
pub(crate) mod places;
mod preference;
mod reading;
mod report;
pub(crate) mod rows;
mod torchtune;
mod trl;
pub(crate) mod write;

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use engine::file::foreign::Tool;
use engine::file::problem::{Problem, Severity};
use engine::file::source::{Sources, Span};
use engine::file::tree::Value;
use engine::plan::Rejected;

use self::command_line::Word;
use self::configuration::Configuration;
use self::job::Job;
use self::key::Keys;
use self::parameters::Note;
use self::places::Places;
use self::reading::{Lists, Reading};
use self::report::Report;
use crate::progress::Verbosity;
use crate::render::{self, Exit, Failure, Message};
use crate::terminal::{self, Look};
use crate::{Format, Global, new_file, words};

/// Write a pipeline file that does what another tool's configuration or command does.
///
/// Reads configurations of torchtune, axolotl, LLaMA-Factory (with its dataset_info.json), ms-swift and TRL, shell
/// scripts, and commands: `pipeline import 'swift sft --model …'`, or `pipeline import -- swift sft --model …`. Every
/// default of the tool is written out, and three lists show what was converted, what has another meaning here, and what
/// could not be converted, which is an error without `--partial`.
#[derive(Args)]
pub(crate) struct ImportArgs {
    /// A configuration, a shell script, or a command in quotes.
    #[arg(value_name = "FILE|COMMAND", required_unless_present = "command")]
    what: Option<String>,
    /// Where to write the pipeline file [default: standard output].
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace an existing pipeline file.
    #[arg(long)]
    overwrite: bool,
    /// Write the pipeline file although some keys cannot be converted.
    #[arg(long)]
    partial: bool,
    /// The tool of the file [default: recognised by its keys].
    #[arg(long, value_enum)]
    from: Option<From>,
    /// How to print the lists; with `json` the pipeline file is part of the output.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// A command, word by word.
    #[arg(last = true, value_name = "COMMAND", conflicts_with = "what")]
    command: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum From {
    Torchtune,
    Axolotl,
    LlamaFactory,
    MsSwift,
    Trl,
}

impl From {
    fn tool(self) -> Tool {
        match self {
            Self::Torchtune => Tool::Torchtune,
            Self::Axolotl => Tool::Axolotl,
            Self::LlamaFactory => Tool::LlamaFactory,
            Self::MsSwift => Tool::MsSwift,
            Self::Trl => Tool::Trl,
        }
    }
}

/// A configuration that was read.
struct Imported {
    tool: String,
    job: Job,
    lists: Lists,
    problems: Vec<Problem>,
}

/// Reads, writes and reports.
pub(crate) fn run(args: &ImportArgs, global: &Global) -> Result<(), Failure> {
    if let Some(output) = args.output.as_ref().filter(|output| !args.overwrite && output.exists()) {
        return Err(new_file::taken(output));
    }
    let mut sources = Sources::default();
    let configuration = find(args, &mut sources)?;
    let places = Places::new(configuration.file.as_deref(), args.output.as_deref());
    let imported = read(&configuration, &places, &mut sources);
    let Imported { tool, job, lists, problems } = &imported;
    let report = Report { tool, lists, sources: &sources, method: job.method };
    let severity = if args.partial { Severity::Warning } else { Severity::Error };
    let problems: Vec<Problem> = problems.iter().cloned().chain(report.problems(severity)).collect();
    let fails = problems.iter().any(|problem| problem.severity == Severity::Error);
    let text = job.write();
    let file = args.output.clone().unwrap_or_else(|| PathBuf::from("imported.yaml"));
    let rejected = if fails { None } else { validated(&file, &text) };
    let is_ours = rejected.as_ref().is_some_and(is_wrong);
    let pipeline = (!fails && !is_ours).then_some(text.as_str());
    match args.format {
        Format::Json => crate::print_json(&report.view(pipeline, &problems))?,
        Format::Text => {
            terminal::tell(render::problems(&sources, &problems, Look::stderr()));
            if global.verbosity() != Verbosity::Quiet {
                terminal::tell(report.text(Look::stderr()));
            }
        }
    }
    if let Some(rejected) = rejected {
        terminal::tell(render::problems(&rejected.sources, &rejected.problems, Look::stderr()));
        if is_ours {
            let message = match imported.lists.missing.is_empty() {
                true => "the imported file does not validate, which is a mistake of `pipeline import`",
                false => "without what is not carried over the file does not validate, and is not written",
            };
            return Err(Failure::wrong(message));
        }
    }
    let Some(pipeline) = pipeline else {
        let only_missing = problems.iter().all(|problem| problem.code == "not-carried-over");
        let can_be_told = !args.partial && args.format == Format::Text && job_can_be_read(&imported.problems);
        if only_missing && can_be_told && !validated(&file, &text).as_ref().is_some_and(is_wrong) {
            terminal::tell_line("`--partial` writes the rest");
        }
        return Err(Failure::Shown(Exit::Wrong));
    };
    match (&args.output, args.format) {
        (Some(output), _) => {
            new_file::write(output, pipeline, args.overwrite)?;
            let written = format!("{}: written; `pipeline plan` shows what it would do", output.display());
            terminal::tell_line(Look::stderr().wrap(&written, 2));
            Ok(())
        }
        (None, Format::Text) => {
            std::io::stdout().lock().write_all(pipeline.as_bytes())?;
            Ok(())
        }
        (None, Format::Json) => Ok(()),
    }
}

/// Whether there is a job, of which only parts are missing.
fn job_can_be_read(problems: &[Problem]) -> bool {
    problems.iter().all(|problem| problem.severity == Severity::Warning)
}

/// The configuration in what was given.
fn find(args: &ImportArgs, sources: &mut Sources) -> Result<Configuration, Failure> {
    let mut problems = Vec::new();
    let found = match &args.what {
        Some(what) if Path::new(what).is_file() => {
            let text = fs::read_to_string(what).map_err(|error| unreadable(what, &error))?;
            let from = args.from.map(From::tool);
            configuration::of_file(Path::new(what), &text, from, sources, &mut problems).unwrap_or_else(|problem| {
                problems.push(*problem);
                None
            })
        }
        Some(what) if !what.contains(char::is_whitespace) => {
            return Err(Failure::wrong(format!("there is no file `{what}`")));
        }
        Some(command) => {
            let source = sources.add("command line", command.as_str());
            configuration::of_commands(source, command, sources, &mut problems)
        }
        None => {
            let command = args.command.iter().map(|word| words::for_shell(word)).collect::<Vec<_>>().join(" ");
            let source = sources.add("command line", command.as_str());
            configuration::of_commands(source, &command, sources, &mut problems)
        }
    };
    for problem in problems.iter_mut().filter(|problem| args.partial && problem.code == "not-carried-over") {
        problem.severity = Severity::Warning;
    }
    let verb = found.as_ref().and_then(|found| found.verb.as_ref());
    problems.extend(verb.and_then(|(verb, span)| no_training(verb, *span)));
    if problems.iter().any(|problem| problem.severity == Severity::Error) {
        return Err(Rejected::new(std::mem::take(sources), problems).into());
    }
    terminal::tell(render::problems(sources, &problems, Look::stderr()));
    let names = Tool::ALL.map(Tool::name).join(", ");
    found.ok_or_else(|| {
        Failure::wrong("this belongs to no tool that is known here")
            .with_help(format!("configurations and commands of {names} are read; `--from` names the tool of a file"))
    })
}

fn unreadable(what: &str, error: &std::io::Error) -> Failure {
    Failure::Told {
        exit: Exit::Wrong,
        message: Message::chain(&[format!("cannot read `{what}`"), error.to_string()], None),
    }
}

/// The tool's table, and its name with the version that the table is of.
fn table(tool: Tool) -> (Keys, String) {
    let (keys, version) = match tool {
        Tool::Torchtune => (torchtune::keys(), torchtune::VERSION),
        Tool::Axolotl => (axolotl::keys(), axolotl::VERSION),
        Tool::LlamaFactory => (llama_factory::keys(), llama_factory::VERSION),
        Tool::MsSwift => (ms_swift::keys(), ms_swift::VERSION),
        Tool::Trl => (trl::keys(), trl::VERSION),
    };
    (keys, format!("{} {version}", tool.name()))
}

fn read(configuration: &Configuration, places: &Places, sources: &mut Sources) -> Imported {
    let Configuration { tool, root, verb, .. } = configuration;
    let (keys, name) = table(*tool);
    let entries = match &root.value {
        Value::Map(entries) => entries.as_slice(),
        _ => &[],
    };
    let mut reading = Reading::new(name, keys, entries);
    if let Some((recipe, span)) = &configuration.recipe {
        torchtune::recipe(&mut reading, recipe, *span);
    }
    let devices = configuration.devices.max(1) * configuration.nodes.max(1);
    let mut job = match tool {
        Tool::Torchtune => {
            let recipe = configuration.recipe.as_ref().map(|(recipe, _)| recipe.as_str());
            torchtune::read(&mut reading, root, recipe, devices, places)
        }
        Tool::Axolotl => axolotl::read(&mut reading, root, devices, places),
        Tool::LlamaFactory => {
            let hub = if configuration.uses_model_scope { "modelscope:" } else { "" };
            llama_factory::read(&mut reading, root, devices, hub, places, sources)
        }
        Tool::MsSwift => {
            let verb = verb.as_ref().map(|(verb, _)| verb.as_str());
            ms_swift::read(&mut reading, root, devices, verb, places)
        }
        Tool::Trl => {
            let verb = verb.as_ref().map(|(verb, _)| verb.as_str());
            trl::read(&mut reading, root, devices, verb, places)
        }
    };
    if let Some(precision) = &configuration.mixed_precision {
        mixed_precision(&mut reading, precision);
    }
    reading.finish();
    reading.lists.extend(&configuration.of_launcher);
    if configuration.nodes > 1 {
        reading.parameters.set("resources.nodes", configuration.nodes, Note::Given);
        reading.parameters.set("resources.count", configuration.devices, Note::Given);
    }
    if let Some(device) = configuration.device.filter(|_| reading.parameters.get("resources.device").is_none()) {
        reading.parameters.set("resources.device", device, Note::Given);
    }
    job.merges |= configuration.merges;
    job.parameters = std::mem::take(&mut reading.parameters);
    job.output = job.output.map(|output| publish_target(&output, &job.parameters, places));
    job.name = configuration
        .file
        .as_deref()
        .and_then(Path::file_stem)
        .map_or_else(|| "imported".to_owned(), |stem| stem.to_string_lossy().into_owned());
    job.head = vec![
        format!("Written by `pipeline import` from what {} would do.", reading.tool),
        "A comment above a key explains a different meaning there; one after it, that it was not set there.".to_owned(),
    ];
    if !reading.lists.missing.is_empty() {
        let mut keys: Vec<&str> = reading.lists.missing.iter().map(|item| item.key.as_str()).collect();
        keys.dedup();
        job.head.push(format!("Without what is not carried over: {}.", keys.join(", ")));
    }
    Imported { tool: reading.tool, job, lists: reading.lists, problems: reading.problems }
}

/// The precision that a launcher gives a trainer without one.
fn mixed_precision(reading: &mut Reading<'_>, precision: &Word) {
    let item = |becomes: Option<&str>, reason: Option<&str>| {
        launcher::item("mixed_precision", precision, becomes, reason.map(str::to_owned))
    };
    let is_open = reading.parameters.get("train.dtype").is_none_or(|dtype| dtype == "f32");
    let dtype = match precision.text.as_str() {
        "bf16" => "bf16",
        "fp16" => "f16",
        "no" => return reading.lists.same.push(item(None, Some("the trainer's own precision counts"))),
        _ => return reading.lists.missing.push(item(None, Some("bf16 and f16 are computed in, and no smaller type"))),
    };
    if is_open {
        reading.parameters.set("train.dtype", dtype, Note::Given);
        reading.lists.same.push(item(Some("train.dtype"), None));
    } else {
        reading.lists.same.push(item(None, Some("the trainer's own `bf16` and `fp16` come first, there and here")));
    }
}

/// Where the result is copied: not over what the job reads.
fn publish_target(output: &str, parameters: &parameters::Parameters, places: &Places) -> String {
    let target = places.written(output.trim_end_matches('/'));
    let base = parameters.get("base.path").and_then(serde_json::Value::as_str).map(str::to_owned);
    let holds = |base: &str| {
        base == target || base.starts_with(&format!("{target}/")) || target.starts_with(&format!("{base}/"))
    };
    if output == "." || output == "./" || base.as_deref().is_some_and(holds) {
        "./out/result".to_owned()
    } else {
        target
    }
}

/// Commands other than those that fine-tune have no job to read.
fn no_training(verb: &str, span: Span) -> Option<Problem> {
    let what = match verb {
        "train" | "run" | "sft" | "pt" | "rlhf" | "dpo" | "kto" => return None,
        "grpo" | "reward" | "rloo" => preference::OTHERS,
        "export" | "merge-lora" => "merging is a `merge` stage: docs/stages/merge.md",
        "infer" | "inference" | "chat" => "asking is a `generate` stage: docs/stages/generate.md",
        "eval" | "evaluate" => "measuring is an `evaluate` stage: docs/stages/evaluate.md",
        _ => "no command that trains",
    };
    Some(Problem::error("not-carried-over", span, format!("`{verb}` is not carried over"), what))
}

/// What `pipeline validate` finds in the file, where it is not fine.
pub(crate) fn validated(file: &Path, text: &str) -> Option<Rejected> {
    let registry = stages::registry();
    match engine::plan::load_text(file, text, &[], &registry) {
        Ok(plan) => {
            let findings = engine::checks::check(&plan, None, None);
            if findings.are_fine() {
                return None;
            }
            let sources = plan.sources.clone();
            Some(Rejected::new(sources, findings.into_problems()))
        }
        Err(rejected) => Some(engine::checks::complete(rejected, None)),
    }
}

/// Whether a pipeline file is wrong by itself, whatever there is on this machine.
fn is_wrong(rejected: &Rejected) -> bool {
    !rejected.problems.iter().all(is_of_the_machine)
}

/// Whether a problem is one of files on this machine, and not of the pipeline file.
pub(crate) fn is_of_the_machine(problem: &Problem) -> bool {
    const CODES: &[&str] = &[
        "file-missing",
        "file-unreadable",
        "bad-checkpoint",
        "unreadable-rows",
        "unknown-column",
        "unclear-rows",
        "bad-row",
        "target-taken",
        "no-chat-template",
        "unknown-module",
        "bad-source",
        "no-device",
    ];
    problem.severity == Severity::Warning || CODES.contains(&problem.code)
}
