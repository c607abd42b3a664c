//! The command line: arguments in, results on standard output, everything else on standard error.
//!
//! One file per command. It leaves to others: reading pipeline files, running stages, storing results.

#![forbid(unsafe_code)]

mod bars;
mod cache;
mod chat;
mod completions;
mod devices;
mod explain;
mod export;
mod figures;
mod full_disk;
mod graph;
mod import;
mod inference;
mod junit;
mod limits;
mod listen;
mod locate;
mod lock;
mod logs;
mod new_file;
mod plan;
mod plot;
mod profiles;
mod progress;
mod recipes;
mod remote;
mod render;
mod report;
mod run;
mod runs;
mod sarif;
mod schema;
mod screen;
mod selection;
mod serve;
mod show;
mod stream;
mod table;
mod terminal;
mod track;
mod ui;
mod validate;
mod words;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use engine::execute::executor::STAGE_ARGUMENT;
use engine::execute::keeper::{self, KEEPER_ARGUMENT};
use engine::execute::member::{self, MEMBER_ARGUMENT};
use engine::execute::stage_process;
use engine::execute::watcher::{self, WATCH_ARGUMENT};
use engine::run::ExitOnInterrupt;

use limits::Ends;
use progress::Verbosity;
use render::{Exit, Failure};

/// Fine-tunes language models from a file: a declared, cached, restartable pipeline.
#[derive(Parser)]
#[command(name = "pipeline", version, arg_required_else_help = true, infer_subcommands = false)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// What every command takes.
#[derive(Args, Clone)]
pub struct Global {
    /// Folder for results and records [default: `$PIPELINE_HOME`, else `.pipeline` next to the file or in a folder
    /// above it].
    #[arg(long, global = true, value_name = "FOLDER", help_heading = "Everywhere")]
    home: Option<PathBuf>,
    /// Print only errors and results.
    #[arg(short, long, global = true, conflicts_with = "verbose", help_heading = "Everywhere")]
    quiet: bool,
    /// Print also metrics, checkpoints and why each stage runs.
    #[arg(short, long, global = true, help_heading = "Everywhere")]
    verbose: bool,
}

#[derive(Subcommand)]
enum Command {
    Init(recipes::init::InitArgs),
    Ls(recipes::ls::LsArgs),
    Cat(recipes::cat::CatArgs),
    Cp(recipes::cp::CpArgs),
    Run(run::RunArgs),
    Validate(validate::ValidateArgs),
    Explain(explain::ExplainArgs),
    Plan(plan::PlanArgs),
    Show(show::ShowArgs),
    Chat(chat::ChatArgs),
    Serve(serve::ServeArgs),
    Ui(ui::UiArgs),
    Export(export::ExportArgs),
    Graph(graph::GraphArgs),
    Import(import::ImportArgs),
    Cache(cache::CacheArgs),
    Runs(runs::RunsArgs),
    Report(report::ReportArgs),
    Track(track::TrackArgs),
    Logs(logs::LogsArgs),
    Lock(lock::LockArgs),
    Schema(schema::SchemaArgs),
    Devices(devices::DevicesArgs),
    Completions(completions::CompletionsArgs),
    Man(completions::ManArgs),
}

/// What a result is printed as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Format {
    /// For a person.
    #[default]
    Text,
    /// For a program.
    Json,
}

fn main() -> ExitCode {
    engine::home::keep_from_others();
    if let Some(ended) = own_process() {
        return ended;
    }
    let Cli { global, command } = Cli::try_parse().unwrap_or_else(|error| with_tip(error).exit());
    limits::heed(Ends::Program);
    // A run has an order in which it stops, once it has begun.
    let _exit = command.is_for_a_person().then(ExitOnInterrupt::new);
    let ended = match command {
        Command::Init(args) => recipes::init::run(&args, &global),
        Command::Ls(args) => recipes::ls::run(&args),
        Command::Cat(args) => recipes::cat::run(&args),
        Command::Cp(args) => recipes::cp::run(&args),
        Command::Run(args) => run::run(&args, &global),
        Command::Validate(args) => validate::run(&args, &global),
        Command::Explain(args) => explain::run(&args),
        Command::Plan(args) => plan::run(&args, &global),
        Command::Show(args) => show::run(&args, &global),
        Command::Chat(args) => chat::run(&args, &global),
        Command::Serve(args) => serve::run(&args, &global),
        Command::Ui(args) => ui::run(&args, &global),
        Command::Export(args) => export::run(&args, &global),
        Command::Graph(args) => graph::run(&args, &global),
        Command::Import(args) => import::run(&args, &global),
        Command::Cache(args) => cache::run(&args, &global),
        Command::Runs(args) => runs::run(&args, &global),
        Command::Report(args) => report::run(&args, &global),
        Command::Track(args) => track::run(&args, &global),
        Command::Logs(args) => logs::run(&args, &global),
        Command::Lock(args) => lock::run(&args, &global),
        Command::Schema(args) => schema::run(&args),
        Command::Devices(args) => devices::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => completions::man(&args),
    };
    match ended {
        Ok(()) => Exit::Done.into(),
        Err(failure) => render::failure(&failure).into(),
    }
}

/// Does what the engine starts this program for, if it did. Thousands of stages are run: none waits for the description
/// of the whole command line, and they heed the engine.
fn own_process() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    let what = arguments.next()?;
    let rest: Vec<OsString> = arguments.collect();
    Some(match (what.to_str()?, rest.as_slice()) {
        (STAGE_ARGUMENT, [job]) => {
            limits::heed(Ends::Stage);
            stage_process::main(&stages::registry(), Path::new(job))
        }
        (MEMBER_ARGUMENT, [job, membership]) => {
            limits::heed(Ends::Stage);
            member::main(&stages::registry(), Path::new(job), membership.to_str()?.parse().ok()?)
        }
        (KEEPER_ARGUMENT, [folder]) => {
            limits::heed(Ends::Program);
            keeper::main(Path::new(folder))
        }
        (WATCH_ARGUMENT, []) => watcher::main(),
        _ => return None,
    })
}

/// Adds to a mistake in the command line what was probably meant.
fn with_tip(mut error: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue, ErrorKind};
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let is_near = error.get(ContextKind::SuggestedArg).is_some();
    let tip = match error.kind() {
        ErrorKind::InvalidSubcommand => text(ContextKind::InvalidSubcommand).and_then(whole_command),
        ErrorKind::UnknownArgument if !is_near => text(ContextKind::InvalidArg).and_then(meant_by_option),
        _ => None,
    };
    if let Some(tip) = tip {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// Of a command without the word before it, such as `doctor`: all of it.
fn whole_command(name: &str) -> Option<String> {
    let cli = Cli::command();
    let groups = cli.get_subcommands().filter(|group| group.find_subcommand(name).is_some());
    let commands: Vec<String> = groups.map(|group| format!("`pipeline {} {name}`", group.get_name())).collect();
    (!commands.is_empty()).then(|| format!("the command is {}", commands.join(" or ")))
}

/// Whoever gives a parameter as an option is shown how to set it.
fn meant_by_option(option: &str) -> Option<String> {
    let name = option.strip_prefix("--")?.split('=').next()?;
    let command = std::env::args_os().nth(1)?;
    if !["run", "plan", "show"].iter().any(|known| command == *known) {
        return None;
    }
    let cli = Cli::command();
    let mut options = cli.find_subcommand("run").into_iter().flat_map(clap::Command::get_arguments);
    if options.any(|option| option.get_long() == Some(name)) {
        return Some(format!("`--{name}` is an option of `pipeline run`"));
    }
    let parameter = name.replace('-', "_");
    Some(format!("a parameter of a stage is set by `STAGE.{parameter}=VALUE`, without dashes"))
}

impl Command {
    /// Whether somebody waits for its exit code, also where Ctrl-C ends it.
    fn is_for_a_person(&self) -> bool {
        !matches!(self, Self::Run(_) | Self::Serve(_) | Self::Ui(_) | Self::Chat(_))
    }
}

impl Global {
    fn verbosity(&self) -> Verbosity {
        match (self.quiet, self.verbose) {
            (true, _) => Verbosity::Quiet,
            (false, true) => Verbosity::Verbose,
            (false, false) => Verbosity::Normal,
        }
    }

    /// The home of a pipeline file.
    fn home(&self, file: &Path) -> Result<engine::home::Home, Failure> {
        let opened = engine::home::Home::open(file, self.named_home().as_deref());
        let help = "results are kept in this folder: `--home FOLDER`, or PIPELINE_HOME, names another one";
        opened.map_err(|error| match error {
            engine::home::HomeError::NotAHome { .. } => Failure::wrong(error.to_string())
                .with_help("`--home FOLDER`, or PIPELINE_HOME, names a folder that is empty, or that is not there yet"),
            error => Failure::machine(error).or_help(help),
        })
    }

    /// The home of a pipeline file, for commands that only look: it need not be there, and may be read-only.
    fn home_to_look(&self, file: &Path) -> engine::home::Home {
        engine::home::Home::at(file, self.named_home().as_deref())
    }

    /// The home of the present folder, if it has one, for commands that take no pipeline file and only look.
    fn home_here(&self) -> Option<engine::home::Home> {
        engine::home::Home::existing(Path::new("pipeline.yaml"), self.named_home().as_deref())
    }

    fn named_home(&self) -> Option<PathBuf> {
        let variable = || std::env::var_os("PIPELINE_HOME").filter(|value| !value.is_empty()).map(PathBuf::from);
        self.home.clone().or_else(variable)
    }
}

/// What `--smoke` makes of a plan.
fn scale(smoke: bool) -> engine::plan::Scale {
    if smoke { engine::plan::Scale::Smoke } else { engine::plan::Scale::Full }
}

/// Prints a value as a program reads it.
fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    use std::io::Write;
    let text = serde_json::to_string_pretty(value).map_err(std::io::Error::from)?;
    writeln!(std::io::stdout().lock(), "{}", escaped_json(text))?;
    Ok(())
}

/// JSON that may be printed on a terminal: what it need not escape, and a terminal or a reader would obey, is in
/// texts alone.
fn escaped_json(text: String) -> String {
    let is_hidden = |letter: char| engine::visible::is_hidden(letter) && letter != '\n';
    if !text.contains(is_hidden) {
        return text;
    }
    let escaped = |letter: char| match is_hidden(letter) {
        true => format!("\\u{:04x}", u32::from(letter)),
        false => letter.to_string(),
    };
    text.chars().map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_says_the_same_with_nothing_hidden_in_it() {
        let value = serde_json::json!({ "a\u{9b}": ["\u{1b}[31m\n", "\u{7f}\u{202e}é"] });
        let text = escaped_json(serde_json::to_string_pretty(&value).expect("plain data"));
        assert!(!text.contains(|letter: char| engine::visible::is_hidden(letter) && letter != '\n'), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).expect("it is JSON"), value);
    }
}
