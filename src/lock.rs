//! `pipeline lock`: what the branches and tags that a pipeline names are, written down or looked up anew.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use engine::lock_file::{self, Change, LockFile, Pinning};
use engine::pin::Pinned;
use engine::plan::Plan;
use serde::Serialize;

use crate::render::{self, Exit, Failure};
use crate::{Format, Global, terminal, words};

/// Pin what pipelines read from hubs, in `pipeline.lock`: the commit of each branch or tag, and the files there.
///
/// Without an option, resolves and adds what is not pinned yet. Only listings are fetched.
#[derive(Args)]
pub(crate) struct LockArgs {
    /// The pipeline files.
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Resolve existing pins again: all, or the given names (`owner/name`, `owner/name@revision`).
    #[arg(long, value_name = "NAME", num_args = 0.., value_delimiter = ',')]
    upgrade: Option<Vec<String>>,
    /// Change nothing, and exit with 1 if something would change. Without `--upgrade`, uses no network.
    #[arg(long)]
    check: bool,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// What was changed, or would be.
#[derive(Serialize)]
struct Outcome {
    /// Whether nothing was to be changed.
    check: bool,
    changes: Vec<Change>,
    /// The names of what is not pinned.
    missing: Vec<String>,
}

/// Pins what is to be pinned.
pub(crate) fn run(args: &LockArgs, global: &Global) -> Result<(), Failure> {
    let registry = stages::registry();
    let mut outcome = Outcome { check: args.check, changes: Vec::new(), missing: Vec::new() };
    let mut known = false;
    for file in &args.files {
        let plan = engine::plan::load(file, &[], &registry)?;
        render::warnings(&plan.sources, &plan.warnings, global.verbosity());
        let home = global.home(file)?;
        let mut lock = LockFile::read(&home.lock_file())?;
        known |= names_are_known(&plan, args.upgrade.as_deref());
        let changes = match (&args.upgrade, args.check) {
            (None, true) => {
                let missing = lock.missing(&plan).into_iter();
                outcome.missing.extend(missing.map(|(_, request)| lock_file::name(&request)));
                Vec::new()
            }
            (None, false) => lock.resolve(&plan, &registry, Pinning::Resolve)?,
            (Some(names), check) => {
                let changes = lock.outdated(&plan, &registry, names)?;
                if !check && !changes.is_empty() {
                    lock.accept(&changes)?;
                }
                changes
            }
        };
        outcome.changes.extend(changes);
    }
    if let (false, Some(names)) = (known, &args.upgrade) {
        let failure = Failure::wrong(format!("nothing that is read from a hub is called {}", names.join(" or ")));
        return Err(failure.with_help("a name is `owner/name` or `owner/name@revision`, as in `pipeline.lock`"));
    }
    let found = args.check && !(outcome.changes.is_empty() && outcome.missing.is_empty());
    let printed = match args.format {
        Format::Json => crate::print_json(&outcome),
        Format::Text => print(&outcome),
    };
    Failure::after(if found { Exit::StageFailed } else { Exit::Done }, printed)
}

/// Whether the names given, if any are, mean something that the plan reads.
fn names_are_known(plan: &Plan, names: Option<&[String]>) -> bool {
    let wanted = lock_file::wanted(plan);
    let is_known = |name: &String| wanted.iter().any(|(_, request)| lock_file::is_meant(name, request));
    names.is_none_or(|names| names.is_empty() || names.iter().any(is_known))
}

fn print(Outcome { check, changes, missing }: &Outcome) -> Result<(), Failure> {
    let mut out = crate::screen::stdout();
    for Change { pin, old, new } in changes {
        let old = old.as_ref().map_or_else(|| "(not pinned)".to_owned(), short);
        writeln!(out, "{pin}: {old} → {}", short(new))?;
    }
    for pin in missing {
        writeln!(out, "{pin}: not pinned")?;
    }
    let would = if *check { "would change" } else { "changed" };
    match (changes.len(), missing.len()) {
        (0, 0) => terminal::tell_line("pipeline.lock is up to date"),
        (changed, missing) => {
            let entries = words::plural(changed + missing, "entry").replace("entrys", "entries");
            terminal::tell_line(format_args!("pipeline.lock: {entries} {would}"));
        }
    }
    Ok(())
}

/// `0e9e39f249a1 (12 files)`.
fn short(pinned: &Pinned) -> String {
    let commit: String = pinned.commit.chars().take(12).collect();
    match pinned.files.len() {
        0 => commit,
        files => format!("{commit} ({})", words::plural(files, "file")),
    }
}
