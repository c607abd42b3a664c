//! `pipeline cache ls`: the results.

use std::io::{self, Write};

use cache::listing::{ListedOutput, ListedResult, Listing};
use serde_json::json;

use super::{Opened, ago, timestamp};
use crate::render::Failure;
use crate::table::Table;
use crate::{Format, words};

/// Lists the results.
pub(super) fn run(opened: Option<&Opened>, format: Format) -> Result<(), Failure> {
    let listing = match opened {
        Some(opened) => opened.store.list().map_err(Failure::machine)?,
        None => Listing::default(),
    };
    match format {
        Format::Json => crate::print_json(&json!({
            "results": listing.results.iter().map(|result| result_json(result, opened)).collect::<Vec<_>>(),
            "objects": listing.objects,
            "object_bytes": listing.object_bytes,
            "outside": listing.outside,
            "outside_bytes": listing.outside_bytes,
            "partials": listing.partials,
            "partial_bytes": listing.partial_bytes,
        })),
        Format::Text => Ok(print(&listing, opened)?),
    }
}

fn print(listing: &Listing, opened: Option<&Opened>) -> io::Result<()> {
    let mut table = Table::new(["key", "stage", "stage kind", "outputs", "files", "size", "last used", "state"]);
    for result in &listing.results {
        let outputs: Vec<String> = result.outputs.iter().map(output_name).collect();
        let files: usize = result.outputs.iter().map(|output| output.files).sum();
        let complete = result.outputs.iter().all(|output| output.complete);
        table.row([
            result.key.short(),
            opened.map(|opened| opened.stages(&result.key)).unwrap_or_default(),
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
        write!(out, "{table}")?;
    }
    let results = words::plural(listing.results.len(), "result");
    let objects = words::plural(listing.objects as usize, "object");
    writeln!(out, "{results}, {objects}, {}", words::bytes(listing.object_bytes))?;
    if listing.outside > 0 {
        let files = words::plural(listing.outside as usize, "file");
        writeln!(out, "{files} outside the store, {}", words::bytes(listing.outside_bytes))?;
    }
    if listing.partials > 0 {
        let bytes = words::bytes(listing.partial_bytes);
        writeln!(out, "{} of working state, {bytes}", words::plural(listing.partials as usize, "folder"))?;
    }
    Ok(())
}

fn output_name(output: &ListedOutput) -> String {
    if output.name == output.kind { output.name.clone() } else { format!("{} ({})", output.name, output.kind) }
}

fn result_json(result: &ListedResult, opened: Option<&Opened>) -> serde_json::Value {
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
    json!({
        "key": result.key, "kind": result.kind, "bytes": result.bytes, "outputs": outputs,
        "stages": opened.map(|opened| opened.stages_json(&result.key)),
        "last_used": timestamp(result.last_use),
    })
}
