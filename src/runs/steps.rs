//! What a training told of its steps: the records of its result and of its events, and all of them as columns.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};

use cache::Verify;
use engine::history::{Events, Origin, Words};
use engine::protocol::WorkerEvent;
use engine::run::RunEvent;
use serde_json::{Map, Value};
use stages::data::artifact::{Metrics, OutputKind};

use super::Past;

/// The file of a Metrics artefact that has a line per step.
const STEPS_FILE: &str = "metrics.jsonl";

/// Gives each line of the result's own record; `None` where the store has it no more, or not as it was.
pub(crate) fn from_result(past: &Past, made: &Origin, add: &mut dyn FnMut(&Map<String, Value>)) -> Option<()> {
    let output = made.record.outputs.values().find(|output| output.kind == Metrics::NAME)?;
    let tree = past.store.tree(&output.tree).ok()?;
    let file = tree.get(STEPS_FILE)?;
    past.store.check(file, Verify::Contents).ok()?;
    for line in BufReader::new(File::open(past.store.place(&file.digest).path()).ok()?).lines() {
        if let Ok(Value::Object(values)) = serde_json::from_str(&line.ok()?) {
            add(&values);
        }
    }
    Some(())
}

/// Gives the figures that the stages of a run told while they ran, each with its stage.
pub(crate) fn each_figure(past: &Past, run: &str, add: &mut dyn FnMut(&str, &Map<String, Value>)) {
    let Ok(events) = Events::open(&past.home.run(run), Words::Read) else { return };
    for timed in events.map_while(Result::ok) {
        if let RunEvent::Worker { stage, said: WorkerEvent::Metrics { values } } = &timed.event {
            add(stage, values);
        }
    }
}

/// Figures of steps of one kind (those of training, those of validation), as columns of one length.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    /// The steps, rising.
    pub steps: Vec<f64>,
    /// When each was told, in seconds since the stage's process was started; not a number where no event has it.
    pub seconds: Vec<f64>,
    /// The figures by name; what a step does not have is not a number.
    pub columns: BTreeMap<String, Vec<f64>>,
}

impl Steps {
    /// Adds the figures of a step, or replaces those that it has under the same names: a training that was resumed
    /// tells steps again.
    pub(crate) fn put(&mut self, seconds: Option<f64>, figures: &Map<String, Value>) {
        let Some(step) = figures.get("step").and_then(Value::as_f64).filter(|step| step.is_finite()) else { return };
        let at = match self.steps.binary_search_by(|known| known.total_cmp(&step)) {
            Ok(at) => at,
            Err(at) => {
                self.steps.insert(at, step);
                self.seconds.insert(at, f64::NAN);
                self.columns.values_mut().for_each(|column| column.insert(at, f64::NAN));
                at
            }
        };
        if let Some(seconds) = seconds {
            self.seconds[at] = seconds;
        }
        for (name, value) in figures.iter().filter(|(name, _)| *name != "step") {
            let Some(value) = value.as_f64() else { continue };
            match self.columns.get_mut(name) {
                Some(column) => column[at] = value,
                None => {
                    let mut column = vec![f64::NAN; self.steps.len()];
                    column[at] = value;
                    self.columns.insert(name.clone(), column);
                }
            }
        }
    }

    /// How many tokens were computed up to each step, where steps tell how many they have.
    pub(crate) fn tokens(&self) -> Option<Vec<f64>> {
        let mut sum = 0.0;
        let add = |tokens: &f64| {
            sum += if tokens.is_finite() { *tokens } else { 0.0 };
            sum
        };
        Some(self.columns.get("tokens")?.iter().map(add).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_step_that_is_told_again_replaces_what_it_said() {
        let mut steps = Steps::default();
        let mut put = |seconds, figures: Value| steps.put(seconds, figures.as_object().unwrap());
        put(None, json!({ "step": 1, "loss": 2.0, "kind": "train" }));
        put(Some(3.0), json!({ "step": 3, "loss": 1.0, "tokens": 7 }));
        put(Some(2.0), json!({ "step": 2, "loss": 1.5, "tokens": 5 }));
        put(Some(1.0), json!({ "step": 1, "loss": 2.5 }));
        put(Some(1.0), json!({ "loss": 9.0 }));
        assert_eq!(steps.steps, [1.0, 2.0, 3.0]);
        assert_eq!(steps.seconds, [1.0, 2.0, 3.0]);
        assert_eq!(steps.columns["loss"], [2.5, 1.5, 1.0]);
        assert_eq!(steps.tokens().unwrap(), [0.0, 5.0, 12.0]);
        assert!(!steps.columns.contains_key("kind"));
    }
}
