//! `pipeline runs diff`: what two runs were told differently, and what came out differently.

use std::io::{self, Write};

use cache::{Digest, KeyDifference, OutputRecord, differences};
use clap::Args;
use engine::explain::value_in_words;
use engine::history::{Origin, Recorded, RecordedStage, Words};
use serde_json::{Value, json};

use super::stage::flattened;
use super::{LATEST, Past};
use crate::render::{Exit, Failure};
use crate::table::width;
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
        Format::Json => crate::print_json(&difference.json(&old, &new)),
        Format::Text => difference.print(&mut crate::screen::stdout(), &old, &new).map_err(Failure::from),
    };
    Failure::after(if difference.is_none() { Exit::Done } else { Exit::StageFailed }, printed)
}

/// Where two runs differ.
struct Difference {
    /// The stages that are in both and not the same, in the order of the new run.
    changed: Vec<StageDifference>,
    equal: Vec<String>,
    gone: Vec<String>,
    added: Vec<String>,
}

/// Where a stage differs.
struct StageDifference {
    stage: String,
    /// How it is in the two.
    status: [String; 2],
    parameters: Vec<KeyDifference>,
    metrics: Vec<(String, [Option<f64>; 2])>,
    outputs: Vec<OutputDifference>,
}

/// An output in the two.
struct OutputDifference {
    name: String,
    identity: [Option<Digest>; 2],
    tree: [Option<Digest>; 2],
}

impl Difference {
    fn of(past: &Past, old: &Recorded, new: &Recorded) -> Result<Self, Failure> {
        let id = |stage: &RecordedStage| stage.summary.stage.clone();
        let mut difference = Self {
            changed: Vec::new(),
            equal: Vec::new(),
            gone: old.stages.iter().map(id).filter(|id| new.stage(id).is_none()).collect(),
            added: new.stages.iter().map(id).filter(|id| old.stage(id).is_none()).collect(),
        };
        for stage in &new.stages {
            let Some(before) = old.stage(&stage.summary.stage) else { continue };
            let compared = StageDifference::of(past, before, stage)?;
            match compared.is_none() {
                true => difference.equal.push(id(stage)),
                false => difference.changed.push(compared),
            }
        }
        Ok(difference)
    }

    fn is_none(&self) -> bool {
        self.changed.is_empty() && self.gone.is_empty() && self.added.is_empty()
    }

    fn json(&self, old: &Recorded, new: &Recorded) -> Value {
        json!({
            "old": old.summary.run,
            "new": new.summary.run,
            "equal": self.is_none(),
            "stages": self.changed.iter().map(StageDifference::json).collect::<Vec<_>>(),
            "equal_stages": self.equal,
            "only_in_old": self.gone,
            "only_in_new": self.added,
        })
    }

    fn print(&self, out: &mut dyn Write, old: &Recorded, new: &Recorded) -> io::Result<()> {
        writeln!(out, "{} → {}", old.summary.run, new.summary.run)?;
        let circumstances =
            [("program", &old.plan.program, &new.plan.program), ("host", &old.plan.host.name, &new.plan.host.name)];
        for (name, before, now) in circumstances.iter().filter(|(_, before, now)| before != now) {
            writeln!(out, "{name} {before} → {now}")?;
        }
        self.changed.iter().try_for_each(|stage| stage.print(out))?;
        let lists = [("only in the first", &self.gone), ("only in the second", &self.added), ("equal", &self.equal)];
        for (title, stages) in lists.iter().filter(|(_, stages)| !stages.is_empty()) {
            writeln!(out, "\n{title}: {}", stages.join(", "))?;
        }
        Ok(())
    }
}

impl StageDifference {
    fn of(past: &Past, old: &RecordedStage, new: &RecordedStage) -> Result<Self, Failure> {
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
            stage: new.summary.stage.clone(),
            status: [old.summary.status.clone(), new.summary.status.clone()],
            parameters,
            metrics: pairs.iter().flat_map(|(_, pair)| metrics(*pair)).collect(),
            outputs: pairs
                .iter()
                .map(|(name, pair)| OutputDifference {
                    name: (*name).clone(),
                    identity: pair.map(|output| output.map(|output| output.identity)),
                    tree: pair.map(|output| output.map(|output| output.tree)),
                })
                .collect(),
        })
    }

    fn is_none(&self) -> bool {
        let same_end = has_result(&self.status[0]) == has_result(&self.status[1]);
        same_end && self.parameters.is_empty() && self.outputs.iter().all(|output| output.tree[0] == output.tree[1])
    }

    fn json(&self) -> Value {
        let outputs = self.outputs.iter().map(|output| {
            json!({ "output": output.name, "identity": output.identity, "tree": output.tree, "equal": output.verdict() })
        });
        let metrics = self.metrics.iter().map(|(name, values)| json!({ "metric": name, "values": values }));
        json!({
            "stage": self.stage,
            "status": self.status,
            "parameters": self.parameters,
            "metrics": metrics.collect::<Vec<_>>(),
            "outputs": outputs.collect::<Vec<_>>(),
        })
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "\n{}", Look::stdout().paint("1", &self.stage))?;
        let mut lines: Vec<(String, String)> = Vec::new();
        if has_result(&self.status[0]) != has_result(&self.status[1]) {
            lines.push(("state".to_owned(), format!("{} → {}", self.status[0], self.status[1])));
        }
        for KeyDifference { path, old, new } in &self.parameters {
            let [old, new] = [old, new].map(|value| brief(value.as_deref()));
            lines.push((path.trim_start_matches('@').to_owned(), format!("{old} → {new}")));
        }
        for (name, [old, new]) in &self.metrics {
            let shown = |value: &Option<f64>| {
                value.map_or_else(|| "not measured".to_owned(), |value| words::figure(&json!(value)))
            };
            lines.push((name.clone(), format!("{} → {}", shown(old), shown(new))));
        }
        for output in &self.outputs {
            lines.push((format!("output {}", output.name), output.in_words()));
        }
        let widest = lines.iter().map(|(name, _)| width(name)).max().unwrap_or(0);
        lines.iter().try_for_each(|(name, text)| writeln!(out, "  {name}{}  {text}", " ".repeat(widest - width(name))))
    }
}

impl OutputDifference {
    /// `bytes`: every file is the same. `content`: what it stands for is, in other bytes. `no`: it is another.
    fn verdict(&self) -> &'static str {
        match () {
            () if self.tree[0] == self.tree[1] => "bytes",
            () if self.identity[0] == self.identity[1] => "content",
            () => "no",
        }
    }

    fn in_words(&self) -> String {
        let shown = |digest: &Option<Digest>| digest.map_or_else(|| "not made".to_owned(), |digest| digest.short());
        match self.verdict() {
            "bytes" => "the same".to_owned(),
            "content" => "the same content in other bytes".to_owned(),
            _ => format!("{} → {}", shown(&self.identity[0]), shown(&self.identity[1])),
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
fn metrics([old, new]: [Option<&OutputRecord>; 2]) -> Vec<(String, [Option<f64>; 2])> {
    use stages::data::artifact::{Metrics, OutputKind};
    let is_metrics = |output: &&OutputRecord| output.kind == Metrics::NAME;
    let facts = [old, new].map(|output| output.filter(is_metrics).map(|output| &output.facts));
    if facts.contains(&None) {
        return Vec::new();
    }
    let mut names: Vec<&String> = facts.iter().flatten().flat_map(|facts| facts.keys()).collect();
    names.dedup();
    let mut found: Vec<(String, [Option<f64>; 2])> = Vec::new();
    for name in names {
        let values = facts.map(|facts| facts?.get(name)?.as_f64());
        if values[0] != values[1] && !found.iter().any(|(known, _)| known == name) {
            found.push((name.clone(), values));
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
