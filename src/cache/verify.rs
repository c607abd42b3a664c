//! `pipeline cache verify`: reads everything and compares it with its digest.

use std::io::{self, Write};
use std::sync::Mutex;

use cache::Digest;
use cache::verify::{Fault, VerifyProgress, VerifyReport};
use clap::Args;
use engine::history::StageOf;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use super::Opened;
use crate::progress::Verbosity;
use crate::render::{Exit, Failure};
use crate::terminal::Look;
use crate::{Format, words};

/// Read everything, compare it with its digest, and name damaged files and the results that use them.
///
/// Exits with 1 if something is damaged and not repaired, or cannot be read.
#[derive(Args)]
pub(super) struct VerifyArgs {
    /// Remove what is damaged and the results that need it, so that the next run rebuilds them.
    #[arg(long)]
    repair: bool,
}

/// Checks the store.
pub(super) fn run(
    args: &VerifyArgs,
    opened: Option<&Opened>,
    format: Format,
    verbosity: Verbosity,
) -> Result<(), Failure> {
    let report = match opened {
        Some(opened) => check(opened, verbosity)?,
        None => VerifyReport::default(),
    };
    let damaged = report.faults.iter().any(Fault::is_damage);
    let unreadable = report.faults.iter().any(Fault::is_unreadable);
    let repaired = damaged && args.repair;
    let repair = match opened {
        Some(opened) if repaired => opened.store.repair(&report.faults),
        _ => Ok(()),
    };
    let printed = match format {
        Format::Json => crate::print_json(&ReportView::of(&report, opened, repaired && repair.is_ok())),
        Format::Text => print(&report, opened, repaired && repair.is_ok()).map_err(Failure::from),
    };
    repair.map_err(Failure::machine)?;
    let failed = unreadable || damaged && !repaired;
    Failure::after(if failed { Exit::StageFailed } else { Exit::Done }, printed)
}

fn check(opened: &Opened, verbosity: Verbosity) -> Result<VerifyReport, Failure> {
    let bar = bar(verbosity);
    // The store calls from several threads, and their counts may arrive out of order.
    let most = Mutex::new(0);
    let show = |progress: VerifyProgress| {
        let mut most = most.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *most = progress.bytes.max(*most);
        bar.set_length(progress.total_bytes);
        bar.set_position(*most);
    };
    let report = opened.store.verify(&show).map_err(Failure::machine);
    bar.finish_and_clear();
    report
}

/// `pipeline/stage` of each result that suffers from a fault.
fn sufferers(fault: &Fault, opened: Option<&Opened>, look: Look) -> String {
    let Some(opened) = opened else { return String::new() };
    let mut stages: Vec<String> = fault.results().iter().map(|key| opened.stages(key, look)).collect();
    stages.retain(|stages| !stages.is_empty());
    stages.join(", ")
}

fn print(report: &VerifyReport, opened: Option<&Opened>, repaired: bool) -> io::Result<()> {
    let (mut out, look) = (crate::screen::stdout(), Look::stdout());
    for fault in &report.faults {
        match sufferers(fault, opened, look) {
            stages if stages.is_empty() => writeln!(out, "{fault}")?,
            stages => writeln!(out, "{fault} ({stages})")?,
        }
    }
    let VerifyReport { objects, trees, results, .. } = *report;
    let bytes = words::bytes(report.bytes);
    writeln!(out, "{objects} objects ({bytes}), {trees} trees and {results} results read")?;
    let changed = report.faults.iter().filter(|fault| matches!(fault, Fault::Outside { .. })).count();
    if report.outside > 0 {
        let (files, bytes) = (words::plural(report.outside as usize, "file"), words::bytes(report.outside_bytes));
        writeln!(out, "{files} ({bytes}) outside the store read, {changed} not as it was")?;
    }
    let unreadable = report.faults.iter().filter(|fault| fault.is_unreadable()).count();
    if unreadable > 0 {
        let files = words::plural(unreadable, "file");
        writeln!(out, "{files} of the store cannot be read; `--repair` leaves what it cannot read as it is")?;
    }
    match report.faults.iter().filter(|fault| fault.is_damage()).count() {
        0 if unreadable > 0 => writeln!(out, "nothing else is damaged"),
        0 if changed > 0 => {
            writeln!(out, "everything in the store is intact; the next run takes the files outside as they are now")
        }
        0 => writeln!(out, "everything is intact"),
        faults if repaired => {
            writeln!(out, "{}, removed; the next run rebuilds what it needs", words::plural(faults, "fault"))
        }
        faults => {
            let faults = words::plural(faults, "fault");
            writeln!(
                out,
                "{faults}; `pipeline cache verify --repair` removes them, and the next run rebuilds what it needs"
            )
        }
    }
}

/// What a check found, as a program reads it.
#[derive(Serialize)]
struct ReportView<'a> {
    objects: u64,
    bytes: u64,
    outside: u64,
    outside_bytes: u64,
    trees: u64,
    results: u64,
    faults: Vec<FaultView<'a>>,
    repaired: bool,
}

#[derive(Serialize)]
struct FaultView<'a> {
    message: String,
    damage: bool,
    /// Those that suffer from it.
    results: Vec<ResultView<'a>>,
}

#[derive(Serialize)]
struct ResultView<'a> {
    key: Digest,
    /// The stages that have it, where runs are recorded.
    stages: Option<Vec<&'a StageOf>>,
}

impl<'a> ReportView<'a> {
    fn of(report: &VerifyReport, opened: Option<&'a Opened>, repaired: bool) -> Self {
        let VerifyReport { objects, bytes, outside, outside_bytes, trees, results, ref faults } = *report;
        let faults = faults.iter().map(|fault| FaultView::of(fault, opened)).collect();
        Self { objects, bytes, outside, outside_bytes, trees, results, faults, repaired }
    }
}

impl<'a> FaultView<'a> {
    fn of(fault: &Fault, opened: Option<&'a Opened>) -> Self {
        let result = |key| ResultView { key, stages: opened.map(|opened| opened.stages_of(&key)) };
        let results = fault.results().into_iter().map(result).collect();
        Self { message: fault.to_string(), damage: fault.is_damage(), results }
    }
}

pub(super) fn bar(verbosity: Verbosity) -> ProgressBar {
    let look = Look::stderr();
    if !look.live || verbosity == Verbosity::Quiet {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:24} {bytes} of {total_bytes}, {eta} left")
        .expect("the template is well formed")
        .progress_chars(look.either("━╸╌", "=>."));
    ProgressBar::new(0).with_style(style)
}
