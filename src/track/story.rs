//! A run as trackers know it, folded from its recorded events: stages with parameters, figures by step, results.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use engine::history::{EventTail, Recorded, RunPlan, RunState, TimedEvent, Words};
use engine::protocol::WorkerEvent;
use engine::run::RunEvent;
use engine::run::clock::Moment;
use serde_json::{Map, Value, json};
use stages::data::artifact::{Metrics, OutputKind};

/// Follows a run's record.
pub(super) struct Story {
    pub plan: RunPlan,
    pub folder: PathBuf,
    /// The stages that ran, by the order of the plan.
    pub stages: BTreeMap<usize, StageStory>,
    /// How and when it ended, once it did.
    pub ended: Option<(RunState, Millis)>,
    /// How many events were read.
    pub read: usize,
    /// Figures of the first events are left out: so many were sent before.
    skip: usize,
    tail: EventTail,
    position: BTreeMap<String, usize>,
    last: Millis,
}

/// Milliseconds since 1970.
pub(super) type Millis = u64;

/// A stage that ran.
#[derive(Debug, Default)]
pub(super) struct StageStory {
    pub started: Millis,
    pub ended: Option<(Ended, Millis)>,
    /// Figures by step, in the order in which they were told.
    pub figures: Vec<Figures>,
    /// Whether there were any, also those that were left out.
    pub has_figures: bool,
    /// The figures of its result.
    pub results: Vec<(String, f64)>,
}

/// How a stage ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    Done,
    Failed,
}

/// What was told at a step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Figures {
    pub time: Millis,
    pub step: i64,
    /// By name: `train/loss`.
    pub values: Vec<(String, f64)>,
}

impl Story {
    /// Begins at a run's first event, whose figures are left out for the first `skip` events.
    ///
    /// # Errors
    /// Fails where the run's record cannot be read.
    pub(super) fn open(folder: &Path, skip: usize) -> io::Result<Self> {
        let plan = RunPlan::read(folder)
            .ok_or_else(|| io::Error::other(format!("`{}` is no record of a run", folder.display())))?;
        let stages = plan.stages.iter().enumerate();
        Ok(Self {
            position: stages.map(|(at, stage)| (stage.id.clone(), at)).collect(),
            plan,
            folder: folder.to_owned(),
            stages: BTreeMap::new(),
            ended: None,
            read: 0,
            skip,
            tail: EventTail::open(folder, Words::Read)?,
            last: 0,
        })
    }

    /// Reads what has been recorded since.
    ///
    /// # Errors
    /// As [`Story::open`].
    pub(super) fn read_on(&mut self) -> io::Result<()> {
        // Looked at before the events: a run that ends in between has its end among them.
        let alive = Recorded::is_alive(&self.folder);
        let mut events = Vec::new();
        self.tail.poll_each(&mut |event| events.push(event))?;
        for event in events {
            self.apply(event);
        }
        if !alive && self.ended.is_none() {
            self.ended = Some((RunState::CutOff, self.last));
        }
        Ok(())
    }

    /// The stages that a tracker has a run for: those with figures.
    pub(super) fn tracked(&self) -> impl Iterator<Item = (usize, &StageStory)> {
        let with_figures = |stage: &&StageStory| stage.has_figures || !stage.results.is_empty();
        self.stages.iter().map(|(at, stage)| (*at, stage)).filter(move |(_, stage)| with_figures(stage))
    }

    /// Where a stage's figures come from, among the parameters that a tracker is told.
    pub(super) fn origin(&self, at: usize) -> Value {
        let (plan, planned) = (&self.plan, &self.plan.stages[at]);
        json!({ "run": plan.run, "stage": planned.id, "kind": planned.kind, "version": plan.program })
    }

    fn apply(&mut self, TimedEvent { time, event }: TimedEvent) {
        self.read += 1;
        let time = millis(&time);
        self.last = time;
        let wanted = self.read > self.skip;
        match event {
            RunEvent::RunFinished { conclusion, .. } => self.ended = Some((conclusion.into(), time)),
            RunEvent::StageStarted { stage, attempt, .. } => {
                if let Some(stage) = self.stage(&stage).filter(|_| attempt <= 1) {
                    stage.started = time;
                }
            }
            RunEvent::Worker { stage, said: WorkerEvent::Metrics { values } } => {
                if let Some(stage) = self.stage(&stage) {
                    stage.has_figures = true;
                    stage.figures.extend(wanted.then(|| Figures::of(&values, time)));
                }
            }
            RunEvent::StageDone { stage, outputs, .. } => {
                if let Some(stage) = self.stage(&stage) {
                    stage.ended = Some((Ended::Done, time));
                    let facts = outputs.values().filter(|output| output.kind == Metrics::NAME);
                    stage.results = facts.flat_map(|output| numbers(&output.facts)).collect();
                }
            }
            RunEvent::StageFailed { stage, retry_in_seconds: None, .. } => {
                if let Some(stage) = self.stage(&stage) {
                    stage.ended = Some((Ended::Failed, time));
                }
            }
            _ => {}
        }
    }

    fn stage(&mut self, id: &str) -> Option<&mut StageStory> {
        let at = *self.position.get(id)?;
        let last = self.last;
        Some(self.stages.entry(at).or_insert_with(|| StageStory { started: last, ..StageStory::default() }))
    }
}

impl Figures {
    fn of(values: &Map<String, Value>, time: Millis) -> Self {
        let kind = values.get("kind").and_then(Value::as_str);
        let named = |name: &str| kind.map_or_else(|| name.to_owned(), |kind| format!("{kind}/{name}"));
        let step = values.get("step").and_then(Value::as_i64).unwrap_or_default();
        let figures = values.iter().filter(|(name, _)| *name != "step");
        let values = figures.filter_map(|(name, value)| Some((named(name), value.as_f64()?))).collect();
        Self { time, step, values }
    }
}

/// Figures by step, each once: a training that was resumed tells some steps again, and the last word holds.
pub(super) fn by_step(figures: &[Figures]) -> BTreeMap<i64, (Millis, BTreeMap<&str, f64>)> {
    let mut steps: BTreeMap<i64, (Millis, BTreeMap<&str, f64>)> = BTreeMap::new();
    for Figures { time, step, values } in figures {
        let (of_step, known) = steps.entry(*step).or_default();
        *of_step = *time;
        known.extend(values.iter().map(|(name, value)| (name.as_str(), *value)));
    }
    steps
}

/// The numbers among facts, by dotted name.
fn numbers(facts: &Map<String, Value>) -> Vec<(String, f64)> {
    flat(&Value::Object(facts.clone())).into_iter().filter_map(|(name, value)| Some((name, value.as_f64()?))).collect()
}

/// The values of a mapping of mappings, by dotted name; lists are values.
pub(super) fn flat(value: &Value) -> Vec<(String, Value)> {
    fn add(name: &str, value: &Value, to: &mut Vec<(String, Value)>) {
        match value {
            Value::Object(entries) => {
                for (key, value) in entries {
                    let name = if name.is_empty() { key.clone() } else { format!("{name}.{key}") };
                    add(&name, value, to);
                }
            }
            value => to.push((name.to_owned(), value.clone())),
        }
    }
    let mut values = Vec::new();
    add("", value, &mut values);
    values
}

/// When, of a time as it is recorded; 0 where it cannot be read.
pub(super) fn millis(time: &str) -> Millis {
    let epoch = Moment::at(std::time::UNIX_EPOCH);
    Moment::parse(time).map_or(0, |moment| u64::try_from(moment.since(epoch).as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_named_by_their_paths() {
        let flat = flat(&json!({ "lora": { "rank": 4, "target_modules": ["q"] }, "seed": 1 }));
        let names: Vec<&str> = flat.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["lora.rank", "lora.target_modules", "seed"]);
    }

    #[test]
    fn the_last_word_on_a_step_holds() {
        let told = |kind: &str, step: i64, loss: f64, time| {
            let Value::Object(values) = json!({ "kind": kind, "step": step, "loss": loss, "skipped": false }) else {
                unreachable!()
            };
            Figures::of(&values, time)
        };
        let figures = [
            told("train", 1, 3.0, 10),
            told("train", 2, 2.0, 20),
            told("validation", 2, 2.5, 21),
            told("train", 2, 1.5, 40),
        ];
        let steps = by_step(&figures);
        assert_eq!(steps.len(), 2);
        assert_eq!(steps[&2], (40, BTreeMap::from([("train/loss", 1.5), ("validation/loss", 2.5)])));
    }

    #[test]
    fn times_are_milliseconds() {
        assert_eq!(millis("1970-01-01T00:00:01.005Z"), 1005);
        assert_eq!(millis("?"), 0);
    }
}
