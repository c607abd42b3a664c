//! `pipeline runs show`: what happened in a run, or to one of its stages.

use std::io::{self, Write};

use clap::Args;
use engine::history::{Recorded, RecordedStage, Words};
use engine::run::clock::Moment;

use super::stage::{StageStory, print_attempts};
use super::{LATEST, Past, state};
use crate::render::Failure;
use crate::table::{Table, list};
use crate::terminal::Look;
use crate::{Format, Global, locate, words};

pub(super) use crate::locate::stages_of_run as stages_of;

/// Show what happened in a run: its stages, why each ran, why those that failed did. With a stage, all about that one.
#[derive(Args)]
pub(super) struct ShowArgs {
    /// The run.
    #[arg(default_value = LATEST)]
    run: String,
    /// A stage of it, or a child of a sweep by its values, in any order.
    stage: Option<String>,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Shows the run or the stage.
pub(super) fn run(args: &ShowArgs, global: &Global) -> Result<(), Failure> {
    let past = Past::open(global)?;
    let summary = past.find(&args.run)?;
    let recorded = past.recorded(&summary.run, Words::Read)?;
    let out = &mut crate::screen::stdout();
    match &args.stage {
        Some(id) => {
            let stage = locate::stage_of_run(&recorded, id)?;
            let story = StageStory::of(&past, &recorded, stage)?;
            match args.format {
                Format::Json => crate::print_json(&story.view()),
                Format::Text => Ok(story.print(out)?),
            }
        }
        None if args.format == Format::Json => crate::print_json(&recorded.view()),
        None => print(out, &past, &recorded),
    }
}

/// The stage of an id in a run.
///
/// # Errors
/// Fails where there is none, and names the nearest.
pub(crate) fn stage_of<'a>(recorded: &'a Recorded, id: &str) -> Result<&'a RecordedStage, Failure> {
    recorded.stage(id).ok_or_else(|| {
        let ids: Vec<&str> = recorded.stages.iter().map(|stage| stage.summary.stage.as_str()).collect();
        locate::unknown_stage(id, &ids)
    })
}

fn print(out: &mut dyn Write, past: &Past, recorded: &Recorded) -> Result<(), Failure> {
    heading(out, recorded)?;
    let mut some_took_earlier = false;
    // `runs show RUN STAGE` prints what is left out.
    let mut table = Table::new(["stage", "kind", "state", "took", "peak memory", "key"])
        .shortening(["stage"])
        .sparing(["key", "peak memory", "kind"]);
    for RecordedStage { summary, .. } in &recorded.stages {
        let (mut took, mut memory) = (summary.seconds, summary.peak_memory_bytes);
        let mut shown: fn(Option<String>) -> String = Option::unwrap_or_default;
        if let (None, Some(key)) = (took, summary.key)
            && let Some(made) = past.made(&key)?
        {
            let figure = |name: &str| made.record.how.get(name)?.as_f64();
            (took, memory) = (figure("seconds"), figure("peak_memory_bytes").map(|bytes| bytes as u64));
            shown = |text| text.map(|text| format!("({text})")).unwrap_or_default();
            some_took_earlier |= took.is_some();
        }
        table.row([
            summary.stage.clone(),
            summary.kind.clone(),
            summary.status.clone(),
            shown(took.map(words::seconds)),
            shown(memory.map(words::bytes)),
            summary.key.map(|key| key.short()).unwrap_or_default(),
        ]);
    }
    let look = Look::stdout();
    write!(out, "\n{}", table.fitted(look))?;
    if some_took_earlier {
        writeln!(out, "(in brackets: what it took when it was made)")?;
    }
    reasons(out, recorded)?;
    for stage in &recorded.stages {
        print_attempts(out, stage)?;
    }
    if !recorded.gates.is_empty() {
        writeln!(out, "\ngates\n{}", crate::figures::gates(&recorded.gates, look).trim_end())?;
    }
    for copy in &recorded.published {
        let path = words::path(&copy.path);
        let became = match &copy.failed {
            None => format!("is in {path}"),
            Some(messages) => format!("could not be published to {path}: {}", messages.join(": ")),
        };
        writeln!(out, "\n{}", look.wrap(&format!("{}.{} {became}", copy.stage, copy.output), 2))?;
    }
    let profiled = recorded.profiled();
    if !profiled.is_empty() {
        let run = &recorded.summary.run;
        let where_to_look = format!("where the time of {} went: `pipeline runs profile {run}`", profiled.join(", "));
        writeln!(out, "\n{}", look.wrap(&where_to_look, 2))?;
    }
    for trace in recorded.traces() {
        writeln!(out, "{}", look.wrap(&format!("trace: {}", words::path(&trace)), 2))?;
    }
    Ok(())
}

/// Which run it is, how it stands, and where it ran.
fn heading(out: &mut dyn Write, recorded: &Recorded) -> io::Result<()> {
    let (summary, program, host) = (&recorded.summary, &recorded.program, &recorded.host);
    let title = format!("run {} of `{}` ({})", summary.run, summary.pipeline, words::path(&summary.file));
    let look = Look::stdout();
    writeln!(out, "{}", look.paint("1", &look.wrap(&title, 2)))?;
    let took = summary.seconds.map(|seconds| format!(" after {}", words::seconds(seconds))).unwrap_or_default();
    let ago = Moment::parse(&summary.started).map(|started| words::ago(Moment::now().since(started)));
    let ago = ago.map(|ago| format!(" ({ago})")).unwrap_or_default();
    let how = format!("{}{took}, started {}{ago}", state(summary.state), summary.started);
    writeln!(out, "{}", look.wrap(&how, 2))?;
    if summary.damaged_lines > 0 {
        let lines = words::plural(summary.damaged_lines, "line");
        let damaged = format!("{lines} of its record cannot be read: it was cut off while it was written");
        writeln!(out, "{}", look.wrap(&damaged, 2))?;
    }
    let machine = [host.name.clone(), host.processor.clone(), cores(host.cores), host.system.clone()];
    let memory = host.memory_bytes.map(|bytes| format!("{} of memory", words::bytes(bytes)));
    let machine: Vec<String> = machine.into_iter().chain(memory).filter(|word| !word.is_empty()).collect();
    match machine.is_empty() {
        true => writeln!(out, "pipeline {program}"),
        false => {
            writeln!(out, "{}", look.wrap(&format!("pipeline {program} on {}", machine.join(", ")), 2))
        }
    }
}

fn cores(count: usize) -> String {
    if count == 0 { String::new() } else { words::plural(count, "core") }
}

/// Why each stage ran or was skipped, one reason a line.
fn reasons(out: &mut dyn Write, recorded: &Recorded) -> io::Result<()> {
    let mut lines = Vec::new();
    for stage in recorded.stages.iter() {
        let names = std::iter::once(stage.summary.stage.clone()).chain(std::iter::repeat(String::new()));
        lines.extend(names.zip(stage.why.iter().map(ToString::to_string)));
    }
    if !lines.is_empty() {
        write!(out, "\nwhy\n{}", list(&lines, Look::stdout()))?;
    }
    Ok(())
}
