//! Losses over the steps of a training, and its speed, from what it left behind.

use std::collections::BTreeMap;

use engine::history::Origin;
use serde_json::{Map, Value};

use crate::runs::Past;
use crate::runs::steps::{each_figure, from_result};

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

/// The curves of a training from its result; `None` where the store does not have the record of its steps.
pub(super) fn recorded(past: &Past, made: &Origin) -> Option<Curves> {
    let mut curves = Curves::default();
    from_result(past, made, &mut |figures| curves.add(figures))?;
    Some(curves)
}

/// The curves of each stage of a run, by its id, from the run's events, which lack what was done before a resume.
pub(super) fn reported(past: &Past, run: &str) -> BTreeMap<String, Curves> {
    let mut reported: BTreeMap<String, Curves> = BTreeMap::new();
    each_figure(past, run, &mut |stage, figures| reported.entry(stage.to_owned()).or_default().add(figures));
    reported
}

/// Points of the curves of a training as they are read.
#[derive(Default)]
pub(super) struct Curves {
    train: Vec<(f64, f64)>,
    validation: Vec<(f64, f64)>,
}

impl Curves {
    fn add(&mut self, figures: &Map<String, Value>) {
        let (Some(step), Some(loss)) = (number(figures, "step"), number(figures, "loss")) else { return };
        match figures.get("kind").and_then(Value::as_str) {
            Some("train") => self.train.push((step, loss)),
            Some("validation") => self.validation.push((step, loss)),
            _ => {}
        }
    }

    /// The curves that have points.
    pub(super) fn of(&self, label: &str) -> Vec<Curve> {
        let of_kinds = [(Kind::Train, &self.train), (Kind::Validation, &self.validation)];
        let reported = of_kinds.into_iter().filter(|(_, points)| !points.is_empty());
        reported.map(|(kind, points)| Curve { stage: label.to_owned(), kind, points: points.clone() }).collect()
    }
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

/// Tokens that each training of a run computed per second, over all of its steps there.
pub(super) fn speeds(past: &Past, run: &str) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<String, (f64, f64)> = BTreeMap::new();
    each_figure(past, run, &mut |stage, values| {
        let (Some(count), Some(rate)) = (number(values, "tokens"), number(values, "tokens_per_second")) else { return };
        if rate > 0.0 {
            let (tokens, seconds) = sums.entry(stage.to_owned()).or_default();
            *tokens += count;
            *seconds += count / rate;
        }
    });
    let measured = sums.into_iter().filter(|(_, (_, seconds))| *seconds > 0.0);
    measured.map(|(stage, (tokens, seconds))| (stage, tokens / seconds)).collect()
}

fn number(values: &Map<String, Value>, name: &str) -> Option<f64> {
    values.get(name)?.as_f64().filter(|value| value.is_finite())
}
