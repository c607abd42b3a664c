//! `pipeline runs`: the runs of this home, and what happened in one.

use std::io::Write;

use clap::{Args, Subcommand};
use engine::history::{History, RunState, RunSummary, StageSummary, read_events};
use engine::home::Home;
use engine::run::RunEvent;
use serde_json::json;

use crate::render::Failure;
use crate::run::counts;
use crate::table::Table;
use crate::{Format, Global, words};

/// Look at past runs and those that go on.
#[derive(Args)]
pub struct RunsArgs {
    #[command(subcommand)]
    command: RunsCommand,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t, global = true)]
    format: Format,
}

#[derive(Subcommand)]
enum RunsCommand {
    /// List the runs, the newest first.
    Ls,
    /// Show the stages of a run, and why those that failed did.
    Show {
        /// The run's id or its beginning [default: the newest].
        run: Option<String>,
    },
}

/// Lists runs or shows one.
pub fn run(args: &RunsArgs, global: &Global) -> Result<(), Failure> {
    let Some(home) = global.home_here() else {
        return match &args.command {
            RunsCommand::Ls => list(&[], args.format),
            RunsCommand::Show { .. } => Err(nothing_yet()),
        };
    };
    let history = History::open(&home).map_err(Failure::machine)?;
    match &args.command {
        RunsCommand::Ls => list(&history.runs().map_err(Failure::machine)?, args.format),
        RunsCommand::Show { run } => {
            let (summary, stages) = find(&history, run.as_deref())?;
            show(&home, &summary, &stages, args.format)
        }
    }
}

/// The failure where there is no run to name.
pub fn nothing_yet() -> Failure {
    Failure::wrong("nothing has been run yet").with_help(
        "`pipeline run FILE` starts a run; those of a pipeline elsewhere are seen from its folder, or with `--home`",
    )
}

/// The run that an id or its beginning names, the newest without one.
pub fn find(history: &History, id: Option<&str>) -> Result<(RunSummary, Vec<StageSummary>), Failure> {
    let newest = || history.runs().map(|runs| runs.into_iter().next().map(|run| run.run)).map_err(Failure::machine);
    let Some(wanted) = id.map_or_else(newest, |id| Ok(Some(id.to_owned())))? else {
        return Err(nothing_yet());
    };
    let found = history.run(&wanted).map_err(Failure::machine)?;
    found.ok_or_else(|| {
        Failure::wrong(format!("there is no run `{wanted}`, or more than one begins so"))
            .with_help("`pipeline runs ls` lists them")
    })
}

fn list(runs: &[RunSummary], format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return crate::print_json(&json!(runs));
    }
    let mut table = Table::new(["run", "pipeline", "started", "state", "took", "stages"]);
    for run in runs {
        let took = run.seconds.map(words::seconds).unwrap_or_default();
        let state = state(run.state);
        table.row([&run.run, &run.pipeline, &run.started, state, &took, &counts(run.counts)]);
    }
    let mut out = std::io::stdout().lock();
    match table.is_empty() {
        true => writeln!(out, "no runs yet")?,
        false => write!(out, "{table}")?,
    }
    Ok(())
}

fn show(home: &Home, summary: &RunSummary, stages: &[StageSummary], format: Format) -> Result<(), Failure> {
    let events = read_events(&home.run(&summary.run))?;
    let failures: Vec<(&str, &[String])> = events
        .iter()
        .filter_map(|timed| match &timed.event {
            RunEvent::StageFailed { stage, messages, retry_in_seconds: None, .. } => {
                Some((stage.as_str(), messages.as_slice()))
            }
            _ => None,
        })
        .collect();
    if format == Format::Json {
        let failures: Vec<_> =
            failures.iter().map(|(stage, messages)| json!({ "stage": stage, "messages": messages })).collect();
        return crate::print_json(&json!({ "run": summary, "stages": stages, "failures": failures }));
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "run {} of `{}` ({})", summary.run, summary.pipeline, summary.file.display())?;
    let took = summary.seconds.map(|seconds| format!(" after {}", words::seconds(seconds))).unwrap_or_default();
    writeln!(out, "started {}, {}{took}\n", summary.started, state(summary.state))?;
    let mut table = Table::new(["stage", "kind", "state", "took", "peak memory", "key"]);
    for stage in stages {
        table.row([
            stage.stage.clone(),
            stage.kind.clone(),
            stage.status.clone(),
            stage.seconds.map(words::seconds).unwrap_or_default(),
            stage.peak_memory_bytes.map(words::bytes).unwrap_or_default(),
            stage.key.map(|key| key.short()).unwrap_or_default(),
        ]);
    }
    write!(out, "{table}")?;
    for (stage, messages) in failures {
        writeln!(out, "\n{stage} failed: {}", messages.join(": "))?;
    }
    Ok(())
}

fn state(state: RunState) -> &'static str {
    match state {
        RunState::Running => "running",
        RunState::CutOff => "cut off",
        RunState::Succeeded => "succeeded",
        RunState::Failed => "failed",
        RunState::Interrupted => "interrupted",
    }
}
