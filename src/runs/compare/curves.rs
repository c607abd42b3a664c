//! Losses over the steps of a training, and its speed, from what it left behind.

use std::fs::File;
use std::io::{BufRead, BufReader};

use cache::Digest;
use engine::history::{Events, Origin, Words};
use engine::protocol::WorkerEvent;
use engine::run::RunEvent;
use serde_json::{Map, Value};
use stages::data::artifact::{Metrics, OutputKind};

use crate::runs::Past;

/// The file of a Metrics artefact that has a line per step.
const STEPS_FILE: &str = "metrics.jsonl";

/// A loss over steps.
pub(super) struct Curve {
    /// The stage, where several of one candidate are drawn.
    pub stage: String,
    /// What the loss is taken over.
    pub kind: Kind,
    /// Steps and losses.
    pub points: Vec<(f64, f64)>,
}

/// What a loss is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The rows of a step.
    Train,
    /// The rows to validate on.
    Validation,
}

/// The curves of a training: from its result, else from the events of the run that made it, which lack what was done
/// before a resume.
pub(super) fn curves(past: &Past, made: &Origin, stage: &str) -> Vec<Curve> {
    let mut train = Curve { stage: stage.to_owned(), kind: Kind::Train, points: Vec::new() };
    let mut validation = Curve { stage: stage.to_owned(), kind: Kind::Validation, points: Vec::new() };
    let mut add = |values: &Map<String, Value>| {
        let (Some(step), Some(loss)) = (number(values, "step"), number(values, "loss")) else { return };
        match values.get("kind").and_then(Value::as_str) {
            Some("train") => train.points.push((step, loss)),
            Some("validation") => validation.points.push((step, loss)),
            _ => {}
        }
    };
    if from_result(past, made, &mut add).is_none() {
        each_figure(past, made, &mut add);
    }
    [train, validation].into_iter().filter(|curve| !curve.points.is_empty()).collect()
}

/// What the pairs of the last step came to, and those of the last validation, of a training on preferences.
pub(super) fn last_of_pairs(past: &Past, made: &Origin) -> Vec<(String, f64)> {
    let mut last: Vec<(String, f64)> = Vec::new();
    from_result(past, made, &mut |values| {
        let of = if values.get("kind").and_then(Value::as_str) == Some("validation") { "validation_" } else { "" };
        for name in ["rewards/margins", "rewards/accuracies"] {
            let Some(value) = number(values, name) else { continue };
            let name = format!("{of}{name}");
            match last.iter_mut().find(|(known, _)| *known == name) {
                Some((_, last)) => *last = value,
                None => last.push((name, value)),
            }
        }
    });
    last
}

/// Tokens computed per second, over all steps of the run that made the result.
pub(super) fn tokens_per_second(past: &Past, made: &Origin) -> Option<f64> {
    let (mut tokens, mut seconds) = (0.0, 0.0);
    each_figure(past, made, &mut |values| {
        let (Some(count), Some(rate)) = (number(values, "tokens"), number(values, "tokens_per_second")) else { return };
        if rate > 0.0 {
            tokens += count;
            seconds += count / rate;
        }
    });
    (seconds > 0.0).then(|| tokens / seconds)
}

fn number(values: &Map<String, Value>, name: &str) -> Option<f64> {
    values.get(name)?.as_f64().filter(|value| value.is_finite())
}

/// Gives each line of the result's own record; `None` where the store has it no more, or not as it was.
fn from_result(past: &Past, made: &Origin, add: &mut dyn FnMut(&Map<String, Value>)) -> Option<()> {
    let output = made.record.outputs.values().find(|output| output.kind == Metrics::NAME)?;
    let tree = past.store.tree(&output.tree).ok()?;
    let file = tree.get(STEPS_FILE)?;
    let path = past.store.object_path(&file.digest);
    if Digest::of_file(&path).ok()?.0 != file.digest {
        return None;
    }
    for line in BufReader::new(File::open(path).ok()?).lines() {
        if let Ok(Value::Object(values)) = serde_json::from_str(&line.ok()?) {
            add(&values);
        }
    }
    Some(())
}

/// Gives the figures that the stage told while it ran.
fn each_figure(past: &Past, made: &Origin, add: &mut dyn FnMut(&Map<String, Value>)) {
    let Some((run, stage)) = &made.by else { return };
    let Ok(events) = Events::open(&past.home.run(run), Words::Read) else { return };
    for timed in events.map_while(Result::ok) {
        if let RunEvent::Worker { stage: said_by, said: WorkerEvent::Metrics { values } } = &timed.event
            && said_by == stage
        {
            add(values);
        }
    }
}
