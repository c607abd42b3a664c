//! Gathers what is to be compared: of a run or a child of a sweep, its parameters, its figures, its curves.

use std::collections::{BTreeMap, BTreeSet};

use cache::Digest;
use engine::artifact::Facts;
use engine::history::{Origin, Recorded, RecordedStage, Words};
use serde_json::{Number, Value};
use stages::data::artifact::{Metrics, OutputKind};

use super::curves::{Curve, curves, curves_so_far, last_of_pairs, tokens_per_second};
use crate::render::Failure;
use crate::runs::Past;
use crate::{figures, words};

/// What is measured of a stage, whatever its kind.
const COST: [&str; 2] = ["seconds", "peak_memory_bytes"];

/// One of the things that are compared.
pub(super) struct Candidate {
    /// What tells it from the others.
    pub name: String,
    pub run: String,
    /// Its stage, where stages are compared.
    pub stage: Option<String>,
    /// The stages of a whole run, each with a dot behind it, as its parameters begin.
    pub stages: Vec<String>,
    /// How it stands.
    pub status: String,
    /// Parameters by dotted name, those of other stages behind their stage's id.
    pub parameters: BTreeMap<String, Value>,
    /// The same as the file has them, without defaults, also of stages whose results are there.
    pub asked: BTreeMap<String, Value>,
    /// Names of parameters of stages without a result, of which no more is known than the file has.
    pub unkeyed: BTreeSet<String>,
    /// Figures that a program of the user's found.
    pub own: BTreeSet<String>,
    /// Figures by name, in the order in which they are found.
    pub figures: Vec<(String, Number)>,
    /// Of the figures that an evaluation of one task has twice, by the metric's name alone and behind the task's: the
    /// second name by the first.
    pub with_task: BTreeMap<String, String>,
    /// Losses over steps.
    pub curves: Vec<Curve>,
}

/// Gathers candidates; what several of them share is looked up once.
pub(super) struct Gatherer<'a> {
    past: &'a Past,
    /// Whether curves are wanted.
    curves: bool,
    recorded: BTreeMap<String, Recorded>,
    made: BTreeMap<Digest, Option<Origin>>,
}

impl<'a> Gatherer<'a> {
    /// One that has gathered nothing yet.
    pub(super) fn new(past: &'a Past, curves: bool) -> Self {
        Self { past, curves, recorded: BTreeMap::new(), made: BTreeMap::new() }
    }

    /// A whole run.
    ///
    /// # Errors
    /// Fails where its record or the store cannot be read.
    pub(super) fn run(&mut self, run: &str) -> Result<Candidate, Failure> {
        let recorded = self.recorded(run)?;
        let ids = self.past.history.ids().map_err(Failure::machine)?;
        let mut candidate = Candidate {
            name: crate::runs::ls::shortest(run, &ids).to_owned(),
            run: run.to_owned(),
            stage: None,
            stages: recorded.stages.iter().map(|stage| format!("{}.", stage.summary.stage)).collect(),
            status: crate::runs::state(recorded.summary.state).to_owned(),
            parameters: BTreeMap::new(),
            asked: BTreeMap::new(),
            unkeyed: BTreeSet::new(),
            own: BTreeSet::new(),
            figures: Vec::new(),
            with_task: BTreeMap::new(),
            curves: Vec::new(),
        };
        for stage in &recorded.stages {
            let prefix = format!("{}.", stage.summary.stage);
            self.add_parameters(&mut candidate, stage, &prefix)?;
            self.add_figures(&mut candidate, stage, &prefix, false)?;
        }
        Ok(candidate)
    }

    /// One stage of a run with all that led to it, and what was found out about its results alone. It is named by its
    /// axes, and by `label` where runs are to be told apart.
    ///
    /// # Errors
    /// As [`Gatherer::run`].
    pub(super) fn child(&mut self, run: &str, id: &str, label: Option<&str>) -> Result<Candidate, Failure> {
        let recorded = self.recorded(run)?;
        let stage = crate::runs::stage_of(&recorded, id)?;
        let axes: Vec<String> =
            stage.summary.axes.iter().map(|(axis, value)| format!("{axis}={}", words::exact(value))).collect();
        let names: Vec<String> = label.map(str::to_owned).into_iter().chain(axes).collect();
        let mut candidate = Candidate {
            name: if names.is_empty() { id.to_owned() } else { names.join(" ") },
            run: run.to_owned(),
            stage: Some(id.to_owned()),
            stages: Vec::new(),
            status: stage.summary.status.clone(),
            parameters: BTreeMap::new(),
            asked: BTreeMap::new(),
            unkeyed: BTreeSet::new(),
            own: BTreeSet::new(),
            figures: Vec::new(),
            with_task: BTreeMap::new(),
            curves: Vec::new(),
        };
        // An axis that is in no key (threads, the split of a batch) is in no parameter of the key either.
        candidate.parameters.extend(stage.summary.axes.iter().map(|(axis, value)| (axis.clone(), value.clone())));
        let (before, after) = (ancestors(&recorded, id), followers(&recorded, stage));
        self.add_parameters(&mut candidate, stage, "")?;
        self.add_figures(&mut candidate, stage, "", true)?;
        for other in &recorded.stages {
            let prefix = format!("{}.", other.summary.declared);
            if before.contains(other.summary.stage.as_str()) {
                self.add_parameters(&mut candidate, other, &prefix)?;
            }
            if after.contains(other.summary.stage.as_str()) {
                self.add_figures(&mut candidate, other, &prefix, false)?;
            }
        }
        Ok(candidate)
    }

    fn recorded(&mut self, run: &str) -> Result<Recorded, Failure> {
        if let Some(known) = self.recorded.get(run) {
            return Ok(known.clone());
        }
        let recorded = self.past.recorded(run, Words::Skip)?;
        self.recorded.insert(run.to_owned(), recorded.clone());
        Ok(recorded)
    }

    fn made(&mut self, stage: &RecordedStage) -> Result<Option<&Origin>, Failure> {
        let Some(key) = stage.summary.key else { return Ok(None) };
        if !self.made.contains_key(&key) {
            self.made.insert(key, self.past.made(&key)?);
        }
        Ok(self.made.get(&key).and_then(Option::as_ref))
    }

    /// The parameters of a stage, defaults filled in where its key is known.
    fn add_parameters(&mut self, to: &mut Candidate, stage: &RecordedStage, prefix: &str) -> Result<(), Failure> {
        let mut given = Vec::new();
        figures::flatten(&stage.plan.parameters, String::new(), &mut |name, value| given.push((name, value.clone())));
        let keyed = self.made(stage)?.map(|made| {
            let entries = made.record.key.entries.iter().filter_map(|entry| keyed(&entry.path, &entry.value));
            entries.collect::<Vec<_>>()
        });
        for (name, value) in &given {
            to.asked.entry(format!("{prefix}{name}")).or_insert_with(|| value.clone());
        }
        if keyed.is_none() {
            to.unkeyed.extend(given.iter().map(|(name, _)| format!("{prefix}{name}")));
        }
        for (name, value) in keyed.unwrap_or(given) {
            to.parameters.entry(format!("{prefix}{name}")).or_insert(value);
        }
        Ok(())
    }

    fn add_figures(
        &mut self,
        to: &mut Candidate,
        stage: &RecordedStage,
        prefix: &str,
        in_focus: bool,
    ) -> Result<(), Failure> {
        let (past, with_curves) = (self.past, self.curves);
        let label = prefix.trim_end_matches('.');
        let Some(made) = self.made(stage)? else {
            if with_curves && stage.summary.kind == "train" {
                to.curves.extend(curves_so_far(past, &to.run, &stage.summary.stage, label));
            }
            return Ok(());
        };
        let metrics = made.record.outputs.iter().filter(|(_, output)| output.kind == Metrics::NAME);
        let metrics: Vec<_> = metrics.collect();
        // A figure that another output has too, or that is called as what is measured here, has its output's name.
        let is_taken = |name: &str| {
            let with_it = metrics.iter().filter(|(_, output)| output.facts.get(name).is_some_and(Value::is_number));
            (in_focus && COST.contains(&name)) || with_it.count() > 1
        };
        for (of, output) in &metrics {
            let numbers = output.facts.iter().filter_map(|(name, value)| Some((name, value.as_number()?.clone())));
            let full = |name: &str| match is_taken(name) {
                true => format!("{prefix}{of}.{name}"),
                false => format!("{prefix}{name}"),
            };
            let numbers: Vec<_> = numbers.map(|(name, value)| (full(name), value)).collect();
            if made.record.key.get("@kind") == Some("command") {
                to.own.extend(numbers.iter().map(|(name, _)| name.clone()));
            }
            if made.record.key.get("@kind") == Some("evaluate") {
                for (name, with_task) in named_twice(&output.facts) {
                    to.with_task.entry(full(name)).or_insert_with(|| full(with_task));
                }
            }
            to.figures.extend(numbers);
        }
        let trained = made.record.key.get("@kind") == Some("train");
        if trained && with_curves {
            to.curves.extend(curves(past, made, label));
        }
        if trained {
            let last = last_of_pairs(past, made).into_iter();
            let last = last.filter_map(|(name, value)| Some((format!("{prefix}{name}"), Number::from_f64(value)?)));
            to.figures.extend(last);
        }
        if trained && let Some(speed) = tokens_per_second(past, made).and_then(Number::from_f64) {
            to.figures.push((format!("{prefix}tokens_per_second"), speed));
        }
        if trained || in_focus {
            let cost = COST.into_iter();
            let cost = cost.filter_map(|name| Some((name, made.record.how.get(name)?.as_number()?.clone())));
            to.figures.extend(cost.map(|(name, value)| (format!("{prefix}{name}"), value)));
        }
        Ok(())
    }
}

/// The facts of an evaluation that it has twice, those of its only task: by the metric's name alone, and behind the
/// task's.
fn named_twice(facts: &Facts) -> impl Iterator<Item = (&str, &str)> {
    facts.iter().filter_map(move |(name, value)| {
        let mut ends = name.match_indices('.').map(|(dot, _)| &name[dot + 1..]);
        Some((ends.find(|end| facts.get(*end) == Some(value))?, name.as_str()))
    })
}

/// An entry of a key as something to compare: identities of inputs are consequences of what the stages before were
/// told.
fn keyed(path: &str, value: &str) -> Option<(String, Value)> {
    if let Some(file) = path.strip_prefix("@files.") {
        let digest = value.rsplit_once(' ').map_or(value, |(_, digest)| digest);
        return Some((file.to_owned(), digest.get(..12).unwrap_or(digest).into()));
    }
    if let Some(pin) = path.strip_prefix("@pins.") {
        return Some((pin.to_owned(), value.into()));
    }
    if path == "@version" {
        return Some(("(version of the kind)".to_owned(), value_of(value)));
    }
    let is_identity = value.parse::<Digest>().is_ok();
    (!is_identity && !path.starts_with('@')).then(|| (path.to_owned(), value_of(value)))
}

/// The value that a key has as text: JSON, or a bare word (the name of a choice).
fn value_of(canonical: &str) -> Value {
    serde_json::from_str(canonical).unwrap_or_else(|_| canonical.into())
}

/// All stages that a stage depends on.
fn ancestors<'a>(recorded: &'a Recorded, id: &str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut open: Vec<&str> = vec![id];
    while let Some(next) = open.pop() {
        let Some(stage) = recorded.stage(next) else { continue };
        let before = stage.plan.inputs.iter().map(|input| input.stage.as_str());
        open.extend(before.filter(|before| found.insert(*before)).collect::<Vec<_>>());
    }
    let own = |stage: &&str| recorded.stages.iter().any(|known| known.summary.stage == **stage);
    found.into_iter().filter(own).filter_map(|id| Some(recorded.stage(id)?.summary.stage.as_str())).collect()
}

/// The stages that depend on this one and on no other child of the same sweep.
fn followers<'a>(recorded: &'a Recorded, stage: &RecordedStage) -> BTreeSet<&'a str> {
    let (own, declared) = (&stage.summary.stage, &stage.summary.declared);
    let is_sibling = |id: &&str| {
        recorded.stage(id).is_some_and(|other| other.summary.declared == *declared && other.summary.stage != *own)
    };
    let follows = |other: &&RecordedStage| {
        let before = ancestors(recorded, &other.summary.stage);
        before.contains(own.as_str()) && !before.iter().any(is_sibling)
    };
    recorded.stages.iter().filter(follows).map(|stage| stage.summary.stage.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_of_a_key_have_their_types() {
        let values = ["\"s1\"", "\"3\"", "12345678901234567890", "1e-5", "true", "[]", "bf16", "none"];
        let expected = json!(["s1", "3", 12_345_678_901_234_567_890_u64, 1e-5, true, [], "bf16", "none"]);
        assert_eq!(Value::from(values.map(value_of).to_vec()), expected);
        let file = keyed("@files.source[0]", &format!("jsonl {}", "1234567890".repeat(6)));
        assert_eq!(file, Some(("source[0]".to_owned(), json!("123456789012"))), "a digest is text");
    }
}
