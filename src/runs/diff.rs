//! `pipeline runs diff`: what two runs were told differently, and what came out differently.

use std::io::{self, Write};

use cache::{Digest, KeyDifference, OutputRecord, differences};
use clap::Args;
use engine::explain::value_in_words;
use engine::history::{Origin, Recorded, RecordedStage, Words};
use serde::Serialize;

use super::stage::flattened;
use super::{LATEST, Past};
use crate::render::{Exit, Failure};
use crate::table::list;
use crate::terminal::Look;
use crate::{Format, Global, words};

/// Compare two runs stage by stage: parameters, metrics, outputs. Exits with 1 if anything differs.
#[derive(Args)]
pub(super) struct DiffArgs {
    /// The run to compare with.
    #[arg(default_value = "latest~1")]
    old: String,
    /// The run to compare.
    #[arg(default_value = LATEST)]
    new: String,
    /// How to print the result.
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

/// Compares the two.
pub(super) fn run(args: &DiffArgs, global: &Global) -> Result<(), Failure> {
    let past = Past::open(global)?;
    let old = past.recorded(&past.find(&args.old)?.run, Words::Skip)?;
    let new = past.recorded(&past.find(&args.new)?.run, Words::Skip)?;
    let difference = Difference::of(&past, &old, &new)?;
    let printed = match args.format {
        Format::Json => crate::print_json(&difference),
        Format::Text => difference.print(&mut crate::screen::stdout(), &old, &new).map_err(Failure::from),
    };
    Failure::after(if difference.equal { Exit::Done } else { Exit::StageFailed }, printed)
}

/// Where two runs differ.
#[derive(Serialize)]
struct Difference<'a> {
    old: &'a str,
    new: &'a str,
    /// Whether they do not.
    equal: bool,
    /// The stages that are in both and not the same, in the order of the new run.
    stages: Vec<StageDifference<'a>>,
    equal_stages: Vec<&'a str>,
    only_in_old: Vec<&'a str>,
    only_in_new: Vec<&'a str>,
}

/// Where a stage differs.
#[derive(Serialize)]
struct StageDifference<'a> {
    stage: &'a str,
    /// How it is in the two.
    status: [&'a str; 2],
    parameters: Vec<KeyDifference>,
    metrics: Vec<MetricDifference>,
    outputs: Vec<OutputDifference>,
}

/// A number in the two.
#[derive(Serialize)]
struct MetricDifference {
    metric: String,
    values: [Option<f64>; 2],
}

/// An output in the two.
#[derive(Serialize)]
struct OutputDifference {
    output: String,
    identity: [Option<Digest>; 2],
    tree: [Option<Digest>; 2],
    equal: Equality,
}

/// How far an output is the same in the two.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Equality {
    /// Every file is.
    Bytes,
    /// What it stands for is, in other bytes.
    Content,
    No,
}

impl<'a> Difference<'a> {
    fn of(past: &Past, old: &'a Recorded, new: &'a Recorded) -> Result<Self, Failure> {
        let only_in = |one: &'a Recorded, other: &Recorded| -> Vec<&'a str> {
            let ids = one.stages.iter().map(|stage| stage.summary.stage.as_str());
            ids.filter(|id| other.stage(id).is_none()).collect()
        };
        let (only_in_old, only_in_new) = (only_in(old, new), only_in(new, old));
        let (mut stages, mut equal_stages) = (Vec::new(), Vec::new());
        for stage in &new.stages {
            let Some(before) = old.stage(&stage.summary.stage) else { continue };
            let compared = StageDifference::of(past, before, stage)?;
            match compared.is_none() {
                true => equal_stages.push(compared.stage),
                false => stages.push(compared),
            }
        }
        let equal = stages.is_empty() && only_in_old.is_empty() && only_in_new.is_empty();
        let (old, new) = (&old.summary.run, &new.summary.run);
        Ok(Self { old, new, equal, stages, equal_stages, only_in_old, only_in_new })
    }

    fn print(&self, out: &mut dyn Write, old: &Recorded, new: &Recorded) -> io::Result<()> {
        let look = Look::stdout();
        writeln!(out, "{}", look.wrap(&format!("{} → {}", old.summary.run, new.summary.run), 2))?;
        let circumstances = [("program", &old.program, &new.program), ("host", &old.host.name, &new.host.name)];
        for (name, before, now) in circumstances.iter().filter(|(_, before, now)| before != now) {
            writeln!(out, "{}", look.wrap(&format!("{name} {before} → {now}"), 2))?;
        }
        self.stages.iter().try_for_each(|stage| stage.print(out, look))?;
        let lists = [
            ("only in the first", &self.only_in_old),
            ("only in the second", &self.only_in_new),
            ("equal", &self.equal_stages),
        ];
        for (title, stages) in lists.iter().filter(|(_, stages)| !stages.is_empty()) {
            writeln!(out, "\n{}", look.wrap(&format!("{title}: {}", stages.join(", ")), 2))?;
        }
        Ok(())
    }
}

impl<'a> StageDifference<'a> {
    fn of(past: &Past, old: &'a RecordedStage, new: &'a RecordedStage) -> Result<Self, Failure> {
        let made = |stage: &RecordedStage| stage.summary.key.map_or(Ok(None), |key| past.made(&key));
        let (before, now) = (made(old)?, made(new)?);
        let parameters = match (&before, &now) {
            (Some(before), Some(now)) => differences(&before.record.key, &now.record.key),
            _ => told_differently(old, new),
        };
        let outputs = [outputs(old, before), outputs(new, now)];
        let mut names: Vec<&String> = outputs.iter().flatten().map(|(name, _)| name).collect();
        names.sort();
        names.dedup();
        let of =
            |at: usize, name: &String| outputs[at].iter().find(|(known, _)| known == name).map(|(_, output)| output);
        let pairs: Vec<(&String, [Option<&OutputRecord>; 2])> =
            names.iter().map(|name| (*name, [of(0, name), of(1, name)])).collect();
        Ok(Self {
            stage: &new.summary.stage,
            status: [&old.summary.status, &new.summary.status],
            parameters,
            metrics: pairs.iter().flat_map(|(_, pair)| metrics(*pair)).collect(),
            outputs: pairs.iter().map(|(name, pair)| OutputDifference::of(name, *pair)).collect(),
        })
    }

    fn is_none(&self) -> bool {
        let same_end = has_result(self.status[0]) == has_result(self.status[1]);
        same_end && self.parameters.is_empty() && self.outputs.iter().all(|output| output.equal == Equality::Bytes)
    }

    fn print(&self, out: &mut dyn Write, look: Look) -> io::Result<()> {
        writeln!(out, "\n{}", look.paint("1", self.stage))?;
        let mut lines: Vec<(String, String)> = Vec::new();
        if has_result(self.status[0]) != has_result(self.status[1]) {
            lines.push(("state".to_owned(), format!("{} → {}", self.status[0], self.status[1])));
        }
        for KeyDifference { path, old, new } in &self.parameters {
            let [old, new] = [old, new].map(|value| brief(value.as_deref()));
            lines.push((path.trim_start_matches('@').to_owned(), format!("{old} → {new}")));
        }
        for MetricDifference { metric, values } in &self.metrics {
            let [old, new] = values.map(|value| value.map_or_else(|| "not measured".to_owned(), words::float));
            lines.push((metric.clone(), format!("{old} → {new}")));
        }
        for output in &self.outputs {
            lines.push((format!("output {}", output.output), output.in_words()));
        }
        write!(out, "{}", list(&lines, look))
    }
}

impl OutputDifference {
    fn of(output: &str, pair: [Option<&OutputRecord>; 2]) -> Self {
        let identity = pair.map(|output| output.map(|output| output.identity));
        let tree = pair.map(|output| output.map(|output| output.tree));
        let equal = match () {
            () if tree[0] == tree[1] => Equality::Bytes,
            () if identity[0] == identity[1] => Equality::Content,
            () => Equality::No,
        };
        Self { output: output.to_owned(), identity, tree, equal }
    }

    fn in_words(&self) -> String {
        let [old, new] =
            self.identity.map(|digest| digest.map_or_else(|| "not made".to_owned(), |digest| digest.short()));
        match self.equal {
            Equality::Bytes => "the same".to_owned(),
            Equality::Content => "the same content in other bytes".to_owned(),
            Equality::No => format!("{old} → {new}"),
        }
    }
}

fn has_result(status: &str) -> bool {
    matches!(status, "done" | "cached")
}

/// What a run made, else what it took from the store.
fn outputs(stage: &RecordedStage, made: Option<Origin>) -> Vec<(String, OutputRecord)> {
    if stage.outputs.is_empty() {
        return made.map(|made| made.record.outputs.into_iter().collect()).unwrap_or_default();
    }
    stage.outputs.clone().into_iter().collect()
}

/// The numbers among the facts of an output that differ, where there are two to compare.
fn metrics([old, new]: [Option<&OutputRecord>; 2]) -> Vec<MetricDifference> {
    use stages::data::artifact::{Metrics, OutputKind};
    let is_metrics = |output: &&OutputRecord| output.kind == Metrics::NAME;
    let facts = [old, new].map(|output| output.filter(is_metrics).map(|output| &output.facts));
    if facts.contains(&None) {
        return Vec::new();
    }
    let mut names: Vec<&String> = facts.iter().flatten().flat_map(|facts| facts.keys()).collect();
    names.dedup();
    let mut found: Vec<MetricDifference> = Vec::new();
    for name in names {
        let values = facts.map(|facts| facts?.get(name)?.as_f64());
        if values[0] != values[1] && !found.iter().any(|known| known.metric == *name) {
            found.push(MetricDifference { metric: name.clone(), values });
        }
    }
    found
}

/// Where the parameters of the file differ; for stages that have no result to compare.
fn told_differently(old: &RecordedStage, new: &RecordedStage) -> Vec<KeyDifference> {
    let (old, new) = (flattened(&old.plan.parameters), flattened(&new.plan.parameters));
    let value = |of: &[(String, String)], path: &String| {
        of.iter().find(|(known, _)| known == path).map(|(_, value)| value.clone())
    };
    let mut paths: Vec<&String> = new.iter().chain(&old).map(|(path, _)| path).collect();
    let mut seen = std::collections::BTreeSet::new();
    paths.retain(|path| seen.insert(*path));
    let difference =
        |path: &String| KeyDifference { path: path.clone(), old: value(&old, path), new: value(&new, path) };
    paths.into_iter().map(difference).filter(|difference| difference.old != difference.new).collect()
}

/// A value that fits on a line; digests are cut as everywhere.
fn brief(value: Option<&str>) -> String {
    match value.and_then(|value| value.parse::<Digest>().ok()) {
        Some(digest) => digest.short(),
        None => value_in_words(value),
    }
}
