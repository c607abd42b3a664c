//! `pipeline cache gc`: makes room.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::time::Duration;

use cache::Digest;
use cache::gc::{Because, Collected, Policy, Removal, RemovedPartial, RemovedResult, Unpinned};
use clap::Args;
use engine::history::StageOf;
use engine::parameter::{ByteSize, Period};
use serde::Serialize;

use super::{Opened, ago, timestamp};
use crate::render::Failure;
use crate::table::Table;
use crate::terminal::Look;
use crate::{Format, words};

/// Free disk space: remove files that no result needs, working state of finished stages and, if a limit is given,
/// results.
///
/// Results in use by an active run are kept, and so are those behind published links (`link: symlink`), and with
/// `--keep-runs` those that the newest runs of each pipeline refer to. Without any limit no result is removed. With
/// only `--keep-runs` every other result is. `--max-size` first removes results that are large, quick to recompute and
/// long unused. Files of no result that are younger than an hour are kept, since a run may be about to record them;
/// those of results that are removed are not.
#[derive(Args)]
pub(super) struct GcArgs {
    /// Remove results until the store uses no more than this, such as `20GiB`.
    #[arg(long, value_name = "SIZE")]
    max_size: Option<ByteSize>,
    /// Remove results that no run has used for this long, such as `30d`.
    #[arg(long, value_name = "PERIOD")]
    older_than: Option<Period>,
    /// Keep what the newest runs of each pipeline produced or reused.
    #[arg(long, value_name = "COUNT")]
    keep_runs: Option<usize>,
    /// Keep the working state of finished stages that was written within this period, such as `7d`: a longer training
    /// continues from it.
    #[arg(long, value_name = "PERIOD")]
    keep_working_state: Option<Period>,
    /// Only print what would be removed.
    #[arg(long)]
    dry_run: bool,
}

/// Makes room.
pub(super) fn run(args: &GcArgs, opened: Option<&Opened>, format: Format) -> Result<(), Failure> {
    let removal = if args.dry_run { Removal::DryRun } else { Removal::Real };
    let collected = match opened {
        Some(opened) => opened.store.collect_garbage(&args.policy(opened), removal).map_err(Failure::machine)?,
        None => Collected::default(),
    };
    tell(&collected, opened, removal, format)
}

impl GcArgs {
    fn policy(&self, opened: &Opened) -> Policy {
        let limited = self.max_size.is_some() || self.older_than.is_some();
        Policy {
            pinned: self.keep_runs.map_or_else(BTreeSet::new, |count| opened.references.of_newest_runs(count)),
            unpinned: if self.keep_runs.is_some() && !limited { Unpinned::Remove } else { Unpinned::Keep },
            older_than: self.older_than.map(|period| period.0),
            max_bytes: self.max_size.map(|size| size.0),
            seconds: opened.references.seconds.clone(),
            finished_partials: self.keep_working_state.map_or(Duration::ZERO, |period| period.0),
            ..Policy::default()
        }
    }
}

/// What was removed, or would be, as a program reads it.
#[derive(Serialize)]
struct CollectedView<'a> {
    dry_run: bool,
    results: Vec<ResultView<'a>>,
    partials: Vec<PartialView<'a>>,
    trees: usize,
    objects: usize,
    freed_bytes: u64,
    left_bytes: u64,
    kept_in_use: usize,
    kept_pinned: usize,
    /// Files of no result that are younger than an hour.
    kept_young: usize,
    kept_young_bytes: u64,
}

#[derive(Serialize)]
struct ResultView<'a> {
    key: &'a Digest,
    kind: &'a str,
    bytes: u64,
    seconds: Option<f64>,
    last_used: String,
    why: &'static str,
    /// The stages that had it, where runs are recorded.
    stages: Option<Vec<&'a StageOf>>,
}

/// Working state.
#[derive(Serialize)]
struct PartialView<'a> {
    key: &'a Digest,
    bytes: u64,
    written: String,
}

/// Says what was removed, or would be.
pub(super) fn tell(
    collected: &Collected,
    opened: Option<&Opened>,
    removal: Removal,
    format: Format,
) -> Result<(), Failure> {
    match format {
        Format::Json => crate::print_json(&CollectedView::of(collected, opened, removal)),
        Format::Text => Ok(print(collected, opened, removal)?),
    }
}

fn print(collected: &Collected, opened: Option<&Opened>, removal: Removal) -> io::Result<()> {
    let mut out = crate::screen::stdout();
    let look = Look::stdout();
    let table = table(collected, opened, look);
    if !table.is_empty() {
        writeln!(out, "{}", table.fitted(look))?;
    }
    lines(collected, removal).iter().try_for_each(|line| writeln!(out, "{}", look.wrap(line, 2)))
}

fn table(collected: &Collected, opened: Option<&Opened>, look: Look) -> Table {
    let mut table = Table::new(["key", "stage", "stage kind", "size", "took", "last used", "why"])
        .shortening(["stage", "stage kind"])
        .sparing(["took", "last used", "stage kind"]);
    for result in &collected.results {
        table.row([
            result.key.short(),
            opened.map(|opened| opened.stages(&result.key, look)).unwrap_or_default(),
            result.kind.clone(),
            words::bytes(result.bytes),
            result.seconds.map(words::seconds).unwrap_or_default(),
            ago(result.last_use),
            why(result.because).to_owned(),
        ]);
    }
    for RemovedPartial { key, bytes, written } in &collected.partials {
        let (key, bytes, written) = (key.short(), words::bytes(*bytes), ago(*written));
        table.row([&key, "", "working state", &bytes, "", &written, ""]);
    }
    table
}

/// What is said below the table, a sentence each.
fn lines(collected: &Collected, removal: Removal) -> Vec<String> {
    let verb = match removal {
        Removal::Real => "removed",
        Removal::DryRun => "would remove",
    };
    let Collected { objects, freed_bytes, left_bytes, pinned, in_use, young_objects, young_bytes, .. } = *collected;
    let removed = [
        words::plural(collected.results.len(), "result"),
        words::plural(collected.partials.len(), "folder") + " of working state",
        words::plural(objects, "file"),
    ];
    let (freed, left) = (words::bytes(freed_bytes), words::bytes(left_bytes));
    let mut lines = vec![format!("{verb} {}: {freed} freed, {left} left", removed.join(", "))];
    if in_use > 0 {
        lines.push(format!("{} would be removed too, but a run uses them", words::plural(in_use, "result")));
    }
    if pinned > 0 {
        let kept = words::plural(pinned, "result");
        lines.push(format!("{kept} kept: of the newest runs, or reached by published links"));
    }
    if young_objects > 0 {
        let (files, size) = (words::plural(young_objects, "file"), words::bytes(young_bytes));
        let (are, stay) = if young_objects == 1 { ("is", "stays") } else { ("are", "stay") };
        lines.push(format!("{files} of no result ({size}) {are} younger than an hour and {stay}"));
    }
    lines
}

fn why(because: Because) -> &'static str {
    match because {
        Because::Unpinned => "not of the newest runs",
        Because::Old => "unused for long",
        Because::Room => "to make room",
        Because::Requested => "requested",
    }
}

impl<'a> CollectedView<'a> {
    fn of(collected: &'a Collected, opened: Option<&'a Opened>, removal: Removal) -> Self {
        let result = |RemovedResult { key, kind, bytes, seconds, last_use, because }: &'a RemovedResult| ResultView {
            key,
            kind,
            bytes: *bytes,
            seconds: *seconds,
            last_used: timestamp(*last_use),
            why: why(*because),
            stages: opened.map(|opened| opened.stages_of(key)),
        };
        let partial = |RemovedPartial { key, bytes, written }: &'a RemovedPartial| PartialView {
            key,
            bytes: *bytes,
            written: timestamp(*written),
        };
        Self {
            dry_run: removal == Removal::DryRun,
            results: collected.results.iter().map(result).collect(),
            partials: collected.partials.iter().map(partial).collect(),
            trees: collected.trees,
            objects: collected.objects,
            freed_bytes: collected.freed_bytes,
            left_bytes: collected.left_bytes,
            kept_in_use: collected.in_use,
            kept_pinned: collected.pinned,
            kept_young: collected.young_objects,
            kept_young_bytes: collected.young_bytes,
        }
    }
}
