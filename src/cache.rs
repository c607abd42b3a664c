//! `pipeline cache`: what the store holds, and whether it is intact.

use std::io::{self, Write};
use std::sync::Mutex;

use cache::Store;
use cache::listing::{ListedOutput, ListedResult, Listing};
use cache::verify::{Fault, VerifyProgress, VerifyReport};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::progress::Verbosity;
use crate::render::{Exit, Failure};
use crate::table::Table;
use crate::terminal::Look;
use crate::{Format, Global, words};

/// Look at the store of results.
#[derive(Args)]
pub struct CacheArgs {
    #[command(subcommand)]
    command: CacheCommand,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t, global = true)]
    format: Format,
}

#[derive(Subcommand)]
enum CacheCommand {
    /// List the results and the room they take.
    Ls,
    /// Read everything, compare it with its digest and remove what is damaged; ends with 1 where something was.
    Verify,
}

/// Lists or checks the store.
pub fn run(args: &CacheArgs, global: &Global) -> Result<(), Failure> {
    let Some(home) = global.home_here() else {
        return match args.command {
            CacheCommand::Ls => list(&Listing::default(), args.format),
            CacheCommand::Verify => tell(&VerifyReport::default(), args.format),
        };
    };
    let store = Store::open(home.store()).map_err(Failure::machine)?;
    match args.command {
        CacheCommand::Ls => list(&store.list().map_err(Failure::machine)?, args.format),
        CacheCommand::Verify => verify(&store, args.format, global.verbosity()),
    }
}

fn list(listing: &Listing, format: Format) -> Result<(), Failure> {
    if format == Format::Json {
        return crate::print_json(&json!({
            "results": listing.results.iter().map(result_json).collect::<Vec<_>>(),
            "objects": listing.objects,
            "object_bytes": listing.object_bytes,
            "partials": listing.partials,
            "partial_bytes": listing.partial_bytes,
        }));
    }
    let mut table = Table::new(["key", "stage kind", "outputs", "files", "size", "state"]);
    for result in &listing.results {
        let outputs: Vec<String> = result.outputs.iter().map(output_name).collect();
        let files: usize = result.outputs.iter().map(|output| output.files).sum();
        let complete = result.outputs.iter().all(|output| output.complete);
        table.row([
            result.key.short(),
            result.kind.clone(),
            outputs.join(", "),
            files.to_string(),
            words::bytes(result.bytes),
            if complete { "complete" } else { "incomplete" }.to_owned(),
        ]);
    }
    let mut out = io::stdout().lock();
    if !table.is_empty() {
        write!(out, "{table}")?;
    }
    let results = words::plural(listing.results.len(), "result");
    let objects = words::plural(listing.objects as usize, "object");
    writeln!(out, "{results}, {objects}, {}", words::bytes(listing.object_bytes))?;
    if listing.partials > 0 {
        let bytes = words::bytes(listing.partial_bytes);
        writeln!(out, "{} of working state, {bytes}", words::plural(listing.partials as usize, "folder"))?;
    }
    Ok(())
}

fn output_name(output: &ListedOutput) -> String {
    if output.name == output.kind { output.name.clone() } else { format!("{} ({})", output.name, output.kind) }
}

fn result_json(result: &ListedResult) -> serde_json::Value {
    let outputs: Vec<_> = result
        .outputs
        .iter()
        .map(|output| {
            json!({
                "name": output.name, "kind": output.kind, "tree": output.tree,
                "files": output.files, "bytes": output.bytes, "complete": output.complete,
            })
        })
        .collect();
    json!({ "key": result.key, "kind": result.kind, "bytes": result.bytes, "outputs": outputs })
}

fn verify(store: &Store, format: Format, verbosity: Verbosity) -> Result<(), Failure> {
    let bar = bar(verbosity);
    // The store calls from several threads, and their counts may arrive out of order.
    let most = Mutex::new(0);
    let show = |progress: VerifyProgress| {
        let mut most = most.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *most = progress.bytes.max(*most);
        bar.set_length(progress.total_bytes);
        bar.set_position(*most);
    };
    let report = store.verify(&show).map_err(Failure::machine)?;
    bar.finish_and_clear();
    // That a result is there is decided by lengths alone: only once a damaged object is gone does a run make it again.
    let removed = report.faults.iter().try_for_each(|fault| match fault {
        Fault::CorruptObject { digest, .. } => store.evict(digest),
        _ => Ok(()),
    });
    let told = tell(&report, format);
    removed.map_err(Failure::machine)?;
    told
}

fn tell(report: &VerifyReport, format: Format) -> Result<(), Failure> {
    let printed = match format {
        Format::Json => crate::print_json(&report_json(report)),
        Format::Text => print_report(report).map_err(Failure::from),
    };
    Failure::after(if report.faults.is_empty() { Exit::Done } else { Exit::StageFailed }, printed)
}

fn print_report(report: &VerifyReport) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for fault in &report.faults {
        writeln!(out, "{fault}")?;
    }
    let VerifyReport { objects, trees, results, .. } = *report;
    let bytes = words::bytes(report.bytes);
    writeln!(out, "{objects} objects ({bytes}), {trees} trees and {results} results read")?;
    match report.faults.len() {
        0 => writeln!(out, "everything is intact"),
        faults => writeln!(out, "faults: {faults}; the next run makes again what it needs of them"),
    }
}

fn report_json(report: &VerifyReport) -> serde_json::Value {
    json!({
        "objects": report.objects,
        "bytes": report.bytes,
        "trees": report.trees,
        "results": report.results,
        "faults": report.faults.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn bar(verbosity: Verbosity) -> ProgressBar {
    let look = Look::stderr();
    if !look.live || verbosity == Verbosity::Quiet {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:24} {bytes} of {total_bytes}, {eta} left")
        .expect("the template is well formed")
        .progress_chars(look.either("━╸╌", "=>."));
    ProgressBar::new(0).with_style(style)
}
