//! `pipeline cache du`: what takes how much room.

use std::collections::BTreeSet;
use std::io::{self, Write};

use cache::census::{Census, CountedResult, Usage};
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::Opened;
use crate::render::Failure;
use crate::table::Table;
use crate::terminal::Look;
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
    /// By stage kind.
    Kind,
}

/// What stands for a result that no recorded run knows.
const NO_RUN: &str = "(in no recorded run)";

/// What takes how much room.
#[derive(Serialize)]
pub(super) struct DiskUsage {
    /// Who uses how much of it, the largest first.
    groups: Vec<GroupUsage>,
    objects: usize,
    object_bytes: u64,
    /// Objects of no result.
    unheld_objects: usize,
    unheld_bytes: u64,
    /// Files of results that are outside the store, in none of these.
    outside: usize,
    outside_bytes: u64,
    partials: usize,
    partial_bytes: u64,
    /// Records of results and lists of files.
    #[serde(skip)]
    lists: usize,
    list_bytes: u64,
    staging_bytes: u64,
    /// All of it.
    bytes: u64,
}

#[derive(Serialize)]
struct GroupUsage {
    group: String,
    #[serde(flatten)]
    usage: Usage,
}

/// Shows it.
pub(super) fn run(args: &DuArgs, opened: Option<&Opened>, format: Format) -> Result<(), Failure> {
    let usage = args.by.usage(opened)?;
    match format {
        Format::Json => crate::print_json(&usage),
        Format::Text => Ok(print(&usage, args.by)?),
    }
}

/// By pipeline and stage.
pub(super) fn usage(opened: Option<&Opened>) -> Result<DiskUsage, Failure> {
    By::Stage.usage(opened)
}

impl By {
    fn usage(self, opened: Option<&Opened>) -> Result<DiskUsage, Failure> {
        let census = match opened {
            Some(opened) => opened.store.census().map_err(Failure::machine)?,
            None => Census::default(),
        };
        let groups = census.usage(|result| self.groups(result, opened)).into_iter();
        let mut groups: Vec<_> = groups.map(|(group, usage)| GroupUsage { group, usage }).collect();
        groups.sort_by_key(|GroupUsage { usage, .. }| std::cmp::Reverse((usage.bytes, usage.own_bytes)));
        Ok(DiskUsage::of(&census, groups))
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

impl DiskUsage {
    fn of(census: &Census, groups: Vec<GroupUsage>) -> Self {
        let (unheld_objects, unheld_bytes) = census.unheld();
        let (outside, outside_bytes) = census.outside();
        let list_bytes = census.record_bytes + census.trees.iter().map(|tree| tree.bytes).sum::<u64>();
        Self {
            groups,
            objects: census.objects.len(),
            object_bytes: census.object_bytes(),
            unheld_objects,
            unheld_bytes,
            outside,
            outside_bytes,
            partials: census.partials.len(),
            partial_bytes: census.partial_bytes(),
            lists: census.results.len() + census.trees.len(),
            list_bytes,
            staging_bytes: census.staging_bytes,
            bytes: census.bytes() + census.staging_bytes + list_bytes,
        }
    }

    /// What is said below the tables, a sentence each.
    fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        if self.outside > 0 {
            let (files, size) = (words::plural(self.outside, "file"), words::bytes(self.outside_bytes));
            lines.push(format!("{files} ({size}) of results outside the store, in none of these"));
        }
        if self.staging_bytes > 0 {
            lines.push(format!("{} in the making", words::bytes(self.staging_bytes)));
        }
        lines.push(format!("{} in all", words::bytes(self.bytes)));
        if self.unheld_bytes > 0 {
            lines.push("`pipeline cache gc` removes the files of no result that are older than an hour".to_owned());
        }
        lines
    }
}

fn print(of: &DiskUsage, by: By) -> io::Result<()> {
    let mut out = crate::screen::stdout();
    let look = Look::stdout();
    let mut table = Table::new([by.title(), "results", "size", "own", "took"]).shortening([by.title()]);
    for GroupUsage { group, usage } in &of.groups {
        let took = if usage.seconds > 0.0 { words::seconds(usage.seconds) } else { String::new() };
        let (size, own) = (words::bytes(usage.bytes), words::bytes(usage.own_bytes));
        table.row([group.clone(), usage.results.to_string(), size, own, took]);
    }
    if !table.is_empty() {
        writeln!(out, "{}", table.fitted(look))?;
    }
    let mut totals = Table::new(["", "number", "size"]);
    let mut total =
        |name: &str, number: usize, bytes: u64| totals.row([name, &number.to_string(), &words::bytes(bytes)]);
    total("files of results", of.objects - of.unheld_objects, of.object_bytes - of.unheld_bytes);
    total("files of no result", of.unheld_objects, of.unheld_bytes);
    total("working state", of.partials, of.partial_bytes);
    total("records and lists", of.lists, of.list_bytes);
    writeln!(out, "{}", totals.fitted(look))?;
    of.lines().iter().try_for_each(|line| writeln!(out, "{}", look.wrap(line, 2)))
}
