//! `pipeline cache ls`: the results.

use std::io::{self, Write};

use cache::Digest;
use cache::listing::{ListedOutput, ListedResult, Listing};
use engine::history::StageOf;
use serde::Serialize;

use super::{Opened, ago, timestamp};
use crate::render::Failure;
use crate::table::Table;
use crate::terminal::{self, Look};
use crate::{Format, words};

/// The results, as a program reads them.
#[derive(Serialize)]
struct ListingView<'a> {
    results: Vec<ResultView<'a>>,
    objects: u64,
    object_bytes: u64,
    outside: u64,
    outside_bytes: u64,
    partials: u64,
    partial_bytes: u64,
}

#[derive(Serialize)]
struct ResultView<'a> {
    key: &'a Digest,
    kind: &'a str,
    bytes: u64,
    outputs: &'a [ListedOutput],
    /// The stages that have it, where runs are recorded.
    stages: Option<Vec<&'a StageOf>>,
    last_used: String,
}

impl<'a> ListingView<'a> {
    fn of(listing: &'a Listing, opened: Option<&'a Opened>) -> Self {
        let Listing { results, objects, object_bytes, outside, outside_bytes, partials, partial_bytes, .. } = listing;
        let result = |ListedResult { key, kind, outputs, bytes, last_use }: &'a ListedResult| ResultView {
            key,
            kind,
            bytes: *bytes,
            outputs,
            stages: opened.map(|opened| opened.stages_of(key)),
            last_used: timestamp(*last_use),
        };
        Self {
            results: results.iter().map(result).collect(),
            objects: *objects,
            object_bytes: *object_bytes,
            outside: *outside,
            outside_bytes: *outside_bytes,
            partials: *partials,
            partial_bytes: *partial_bytes,
        }
    }
}

/// Lists the results.
pub(super) fn run(opened: Option<&Opened>, format: Format) -> Result<(), Failure> {
    let listing = match opened {
        Some(opened) => opened.store.list().map_err(Failure::machine)?,
        None => Listing::default(),
    };
    if let Some((path, reason)) = listing.unreadable.first() {
        let records = words::plural(listing.unreadable.len(), "record");
        let first = path.display();
        terminal::tell_line(format_args!(
            "warning: {records} of results cannot be read and not listed: `{first}`: {reason}"
        ));
    }
    match format {
        Format::Json => crate::print_json(&ListingView::of(&listing, opened)),
        Format::Text => Ok(print(&listing, opened)?),
    }
}

fn print(listing: &Listing, opened: Option<&Opened>) -> io::Result<()> {
    let look = Look::stdout();
    let mut table = Table::new(["key", "stage", "stage kind", "outputs", "files", "size", "last used", "state"])
        .shortening(["stage", "stage kind", "outputs"])
        .sparing(["outputs", "files", "stage kind", "last used"]);
    for result in &listing.results {
        let outputs: Vec<String> = result.outputs.iter().map(output_name).collect();
        let files: usize = result.outputs.iter().map(|output| output.files).sum();
        let complete = result.outputs.iter().all(|output| output.complete);
        table.row([
            result.key.short(),
            opened.map(|opened| opened.stages(&result.key, look)).unwrap_or_default(),
            result.kind.clone(),
            outputs.join(", "),
            files.to_string(),
            words::bytes(result.bytes),
            ago(result.last_use),
            if complete { "complete" } else { "incomplete" }.to_owned(),
        ]);
    }
    let mut out = crate::screen::stdout();
    if !table.is_empty() {
        write!(out, "{}", table.fitted(look))?;
    }
    let results = words::plural(listing.results.len(), "result");
    let objects = words::plural(listing.objects as usize, "object");
    let all = format!("{results}, {objects}, {}", words::bytes(listing.object_bytes));
    writeln!(out, "{}", look.wrap(&all, 2))?;
    if listing.outside > 0 {
        let files = words::plural(listing.outside as usize, "file");
        let outside = format!("{files} outside the store, {}", words::bytes(listing.outside_bytes));
        writeln!(out, "{}", look.wrap(&outside, 2))?;
    }
    if listing.partials > 0 {
        let folders = words::plural(listing.partials as usize, "folder");
        let working_state = format!("{folders} of working state, {}", words::bytes(listing.partial_bytes));
        writeln!(out, "{}", look.wrap(&working_state, 2))?;
    }
    Ok(())
}

fn output_name(output: &ListedOutput) -> String {
    if output.name == output.kind { output.name.clone() } else { format!("{} ({})", output.name, output.kind) }
}
