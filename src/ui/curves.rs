//! Curves of trainings, as many of their points as a screen can show.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

use engine::file::tree::Node;
use engine::history::{EventTail, Recorded, Words};
use engine::parameter::{Parameter, Reader};
use engine::protocol::WorkerEvent;
use engine::run::RunEvent;
use engine::run::clock::Moment;
use serde::Serialize;
use serde_json::{Map, Value};
use stages::kinds::train::Train;

use crate::render::Failure;
use crate::runs::steps::{self, Steps};
use crate::runs::{Past, stage_of};

/// Stretches of a curve of which the lowest and the highest point are sent.
const STRETCHES: usize = 700;

/// Runs whose figures are kept.
const MOST_KEPT: usize = 8;

/// What was told in runs, read on from where it was read to.
#[derive(Default)]
pub(super) struct Curves {
    kept: VecDeque<(String, Told)>,
}

/// What the stages of a run have told of their steps.
struct Told {
    /// Its events; none where the run's record was removed, and only the result is left.
    tail: Option<EventTail>,
    started: BTreeMap<String, Moment>,
    /// By stage and kind.
    steps: BTreeMap<(String, String), Steps>,
    /// How many steps a training is to have.
    total: BTreeMap<String, u64>,
    /// Stages whose result was read too.
    with_result: Vec<String>,
}

/// Which figures there are of a stage.
#[derive(Debug, Serialize)]
pub(super) struct Available {
    /// `train` or `validation`.
    kind: String,
    figures: Vec<String>,
    steps: usize,
}

/// A curve, thinned.
#[derive(Debug, Serialize)]
pub(super) struct Curve {
    steps: Vec<f64>,
    /// Tokens computed up to each.
    tokens: Option<Vec<f64>>,
    /// Seconds since the start; none where no event tells it.
    seconds: Vec<Option<f64>>,
    values: Vec<Option<f64>>,
    /// The exponential moving average over all points, where it is asked for.
    smooth: Option<Vec<Option<f64>>>,
    /// How many points there are.
    of: usize,
    /// What is still to come, where that is known: the learning rate of a training that has not ended.
    planned: Option<Planned>,
}

/// What a figure will be.
#[derive(Debug, Serialize)]
struct Planned {
    steps: Vec<f64>,
    values: Vec<f64>,
}

impl Planned {
    /// The learning rate of the steps after `done`, by the parameters of a training, if there are any.
    fn learning_rate(parameters: &Value, done: f64, total: u64) -> Option<Self> {
        let parameters = Train::read(&Node::from_json(parameters), &mut Reader::default())?;
        let schedule = parameters.schedule(total);
        let first = done as u64;
        let every = usize::try_from(total.saturating_sub(first)).unwrap_or(usize::MAX).div_ceil(STRETCHES).max(1);
        // A step has the rate of those before it: the first that of none. The last is always among them.
        let to_come = (first + 1..=total).rev().step_by(every);
        let mut steps: Vec<u64> = to_come.collect();
        steps.reverse();
        let rate = |step: &u64| parameters.optimizer.learning_rate * schedule.factor(step - 1, total);
        let values = steps.iter().map(rate).collect();
        (!steps.is_empty()).then(|| Self { steps: steps.into_iter().map(|step| step as f64).collect(), values })
    }
}

/// What of a curve is wanted.
#[derive(Debug, Default)]
pub(super) struct Wanted {
    pub kind: String,
    pub figure: String,
    /// The weight of what was before in the average.
    pub smooth: Option<f64>,
    /// The first and the last step.
    pub from: Option<f64>,
    pub to: Option<f64>,
}

impl Curves {
    /// Which figures there are.
    ///
    /// # Errors
    /// Fails where the run's record cannot be read.
    pub(super) fn available(
        &mut self,
        past: &Past,
        recorded: &Recorded,
        stage: &str,
    ) -> Result<Vec<Available>, Failure> {
        let (told, stage) = self.of_stage(past, recorded, stage)?;
        let of_stage = told.steps.iter().filter(|((of, _), _)| *of == stage);
        let available = of_stage.map(|((_, kind), steps)| Available {
            kind: kind.clone(),
            figures: steps.columns.keys().cloned().collect(),
            steps: steps.steps.len(),
        });
        Ok(available.collect())
    }

    /// A curve; empty where there is none.
    ///
    /// # Errors
    /// As [`Curves::available`].
    pub(super) fn curve(
        &mut self,
        past: &Past,
        recorded: &Recorded,
        stage: &str,
        wanted: &Wanted,
    ) -> Result<Curve, Failure> {
        let (told, stage) = self.of_stage(past, recorded, stage)?;
        let none = Steps::default();
        let steps = told.steps.get(&(stage.clone(), wanted.kind.clone())).unwrap_or(&none);
        let mut curve = Curve::of(steps, wanted);
        let of = recorded.stage(&stage).filter(|of| of.summary.status != "done" && of.summary.status != "cached");
        let is_rate = wanted.kind == "train" && wanted.figure == "learning_rate" && wanted.to.is_none();
        if let (Some(of), Some(total), Some(done), true) = (of, told.total.get(&stage), steps.steps.last(), is_rate) {
            curve.planned = Planned::learning_rate(&of.plan.parameters, *done, *total);
        }
        Ok(curve)
    }

    /// What the run told that made a stage's result, or makes it, and the stage's name in it.
    fn of_stage(&mut self, past: &Past, recorded: &Recorded, stage: &str) -> Result<(&Told, String), Failure> {
        let summary = &stage_of(recorded, stage)?.summary;
        let made = summary.key.map(|key| past.made(&key)).transpose()?.flatten();
        let by = made.as_ref().and_then(|made| made.by.clone());
        let (run, name) = by.unwrap_or_else(|| (recorded.summary.run.clone(), stage.to_owned()));
        let told = self.read_on(&past.home.run(&run), &run)?;
        if let Some(made) = &made
            && !told.with_result.contains(&name)
        {
            told.with_result.push(name.clone());
            steps::from_result(past, made, &mut |figures| told.steps.put_missing(&name, figures));
        }
        Ok((told, name))
    }

    fn read_on(&mut self, folder: &Path, run: &str) -> Result<&mut Told, Failure> {
        let mut told = match self.kept.iter().position(|(kept, _)| kept == run) {
            Some(at) => self.kept.remove(at).map(|(_, told)| told),
            None => None,
        };
        let told = match told.take() {
            Some(told) => told,
            None => Told {
                tail: EventTail::open(folder, Words::Read).ok(),
                started: BTreeMap::new(),
                steps: BTreeMap::new(),
                total: BTreeMap::new(),
                with_result: Vec::new(),
            },
        };
        self.kept.truncate(MOST_KEPT - 1);
        self.kept.push_front((run.to_owned(), told));
        let (_, told) = self.kept.front_mut().expect("one was just put there");
        told.read_on().map_err(Failure::machine)?;
        Ok(told)
    }
}

trait PutMissing {
    /// Puts figures of a step that is not there yet.
    fn put_missing(&mut self, stage: &str, figures: &Map<String, Value>);
}

impl PutMissing for BTreeMap<(String, String), Steps> {
    fn put_missing(&mut self, stage: &str, figures: &Map<String, Value>) {
        let steps = self.entry((stage.to_owned(), kind(figures))).or_default();
        let step = figures.get("step").and_then(Value::as_f64).unwrap_or(f64::NAN);
        if steps.steps.binary_search_by(|known| known.total_cmp(&step)).is_err() {
            steps.put(None, figures);
        }
    }
}

fn kind(figures: &Map<String, Value>) -> String {
    figures.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned()
}

impl Told {
    fn read_on(&mut self) -> std::io::Result<()> {
        let Self { tail, started, steps, total, .. } = self;
        let Some(tail) = tail else { return Ok(()) };
        tail.poll_each(&mut |timed| match timed.event {
            RunEvent::StageStarted { stage, attempt: 1, .. } => {
                started.extend(Moment::parse(&timed.time).map(|at| (stage, at)));
            }
            RunEvent::Worker { stage, said: WorkerEvent::Progress { unit, total: Some(of), .. } }
                if unit == "steps" =>
            {
                total.insert(stage, of);
            }
            RunEvent::Worker { stage, said: WorkerEvent::Metrics { values } } => {
                let begun = started.get(&stage);
                let told = Moment::parse(&timed.time);
                let seconds = begun.zip(told).map(|(begun, told)| told.since(*begun).as_secs_f64());
                steps.entry((stage, kind(&values))).or_default().put(seconds, &values);
            }
            _ => {}
        })
    }
}

impl Curve {
    fn of(steps: &Steps, wanted: &Wanted) -> Self {
        let none = Vec::new();
        let values = steps.columns.get(&wanted.figure).unwrap_or(&none);
        let within =
            |step: &f64| wanted.from.is_none_or(|from| *step >= from) && wanted.to.is_none_or(|to| *step <= to);
        let told = (0..values.len()).filter(|at| values[*at].is_finite() && within(&steps.steps[*at]));
        let told: Vec<usize> = told.collect();
        let at = thinned(&told, values);
        let smooth = wanted.smooth.map(|weight| average(values, weight));
        let tokens = steps.tokens();
        let of = |column: &[f64]| -> Vec<Option<f64>> {
            at.iter().map(|at| Some(column[*at]).filter(|value| value.is_finite())).collect()
        };
        Self {
            steps: at.iter().map(|at| steps.steps[*at]).collect(),
            tokens: tokens.map(|tokens| at.iter().map(|at| tokens[*at]).collect()),
            seconds: of(&steps.seconds),
            values: of(values),
            smooth: smooth.map(|smooth| of(&smooth)),
            of: told.len(),
            planned: None,
        }
    }
}

/// Of each stretch of points the lowest and the highest, in their order; all of them where they are few.
fn thinned(points: &[usize], values: &[f64]) -> Vec<usize> {
    if points.len() <= 2 * STRETCHES {
        return points.to_vec();
    }
    let mut kept: Vec<usize> = Vec::with_capacity(2 * STRETCHES + 2);
    for stretch in points.chunks(points.len().div_ceil(STRETCHES)) {
        let by_value = |one: &&usize, other: &&usize| values[**one].total_cmp(&values[**other]);
        let ends = [stretch.iter().min_by(by_value), stretch.iter().max_by(by_value)];
        kept.extend(ends.into_iter().flatten());
    }
    // Where a curve begins and how far it came.
    kept.extend(points.first().into_iter().chain(points.last()));
    kept.sort_unstable();
    kept.dedup();
    kept
}

/// The exponential moving average with its beginning corrected, as Adam does: the first values count as much as later
/// ones.
fn average(values: &[f64], weight: f64) -> Vec<f64> {
    let (mut sum, mut left) = (0.0, 1.0);
    let smooth = values.iter().map(|value| {
        if !value.is_finite() {
            return f64::NAN;
        }
        sum = weight * sum + (1.0 - weight) * value;
        left *= weight;
        sum / (1.0 - left)
    });
    smooth.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(losses: &[f64]) -> Steps {
        let mut steps = Steps::default();
        for (at, loss) in losses.iter().enumerate() {
            let figures = serde_json::json!({ "step": at + 1, "loss": loss, "tokens": 10 });
            steps.put(Some(at as f64), figures.as_object().unwrap());
        }
        steps
    }

    fn wanted() -> Wanted {
        Wanted { kind: "train".into(), figure: "loss".into(), ..Wanted::default() }
    }

    #[test]
    fn a_long_curve_keeps_its_ends_and_its_peaks() {
        let mut losses: Vec<f64> = (0..100_000).map(|at| f64::from(at % 10)).collect();
        losses[54_321] = 99.0;
        let curve = Curve::of(&steps(&losses), &wanted());
        assert!(curve.steps.len() <= 2 * STRETCHES + 2 && curve.of == 100_000);
        assert!(curve.values.contains(&Some(99.0)));
        assert_eq!((curve.steps[0], *curve.steps.last().unwrap()), (1.0, 100_000.0));
        assert_eq!(*curve.tokens.unwrap().last().unwrap(), 1e6);
    }

    #[test]
    fn a_stretch_is_told_in_full_and_smoothed_over_what_was_before() {
        let losses: Vec<f64> = (0..10_000).map(f64::from).collect();
        let wanted = Wanted { from: Some(101.0), to: Some(103.0), smooth: Some(0.5), ..wanted() };
        let curve = Curve::of(&steps(&losses), &wanted);
        assert_eq!(curve.values, [Some(100.0), Some(101.0), Some(102.0)]);
        let smooth = curve.smooth.unwrap();
        assert!(
            smooth.iter().zip([99.0, 100.0, 101.0]).all(|(is, near)| (is.unwrap() - near).abs() < 1e-9),
            "{smooth:?}"
        );
    }

    #[test]
    fn the_learning_rate_to_come_is_that_of_the_schedule() {
        let parameters = serde_json::json!({
            "model": "m", "data": "d", "optimizer": { "learning_rate": 1e-3 },
            "scheduler": { "name": "linear", "warmup_steps": 2 },
        });
        let planned = Planned::learning_rate(&parameters, 3.0, 6).unwrap();
        assert_eq!(planned.steps, [4.0, 5.0, 6.0]);
        // After a warm-up of 2 it falls to nothing at 6: the fourth step has the rate after three.
        let expected = [7.5e-4, 5e-4, 2.5e-4];
        assert!(planned.values.iter().zip(expected).all(|(is, near)| (is - near).abs() < 1e-12), "{planned:?}");
        assert!(Planned::learning_rate(&parameters, 6.0, 6).is_none());
        let long = Planned::learning_rate(&parameters, 0.0, 100_000).unwrap();
        assert!(long.steps.len() <= STRETCHES && long.steps.last() == Some(&100_000.0));
    }

    #[test]
    fn the_average_begins_at_the_first_value() {
        assert_eq!(average(&[4.0, 4.0, f64::NAN, 4.0], 0.9)[0], 4.0);
        assert!((average(&[1.0, 3.0], 0.5)[1] - 7.0 / 3.0).abs() < 1e-12);
    }
}
