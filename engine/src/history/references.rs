//! Which results the recorded runs refer to: what a clean-up keeps, and whom it can name.

use std::collections::{BTreeMap, BTreeSet};

use cache::Digest;
use serde::Serialize;

use super::index::{History, HistoryError};

/// A stage of a pipeline.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct StageOf {
    /// The pipeline's name.
    pub pipeline: String,
    /// The stage's id.
    pub stage: String,
}

/// What the recorded runs refer to.
#[derive(Debug, Default)]
pub struct References {
    stages: BTreeMap<Digest, BTreeSet<StageOf>>,
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
        history.each_result(|run, pipeline, stage, key, seconds| {
            let runs = references.runs.entry(pipeline.to_owned()).or_default();
            if last_run != run {
                run.clone_into(&mut last_run);
                runs.push(BTreeSet::new());
            }
            if let Some(newest) = runs.last_mut() {
                newest.insert(key);
            }
            let stage = StageOf { pipeline: pipeline.to_owned(), stage: stage.to_owned() };
            references.stages.entry(key).or_default().insert(stage);
            if let Some(seconds) = seconds {
                references.seconds.entry(key).or_insert(seconds);
            }
        })?;
        Ok(references)
    }

    /// The results that the newest runs of each pipeline refer to. A run without any result does not count.
    pub fn of_newest_runs(&self, count: usize) -> BTreeSet<Digest> {
        self.runs.values().flat_map(|runs| runs.iter().take(count)).flatten().copied().collect()
    }

    /// The stages whose result a key is, or was.
    pub fn stages_of(&self, key: &Digest) -> impl Iterator<Item = &StageOf> {
        self.stages.get(key).into_iter().flatten()
    }

    /// The keys of every result that a stage had: by its id, or by `pipeline/stage`.
    pub fn results_of(&self, name: &str) -> BTreeSet<Digest> {
        let named = |stage: &StageOf| {
            stage.stage == name || name.strip_prefix(&stage.pipeline) == Some(&format!("/{}", stage.stage))
        };
        self.stages.iter().filter(|(_, stages)| stages.iter().any(named)).map(|(key, _)| *key).collect()
    }

    /// Every stage that has had a result.
    pub fn stages(&self) -> BTreeSet<&StageOf> {
        self.stages.values().flatten().collect()
    }
}
