//! The figures of training: lines of `metrics.jsonl`, the log line, events and TensorBoard's curves.
//!
//! What depends on nothing but the run's inputs is in [`Record`], which becomes part of a result. Speed and memory are
//! told and not kept there.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use engine::context::StageContext;
use engine::protocol::WorkerEvent;
use serde::Serialize;
use serde_json::{Map, Value};

use super::learner::PeakMemory;
use super::preference;
use super::tensorboard::EventFile;

/// One line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(super) enum Record {
    /// An optimizer step.
    Train {
        /// The step, from 1.
        step: u64,
        /// The epoch that it belongs to, from 1.
        epoch: u64,
        /// Mean negative log-likelihood over the step's targets, in nats.
        loss: f64,
        learning_rate: f64,
        /// Norm of that mean's gradient over all trained tensors, before clipping; null where it overflowed.
        grad_norm: f64,
        /// Rows of the step.
        rows: usize,
        /// Tokens computed: those of the documents, without padding.
        tokens: usize,
        /// Tokens that the loss is taken over.
        target_tokens: usize,
        /// The factor on the loss; null without loss scaling.
        loss_scale: Option<f64>,
        /// Whether gradients overflowed under that factor, so that nothing moved.
        skipped: bool,
        /// What the pairs of the step came to, for losses of preferences.
        #[serde(flatten)]
        preference: Option<preference::Figures>,
    },
    /// A look at the validation rows.
    Validation {
        /// Steps done before it; 0 for the model as it was.
        step: u64,
        /// The epoch of the last of them, from 1; 0 before the first.
        epoch: u64,
        /// Mean negative log-likelihood over all their targets together, in nats.
        loss: f64,
        rows: u64,
        /// Tokens that the loss is taken over.
        target_tokens: u64,
        /// Whether it is the lowest so far of those after a step.
        best: bool,
        /// What the pairs came to, for losses of preferences.
        #[serde(flatten)]
        preference: Option<preference::Figures>,
    },
    /// The answers to evaluation tasks.
    Tasks {
        /// Steps done before it; 0 for the model as it was.
        step: u64,
        /// The epoch of the last of them, from 1; 0 before the first.
        epoch: u64,
        /// By task or group, metric and filter: `arc_easy.acc,none`.
        #[serde(flatten)]
        figures: BTreeMap<String, f64>,
    },
}

impl Record {
    /// Its values in their order.
    fn values(&self) -> Map<String, Value> {
        match serde_json::to_value(self).expect("numbers and booleans have a JSON form") {
            Value::Object(values) => values,
            _ => unreachable!("a struct is a JSON object"),
        }
    }
}

/// The records so far, one JSON object per line; null stands for a number that is not finite.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct History(String);

impl History {
    /// Lines saved before.
    pub(super) fn from_lines(lines: String) -> Self {
        Self(lines)
    }

    pub(super) fn lines(&self) -> &str {
        &self.0
    }

    /// The `loss` of the first record of a kind.
    pub(super) fn first_loss(&self, kind: &str) -> Option<f64> {
        self.0.lines().find_map(|line| loss(line, kind))
    }

    /// The `loss` of the last record of a kind.
    pub(super) fn last_loss(&self, kind: &str) -> Option<f64> {
        self.0.lines().rev().find_map(|line| loss(line, kind))
    }

    /// The last figures of tasks.
    pub(super) fn last_of_tasks(&self) -> Map<String, Value> {
        let of_tasks = |line: &str| serde_json::from_str::<Map<String, Value>>(line).ok();
        let mut records = self.0.lines().rev().filter_map(of_tasks);
        let mut last = records.find(|record| record["kind"] == "tasks").unwrap_or_default();
        last.retain(|name, value| name.contains('.') && !value.is_null());
        last
    }

    fn add(&mut self, record: &Record) {
        self.0.push_str(&Value::Object(record.values()).to_string());
        self.0.push('\n');
    }
}

/// The `loss` of a record, if it is of this kind.
fn loss(line: &str, kind: &str) -> Option<f64> {
    let record: Value = serde_json::from_str(line).ok()?;
    (record["kind"] == kind).then(|| record["loss"].as_f64()).flatten()
}

/// What was computed in a step, by how it is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tokens {
    /// Tokens that the loss is taken over: `trained_tokens_per_second`.
    pub(super) targets: usize,
    /// Tokens of documents: `tokens_per_second`.
    pub(super) computed: usize,
    /// What they are with padding, as other programs compute and count them: each row of a micro-batch as long as the
    /// longest (`padded_tokens_per_second`).
    pub(super) padded: usize,
}

/// Logs the figures of training.
pub(super) struct MetricsLogger {
    history: History,
    clock: Clock,
    curves: Curves,
}

/// TensorBoard's curves in the run's folder. What cannot be written is warned of, once, and costs no training.
struct Curves(Option<EventFile>);

impl Curves {
    /// None: those of a worker that does not speak.
    fn none() -> Self {
        Self(None)
    }

    /// Begins after `done` steps.
    fn new(done: u64, context: &mut StageContext) -> Self {
        let folder = context.run_folder().join("tensorboard");
        let curves = EventFile::create(&folder, done);
        let curves = curves
            .inspect_err(|error| context.warn(format!("no TensorBoard curves in `{}`: {error}", folder.display())));
        Self(curves.ok())
    }

    /// Adds every figure that is a number to its curve.
    fn draw(&mut self, values: &Map<String, Value>, context: &mut StageContext) {
        let Some(curves) = &mut self.0 else { return };
        let kind = values.get("kind").and_then(Value::as_str).unwrap_or_default();
        let step = values.get("step").and_then(Value::as_u64).unwrap_or_default();
        let numbers = values.iter().filter(|(name, _)| *name != "step");
        let named: Vec<(String, f64)> =
            numbers.filter_map(|(name, value)| Some((format!("{kind}/{name}"), value.as_f64()?))).collect();
        let named: Vec<(&str, f64)> = named.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        if let Err(error) = curves.scalars(step, &named) {
            context.warn(format!("no more TensorBoard curves: {error}"));
            self.0 = None;
        }
    }
}

impl MetricsLogger {
    /// Begins after `done` steps, with the records of these. Only rank 0 tells.
    pub(super) fn new(history: History, done: u64, leads: bool, context: &mut StageContext) -> Self {
        let curves = if leads { Curves::new(done, context) } else { Curves::none() };
        Self { history, clock: Clock::start(), curves }
    }

    /// The records so far.
    pub(super) fn history(&self) -> &History {
        &self.history
    }

    /// Tells of a step and gives the line that a person reads.
    pub(super) fn step(
        &mut self,
        record: &Record,
        tokens: Tokens,
        peak_memory: Option<PeakMemory>,
        context: &mut StageContext,
    ) -> String {
        let speed = self.clock.per_second(tokens);
        let more = [
            ("trained_tokens_per_second", Some(speed.targets)),
            ("tokens_per_second", Some(speed.computed)),
            ("padded_tokens_per_second", Some(speed.padded)),
            ("peak_memory_bytes", peak_memory.map(|peak| peak.bytes as f64)),
        ];
        self.log(record, &more, context);
        let Record::Train { step, epoch, loss, learning_rate, grad_norm, skipped, preference, .. } = record else {
            return String::new();
        };
        let compared = preference.as_ref().map(preference::Figures::line).unwrap_or_default();
        let skipped = if *skipped { " (skipped: gradients overflowed)" } else { "" };
        let memory = peak_memory.map(|PeakMemory { bytes, rank }| {
            let of_rank = rank.map(|rank| format!(" (rank {rank})")).unwrap_or_default();
            format!(" · peak memory {:.2} GiB{of_rank}", bytes as f64 / f64::from(1 << 30))
        });
        format!(
            "{epoch}|{step}|Loss: {loss:.4}{compared} lr: {} grad_norm: {grad_norm:.3}{skipped} · \
             {:.0} trained tokens/s · {:.0} tokens/s · {:.0} padded tokens/s{}",
            with_exponent(*learning_rate),
            speed.targets,
            speed.computed,
            speed.padded,
            memory.unwrap_or_default(),
        )
    }

    /// Tells of a validation, or of tasks, that took so long, which is no part of the speed of training.
    pub(super) fn validation(&mut self, record: &Record, took: Duration, context: &mut StageContext) {
        self.log(record, &[], context);
        self.clock.leave_out(took);
    }

    fn log(&mut self, record: &Record, more: &[(&str, Option<f64>)], context: &mut StageContext) {
        self.history.add(record);
        let mut values = record.values();
        values.extend(more.iter().map(|(name, value)| ((*name).to_owned(), Value::from(*value))));
        self.curves.draw(&values, context);
        context.emit(WorkerEvent::Metrics { values });
    }
}

/// `2.00e-5`, as learning rates are written; nothing is `0`.
fn with_exponent(rate: f64) -> String {
    if rate == 0.0 { "0".to_owned() } else { format!("{rate:.2e}") }
}

/// Tokens per second, by how they are counted.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Speed {
    targets: f64,
    computed: f64,
    padded: f64,
}

/// Speed over the last few seconds, which a single step would give too unsteadily.
struct Clock {
    since: Instant,
    tokens: Tokens,
    last: Option<Speed>,
}

/// How long the clock adds up before it gives a new figure.
const WINDOW_SECONDS: f64 = 2.0;

impl Clock {
    fn start() -> Self {
        Self { since: Instant::now(), tokens: Tokens::default(), last: None }
    }

    /// Counts on as if this time had not passed.
    fn leave_out(&mut self, time: Duration) {
        self.since += time;
    }

    fn per_second(&mut self, tokens: Tokens) -> Speed {
        self.tokens.targets += tokens.targets;
        self.tokens.computed += tokens.computed;
        self.tokens.padded += tokens.padded;
        let seconds = self.since.elapsed().as_secs_f64();
        let rate = |count: usize| count as f64 / seconds;
        let now = Speed {
            targets: rate(self.tokens.targets),
            computed: rate(self.tokens.computed),
            padded: rate(self.tokens.padded),
        };
        if seconds > WINDOW_SECONDS {
            *self = Self { last: Some(now), ..Self::start() };
        }
        self.last.unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use model::loss::Compared;

    use super::*;

    /// What `metrics.jsonl` is said to hold.
    const SCHEMA: &str = include_str!("metrics.schema.json");

    fn records() -> Vec<Record> {
        let compared = Compared { chosen: 1.0, rejected: 1.0, pairs: 1.0, mismatched: 1.0, ..Compared::default() };
        let figures =
            [None, Some(preference::Figures::of(&compared)), Some(preference::Figures::of(&Compared::default()))];
        let of_step = |preference, loss| Record::Train {
            step: 1,
            epoch: 1,
            loss,
            learning_rate: 1e-4,
            grad_norm: f64::INFINITY,
            rows: 2,
            tokens: 9,
            target_tokens: 5,
            loss_scale: None,
            skipped: false,
            preference,
        };
        let of_validation = |preference, loss| Record::Validation {
            step: 0,
            epoch: 0,
            loss,
            rows: 2,
            target_tokens: 5,
            best: false,
            preference,
        };
        let both = |preference: Option<preference::Figures>| {
            [of_step(preference.clone(), 0.5), of_validation(preference, f64::NAN)]
        };
        let of_tasks = BTreeMap::from([("sums.acc,none".to_owned(), 0.5), ("a b.f1,x".to_owned(), f64::NAN)]);
        let of_tasks = Record::Tasks { step: 0, epoch: 0, figures: of_tasks };
        figures.into_iter().flat_map(both).chain([of_tasks]).collect()
    }

    #[test]
    fn a_learning_rate_of_nothing_has_no_exponent() {
        assert_eq!([2e-5, 0.0, 1.5].map(with_exponent), ["2.00e-5", "0", "1.50e0"]);
    }

    #[test]
    fn lines_are_as_the_schema_says_and_it_names_nothing_else() {
        let schema: Value = serde_json::from_str(SCHEMA).unwrap();
        let validator = jsonschema::validator_for(&schema).unwrap();
        let mut seen = BTreeSet::new();
        for record in records() {
            let values = Value::Object(record.values());
            let problems: Vec<String> = validator.iter_errors(&values).map(|error| error.to_string()).collect();
            assert!(problems.is_empty(), "{values}: {problems:?}");
            let kind = values["kind"].as_str().unwrap().to_owned();
            seen.extend(record.values().keys().map(|name| (kind.clone(), name.clone())));
        }
        for kind in ["train", "validation", "tasks"] {
            for name in schema["$defs"][kind]["properties"].as_object().unwrap().keys() {
                assert!(seen.contains(&(kind.to_owned(), name.clone())), "no {kind} record has `{name}`");
            }
        }
    }
}
