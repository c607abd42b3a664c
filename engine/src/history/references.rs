//! Which results the recorded runs refer to: what a clean-up keeps, and whom it can name.

use std::collections::{BTreeMap, BTreeSet};

use cache::Digest;
use serde::Serialize;
use serde_json::Value;

use super::index::{History, HistoryError, ResultOfRun};
use crate::plan;

/// A stage of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct StageOf {
    /// The pipeline's name.
    pub pipeline: String,
    /// The stage's id.
    pub stage: String,
}

impl StageOf {
    /// Whether a name is its id, or `pipeline/stage`.
    fn is_named(&self, name: &str) -> bool {
        name == self.stage || below(name, &self.pipeline) == Some(self.stage.as_str())
    }
}

/// A child of a sweep, by what runs record of it: ids can be read in several ways.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Child {
    pipeline: String,
    /// The swept stage's id in the file.
    declared: String,
    /// Its values by axis, as JSON.
    axes: String,
}

impl Child {
    /// Whether a name means it: the swept stage's, or that with some of its values, also with the pipeline before it.
    fn is_meant_by(&self, name: &str) -> bool {
        let axes: Vec<(String, Value)> = serde_json::from_str(&self.axes).unwrap_or_default();
        let axes = axes.iter().map(|(axis, value)| (axis.as_str(), value));
        let is_meant = |name: &str| plan::is_meant_by(&self.declared, axes.clone(), name);
        is_meant(name) || below(name, &self.pipeline).is_some_and(is_meant)
    }
}

/// What follows the pipeline in `pipeline/stage`.
fn below<'a>(name: &'a str, pipeline: &str) -> Option<&'a str> {
    name.strip_prefix(pipeline)?.strip_prefix('/')
}

/// What the recorded runs refer to.
#[derive(Debug, Default)]
pub struct References {
    stages: BTreeMap<Digest, BTreeSet<StageOf>>,
    children: BTreeMap<Digest, BTreeSet<Child>>,
    /// How long making each result took, when it was last made.
    pub seconds: BTreeMap<Digest, f64>,
    /// For each pipeline the results of each of its runs, the newest first.
    runs: BTreeMap<String, Vec<BTreeSet<Digest>>>,
}

impl References {
    /// Reads them.
    ///
    /// # Errors
    /// Fails where the index of runs does.
    pub fn read(history: &History) -> Result<Self, HistoryError> {
        let mut references = Self::default();
        let mut last_run = String::new();
        history.each_result(|result| {
            let runs = references.runs.entry(result.pipeline.to_owned()).or_default();
            if last_run != result.run {
                result.run.clone_into(&mut last_run);
                runs.push(BTreeSet::new());
            }
            if let Some(newest) = runs.last_mut() {
                newest.insert(result.key);
            }
            references.add_stage(result);
            if let Some(seconds) = result.seconds {
                references.seconds.entry(result.key).or_insert(seconds);
            }
        })?;
        Ok(references)
    }

    fn add_stage(&mut self, result: &ResultOfRun<'_>) {
        let pipeline = result.pipeline.to_owned();
        if result.declared != result.stage {
            let (declared, axes) = (result.declared.to_owned(), result.axes.to_owned());
            let child = Child { pipeline: pipeline.clone(), declared, axes };
            self.children.entry(result.key).or_default().insert(child);
        }
        let stage = StageOf { pipeline, stage: result.stage.to_owned() };
        self.stages.entry(result.key).or_default().insert(stage);
    }

    /// The results that the newest runs of each pipeline refer to. A run without any result does not count.
    pub fn of_newest_runs(&self, count: usize) -> BTreeSet<Digest> {
        self.runs.values().flat_map(|runs| runs.iter().take(count)).flatten().copied().collect()
    }

    /// The stages whose result a key is, or was.
    pub fn stages_of(&self, key: &Digest) -> impl Iterator<Item = &StageOf> {
        self.stages.get(key).into_iter().flatten()
    }

    /// The keys of every result that a stage had, or a child of a sweep that the name means: by its id, or by
    /// `pipeline/stage`.
    pub fn results_of(&self, name: &str) -> BTreeSet<Digest> {
        let is_stage = |stages: &BTreeSet<StageOf>| stages.iter().any(|stage| stage.is_named(name));
        let is_child = |children: &BTreeSet<Child>| children.iter().any(|child| child.is_meant_by(name));
        let of_stages = self.stages.iter().filter(|(_, stages)| is_stage(stages)).map(|(key, _)| *key);
        let of_children = self.children.iter().filter(|(_, children)| is_child(children)).map(|(key, _)| *key);
        of_stages.chain(of_children).collect()
    }

    /// Every stage that has had a result.
    pub fn stages(&self) -> BTreeSet<&StageOf> {
        self.stages.values().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn child(declared: &str, axes: &Value) -> Child {
        Child { pipeline: "qs".to_owned(), declared: declared.to_owned(), axes: axes.to_string() }
    }

    #[test]
    fn a_child_is_meant_by_its_values_in_any_order_and_spelling() {
        let one = child("adapter", &json!([["optimizer.learning_rate", 0.001], ["seed", 1]]));
        for name in [
            "adapter",
            "qs/adapter",
            "adapter[seed=1]",
            "adapter[seed=1,optimizer.learning_rate=1e-3]",
            "qs/adapter[optimizer.learning_rate=0.0010]",
        ] {
            assert!(one.is_meant_by(name), "{name}");
        }
        for name in ["adapter[seed=2]", "adapter[rank=1]", "other/adapter", "adapt", "adapters", "adapter[seed=\"1\"]"]
        {
            assert!(!one.is_meant_by(name), "{name}");
        }
        let text = child("a", &json!([["x", "1"]]));
        assert!(text.is_meant_by("a[x=\"1\"]") && !text.is_meant_by("a[x=1]"));
    }

    #[test]
    fn a_comma_in_a_value_hides_no_axis_and_makes_none() {
        let list = child("b", &json!([["m", [1, 2]], ["s", 1]]));
        for name in ["b[s=1]", "b[m=[1,2]]", "b[m=[1,2],s=1]"] {
            assert!(list.is_meant_by(name), "{name}");
        }
        assert!(!list.is_meant_by("b[m=[1]]") && !list.is_meant_by("b[s=2]"));
        let text = child("b", &json!([["p", "x,s=1"], ["s", 2]]));
        assert!(text.is_meant_by("b[s=2]") && !text.is_meant_by("b[s=1]"));
    }

    #[test]
    fn a_name_is_that_of_a_stage_and_of_its_children() {
        let key = |text: &str| Digest::of(text.as_bytes());
        let mut references = References::default();
        let stages = [("b", "b", "[]"), ("b[s=1]", "b", r#"[["s",1]]"#), ("c[s=1]", "c", r#"[["s",1]]"#)];
        for (stage, declared, axes) in stages {
            let (run, pipeline, key, seconds) = ("1", "p", key(stage), None);
            references.add_stage(&ResultOfRun { run, pipeline, stage, declared, axes, key, seconds });
        }
        assert_eq!(references.results_of("b"), BTreeSet::from([key("b"), key("b[s=1]")]));
        assert_eq!(references.results_of("p/b[s=1]"), BTreeSet::from([key("b[s=1]")]));
        assert_eq!(references.results_of("[s=1]"), BTreeSet::new());
    }
}
