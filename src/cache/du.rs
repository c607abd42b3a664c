//! `pipeline cache du`: what takes how much room.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use cache::census::{Census, CountedResult, Usage};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::Opened;
use crate::render::Failure;
use crate::table::Table;
use crate::{Format, words};

/// Show disk usage: by stage, by pipeline or by stage kind.
///
/// A file that several results share is stored once. `size` counts it for each group; `own` counts what only that
/// group's results use: the space that removing all of them would free.
#[derive(Args)]
pub(super) struct DuArgs {
    /// What to add up.
    #[arg(long, value_enum, default_value_t)]
    by: By,
}

/// How results are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum By {
    /// By pipeline and stage.
    #[default]
    Stage,
    /// By pipeline.
    Pipeline,
    /// By the kind of stage that made them.
    Kind,
}

/// What stands for a result that no recorded run knows.
const NO_RUN: &str = "(in no recorded run)";

/// Shows it.
pub(super) fn run(args: &DuArgs, opened: Option<&Opened>, format: Format) -> Result<(), Failure> {
    let (census, groups) = args.by.usage(opened)?;
    match format {
        Format::Json => crate::print_json(&as_json(&census, &groups)),
        Format::Text => Ok(print(&census, &groups, args.by)?),
    }
}

/// By pipeline and stage, as a program reads it.
pub(super) fn usage(opened: Option<&Opened>) -> Result<Value, Failure> {
    let (census, groups) = By::Stage.usage(opened)?;
    Ok(as_json(&census, &groups))
}

impl By {
    /// What there is, and who uses how much of it, the largest first.
    fn usage(self, opened: Option<&Opened>) -> Result<(Census, Vec<(String, Usage)>), Failure> {
        let census = match opened {
            Some(opened) => opened.store.census().map_err(Failure::machine)?,
            None => Census::default(),
        };
        let groups = by_size(census.usage(|result| self.groups(result, opened)));
        Ok((census, groups))
    }

    fn groups(self, result: &CountedResult, opened: Option<&Opened>) -> BTreeSet<String> {
        let stages = opened.into_iter().flat_map(|opened| opened.references.stages_of(&result.key));
        let groups: BTreeSet<String> = match self {
            Self::Kind => [result.kind.clone()].into(),
            Self::Pipeline => stages.map(|stage| stage.pipeline.clone()).collect(),
            Self::Stage => stages.map(|stage| format!("{}/{}", stage.pipeline, stage.stage)).collect(),
        };
        if groups.is_empty() { [NO_RUN.to_owned()].into() } else { groups }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Stage => "stage",
            Self::Pipeline => "pipeline",
            Self::Kind => "stage kind",
        }
    }
}

/// The largest first.
fn by_size(groups: BTreeMap<String, Usage>) -> Vec<(String, Usage)> {
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, usage)| std::cmp::Reverse((usage.bytes, usage.own_bytes)));
    groups
}

fn print(census: &Census, groups: &[(String, Usage)], by: By) -> io::Result<()> {
    let mut out = crate::screen::stdout();
    let mut table = Table::new([by.title(), "results", "size", "own", "took"]);
    for (group, usage) in groups {
        let took = if usage.seconds > 0.0 { words::seconds(usage.seconds) } else { String::new() };
        let (size, own) = (words::bytes(usage.bytes), words::bytes(usage.own_bytes));
        table.row([group.clone(), usage.results.to_string(), size, own, took]);
    }
    if !table.is_empty() {
        writeln!(out, "{table}")?;
    }
    let mut totals = Table::new(["", "number", "size"]);
    let mut total =
        |name: &str, number: usize, bytes: u64| totals.row([name, &number.to_string(), &words::bytes(bytes)]);
    let (unheld, unheld_bytes) = census.unheld();
    total("files of results", census.objects.len() - unheld, census.object_bytes() - unheld_bytes);
    total("files of no result", unheld, unheld_bytes);
    total("working state", census.partials.len(), census.partial_bytes());
    total("records and lists", census.results.len() + census.trees.len(), list_bytes(census));
    writeln!(out, "{totals}")?;
    let (outside, outside_bytes) = census.outside();
    if outside > 0 {
        let files = words::plural(outside, "file");
        writeln!(out, "{files} ({}) of results outside the store, in none of these", words::bytes(outside_bytes))?;
    }
    if census.staging_bytes > 0 {
        writeln!(out, "{} in the making", words::bytes(census.staging_bytes))?;
    }
    writeln!(out, "{} in all", words::bytes(all_bytes(census)))?;
    if unheld_bytes > 0 {
        writeln!(out, "`pipeline cache gc` removes the files of no result")?;
    }
    Ok(())
}

fn list_bytes(census: &Census) -> u64 {
    census.record_bytes + census.trees.iter().map(|tree| tree.bytes).sum::<u64>()
}

fn all_bytes(census: &Census) -> u64 {
    census.bytes() + census.staging_bytes + list_bytes(census)
}

fn as_json(census: &Census, groups: &[(String, Usage)]) -> Value {
    let (unheld, unheld_bytes) = census.unheld();
    let (outside, outside_bytes) = census.outside();
    let groups = groups.iter().map(|(group, usage)| {
        json!({
            "group": group, "results": usage.results, "bytes": usage.bytes,
            "own_bytes": usage.own_bytes, "seconds": usage.seconds,
        })
    });
    json!({
        "groups": groups.collect::<Vec<_>>(),
        "objects": census.objects.len(),
        "object_bytes": census.object_bytes(),
        "unheld_objects": unheld,
        "unheld_bytes": unheld_bytes,
        "outside": outside,
        "outside_bytes": outside_bytes,
        "partials": census.partials.len(),
        "partial_bytes": census.partial_bytes(),
        "list_bytes": list_bytes(census),
        "staging_bytes": census.staging_bytes,
        "bytes": all_bytes(census),
    })
}
