//! `pipeline runs verify`: does stages of a run again and compares what comes out.

use std::collections::BTreeSet;
use std::io::{self, Write};

use clap::Args;
use engine::history::{DifferentFile, DifferentOutput, Verdict, Verification, Verified, Words};
use serde::Serialize;

use super::show::stages_of;
use super::{LATEST, Past};
use crate::progress::Verbosity;
use crate::render::{Exit, Failure};
use crate::table::width;
use crate::{Format, Global, terminal, words};

/// Recompute stages of a run, outside the store, and compare the results with what was recorded.
///
/// Without stages, those that the run executed, but for those that fetch from a server. Exits with 1 if anything
/// differs, or a record or a stored file was changed.
#[derive(Args)]
pub(super) struct VerifyArgs {
    /// The run.
    #[arg(default_value = LATEST)]
    run: String,
    /// Stages to recompute; of a stage that is swept, all its children, or those with some values.
    #[arg(value_name = "STAGE")]
    stages: Vec<String>,
    /// Threads for each stage [default: as many as it had, since their number may change the last bits].
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What came out, as a program reads it.
#[derive(Serialize)]
struct VerifiedView<'a> {
    run: &'a str,
    /// Whether everything is as it was recorded.
    sound: bool,
    stages: &'a [Verified],
}

/// Checks the run.
pub(super) fn run(args: &VerifyArgs, global: &Global) -> Result<(), Failure> {
    let past = Past::open(global)?;
    let summary = past.find(&args.run)?;
    let recorded = past.recorded(&summary.run, Words::Skip)?;
    let mut named = Vec::new();
    for name in &args.stages {
        named.extend(stages_of(&recorded, name)?.into_iter().map(|stage| stage.summary.stage.clone()));
    }
    let mut seen = BTreeSet::new();
    named.retain(|stage| seen.insert(stage.clone()));
    let registry = stages::registry();
    let verification = Verification {
        home: &past.home,
        history: &past.history,
        store: &past.store,
        registry: &registry,
        run: &recorded,
        threads: args.threads.map(usize::from),
        describe: &stages::view::difference::in_words,
    };
    let chosen = if args.stages.is_empty() { verification.executed() } else { named };
    if chosen.is_empty() {
        return Err(Failure::wrong(format!("run {} executed no stage that could be done again", summary.run))
            .with_help("name stages: a cached one is checked against the run that made its result"));
    }
    let quiet = global.verbosity() == Verbosity::Quiet;
    let verified = verification.verify(&chosen, |stage| {
        if !quiet {
            terminal::tell_line(format_args!("{stage}: doing it again"));
        }
    });
    let verified = verified.map_err(Failure::machine)?;
    let printed = match args.format {
        Format::Json => crate::print_json(&VerifiedView {
            run: &summary.run,
            sound: verified.iter().all(Verified::is_sound),
            stages: &verified,
        }),
        Format::Text => print(&mut crate::screen::stdout(), &verified).map_err(Failure::from),
    };
    let refuted = verified.iter().any(Verified::is_refuted);
    Failure::after(if refuted { Exit::StageFailed } else { Exit::Done }, printed)
}

fn print(out: &mut dyn Write, verified: &[Verified]) -> io::Result<()> {
    let widest = verified.iter().map(|stage| width(&stage.stage)).max().unwrap_or(0);
    for stage in verified {
        let padding = " ".repeat(widest - width(&stage.stage));
        writeln!(out, "{}{padding}  {}", stage.stage, verdict(&stage.verdict))?;
        let details = stage.tampered.iter().map(|what| format!("changed: {what}"));
        let made_by = stage.made_by.iter().map(|run| format!("made by run {run}"));
        for line in details.chain(made_by).chain(stage.notes.iter().map(|note| format!("note: {note}"))) {
            writeln!(out, "  {line}")?;
        }
        if let Verdict::Differs { outputs, .. } = &stage.verdict {
            outputs.iter().try_for_each(|output| print_output(out, output))?;
        }
    }
    let equal = verified.iter().filter(|stage| stage.is_sound()).count();
    writeln!(out, "\n{equal} of {} came out the same, to the bit", words::plural(verified.len(), "stage"))
}

fn verdict(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Equal { seconds } => format!("equal, 0 bytes differ (in {})", words::seconds(*seconds)),
        Verdict::Differs { seconds, .. } => format!("differs (in {})", words::seconds(*seconds)),
        Verdict::Failed { messages } => format!("failed: {}", messages.join(": ")),
        Verdict::NotRun { because } => format!("not done again: {because}"),
    }
}

fn print_output(out: &mut dyn Write, output: &DifferentOutput) -> io::Result<()> {
    let identity = if output.same_identity { ", with the same content" } else { "" };
    writeln!(out, "  output {} differs{identity}", output.output)?;
    if !output.same_facts {
        writeln!(out, "    the facts about it differ")?;
    }
    for DifferentFile { path, recorded, now, how } in &output.files {
        let what = match (recorded, now, how) {
            (Some(_), Some(_), Some(how)) => how.clone(),
            (Some(old), Some(new), None) => format!("{} → {}", old.short(), new.short()),
            (Some(_), None, _) => "is gone".to_owned(),
            (None, Some(new), _) => format!("is new, or its record is gone ({})", new.short()),
            (None, None, _) => continue,
        };
        writeln!(out, "    {path}: {what}")?;
    }
    Ok(())
}
