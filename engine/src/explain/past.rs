//! What earlier runs left behind: the key document of a stage's last result, the parameters it was made with, its
//! working state.

use std::cell::{OnceCell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

use cache::{Digest, KeyDocument, KeyEntry, OutputRecord, ResultRecord, Store};
use serde_json::Value;

use super::ExplainError;
use crate::artifact::{InputFacts, stored_files};
use crate::change::{ArtifactChange, StoredArtifact, file_changes};
use crate::history::{History, RunPlan};
use crate::keys::{KIND_OF, PIN, StageOutside};
use crate::parameter::NOT_KNOWN;
use crate::plan::{Plan, PlannedStage, ResolvedInput};
use crate::stage::WorkingState;

/// What is known of earlier results.
pub(crate) struct Past<'a> {
    pub plan: &'a Plan,
    /// The store, where there is one.
    pub store: Option<&'a Store>,
    pub history: &'a History,
    plans: RefCell<BTreeMap<String, Option<Rc<RunPlan>>>>,
    results: OnceCell<Vec<ResultRecord>>,
    artifacts: OnceCell<BTreeMap<Digest, OutputRecord>>,
}

/// A stage as it would run now.
pub(crate) struct Present<'a> {
    pub stage: &'a PlannedStage,
    /// Its key document, as far as it is known.
    pub document: &'a KeyDocument,
    pub outside: &'a StageOutside,
    /// The output that an input stands for, where it is made.
    pub output: &'a dyn Fn(&ResolvedInput) -> Option<OutputRecord>,
    pub facts: &'a InputFacts,
}

/// What the last result was made of.
pub(super) struct Before {
    pub document: KeyDocument,
    /// The parameters of that run, where its folder is still there.
    pub parameters: Option<Value>,
}

/// The last result of a stage.
pub(super) enum Last {
    Never,
    Gone,
    Known(Before),
}

impl<'a> Past<'a> {
    /// The past of a plan in a home's store and history.
    pub(crate) fn new(plan: &'a Plan, store: Option<&'a Store>, history: &'a History) -> Self {
        Self { plan, store, history, plans: RefCell::default(), results: OnceCell::new(), artifacts: OnceCell::new() }
    }

    /// How an input differs from the artefact that had an identity, where both are in the store.
    pub(super) fn input_change(
        &self,
        input: &ResolvedInput,
        old: &Digest,
        now: &OutputRecord,
    ) -> Option<ArtifactChange> {
        let store = self.store?;
        let old = self.artifact(old).filter(|old| old.kind == now.kind)?;
        let (before, after) = (stored(store, old)?, stored(store, now)?);
        let producer = &self.plan.stages[input.position];
        if let Some(change) = producer.bound.compare(&now.kind, &before, &after) {
            return Some(ArtifactChange::Rows(change));
        }
        let contents = |output: &OutputRecord| {
            let tree = stored_files(store, &output.tree, &output.identity).ok()?;
            Some(tree.files().iter().map(|file| (file.path.clone(), file.digest)).collect::<BTreeMap<_, _>>())
        };
        let changes = file_changes(&contents(old)?, &contents(now)?);
        (!changes.is_empty()).then_some(ArtifactChange::Files(changes))
    }

    /// An input as people name it: its stage, and the output where the stage has several.
    pub(crate) fn name_of(&self, input: &ResolvedInput) -> String {
        match self.plan.stages[input.position].outputs.len() {
            1 => input.stage.clone(),
            _ => format!("{}.{}", input.stage, input.output),
        }
    }

    /// How far an earlier attempt came, where it left anything.
    pub(crate) fn working_state(&self, now: &Present<'_>) -> Option<WorkingState> {
        let folder = self.store?.root().join("partial").join(now.document.working_key().to_string());
        folder.read_dir().ok()?.next()?.ok()?;
        Some(now.stage.bound.working_state(&folder, now.facts).unwrap_or(WorkingState::Unmeasured))
    }

    /// The last result of a stage, as far as it is known.
    pub(super) fn last(&self, stage: &PlannedStage) -> Result<Last, ExplainError> {
        let Some(last) = self.history.last_result(&self.plan.name, &stage.id)? else { return Ok(Last::Never) };
        let stored = self.store.map(|store| store.result(&last.key)).transpose()?.flatten();
        let record = match stored {
            Some(record) => Some(record),
            None => self.history.kept_record(&last.key)?,
        };
        let Some(record) = record else { return Ok(Last::Gone) };
        Ok(Last::Known(Before { document: record.key, parameters: self.parameters(&last.run, &stage.id) }))
    }

    /// The parameters that a stage had in a run.
    fn parameters(&self, run: &str, stage: &str) -> Option<Value> {
        let mut plans = self.plans.borrow_mut();
        let plan = plans.entry(run.to_owned()).or_insert_with(|| self.history.plan_of(run).map(Rc::new)).clone()?;
        plan.stages.iter().find(|known| known.id == stage).map(|known| known.parameters.clone())
    }

    /// Whether a result that is there may be the one of this key document, of which some inputs are not known yet.
    pub(super) fn may_be_there(&self, document: &KeyDocument) -> bool {
        self.results().iter().any(|record| may_become(document, &record.key))
    }

    /// The stored artefact of an identity.
    fn artifact(&self, identity: &Digest) -> Option<&OutputRecord> {
        let all = self.artifacts.get_or_init(|| {
            let outputs = self.results().iter().flat_map(|record| record.outputs.values());
            outputs.map(|output| (output.identity, output.clone())).collect()
        });
        all.get(identity)
    }

    /// The results of the store. Their records are gone through once, and only where something changed.
    fn results(&self) -> &[ResultRecord] {
        self.results.get_or_init(|| {
            let results = self.store.and_then(|store| store.results().ok()).unwrap_or_default();
            results.into_iter().map(|(_, record)| record).collect()
        })
    }
}

/// Whether a key document of which some inputs are not known yet may become this one.
fn may_become(now: &KeyDocument, then: &KeyDocument) -> bool {
    // What an unknown input or pin adds is not there yet. All else is in one order.
    let comes_with_input = |path: &str| path.starts_with(KIND_OF) || path.starts_with(PIN);
    let mut then = then.entries.iter();
    let is_there = |entry: &KeyEntry| {
        let same = then.find(|other| other.path == entry.path || !comes_with_input(&other.path));
        same.is_some_and(|same| same.path == entry.path && (entry.value == NOT_KNOWN || same.value == entry.value))
    };
    now.entries.iter().all(is_there) && then.all(|entry| comes_with_input(&entry.path))
}

/// A stored artefact's files, if its list of them is there.
fn stored(store: &Store, output: &OutputRecord) -> Option<StoredArtifact> {
    let tree = stored_files(store, &output.tree, &output.identity).ok()?;
    let files = tree.files().iter();
    let files: BTreeMap<String, PathBuf> =
        files.map(|file| (file.path.clone(), store.place(&file.digest).path().to_owned())).collect();
    Some(StoredArtifact { facts: output.facts.clone(), files })
}

#[cfg(test)]
mod tests {
    use cache::Class;

    use super::*;

    #[test]
    fn a_document_becomes_one_that_differs_in_what_is_not_known_alone() {
        let of = |entries: &[(&str, &str)]| {
            let mut document = KeyDocument::default();
            entries.iter().for_each(|(path, value)| document.push(*path, *value, Class::Semantic));
            document
        };
        let now = of(&[("@kind", "sum"), ("of", NOT_KNOWN), ("plus", "1")]);
        for then in [
            &[("@kind", "sum"), ("of", "x"), ("plus", "1")][..],
            &[("@kind", "sum"), ("of", "x"), ("plus", "1"), ("@pins.a", "y"), ("@kind_of.of", "number")],
            &[("@kind", "sum"), ("@pins.a", "y"), ("of", "x"), ("plus", "1")],
        ] {
            assert!(may_become(&now, &of(then)), "{then:?}");
        }
        for then in [
            &[("@kind", "sum"), ("of", "x"), ("plus", "2")][..],
            &[("@kind", "sum"), ("of", "x")],
            &[("@kind", "sum"), ("of", "x"), ("plus", "1"), ("more", "1")],
            &[("@kind", "sum"), ("less", "1"), ("of", "x"), ("plus", "1")],
        ] {
            assert!(!may_become(&now, &of(then)), "{then:?}");
        }
    }
}
