//! What can be known of a plan's data before anything runs: facts of local sources, and of results that are there, flow
//! from stage to stage, and each stage is checked against those of its inputs.
//!
//! Nothing is run, fetched, hashed or written, and of each file little is read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cache::{Digest, OutputRecord, Store};

use crate::artifact::InputFacts;
use crate::file::problem::Problem;
use crate::home::Home;
use crate::keys::{self, StageOutside, stage_key};
use crate::lock_file::{self, LockFile};
use crate::plan::{Plan, PlannedStage, ResolvedInput};
use crate::preflight::EXPECTED;
use crate::stage::Outside;
use crate::survey::{LocalFile, LocalFiles};

/// What is wrong with a plan, and what a user should hear, as far as its sources and the results in its home tell. What the plan
/// itself has said already is not said again.
pub fn survey(plan: &Plan, home: Option<&Home>) -> Vec<Problem> {
    let mut surveyor = Surveyor::new(plan, home.and_then(Results::open));
    plan.stages.iter().for_each(|stage| surveyor.stage(stage));
    surveyor.problems
}

struct Surveyor<'a> {
    plan: &'a Plan,
    base: PathBuf,
    results: Option<Results>,
    /// Facts by `stage.output` that are certain.
    certain: InputFacts,
    /// The same, and those that are only expected; marked as such.
    expected: InputFacts,
    problems: Vec<Problem>,
}

impl<'a> Surveyor<'a> {
    fn new(plan: &'a Plan, results: Option<Results>) -> Self {
        let (certain, expected) = (InputFacts::new(), InputFacts::new());
        Self { plan, base: keys::base_folder(plan), results, certain, expected, problems: Vec::new() }
    }

    fn stage(&mut self, stage: &PlannedStage) {
        let local = self.local_files(stage);
        if let Some(outputs) = self.results.as_mut().and_then(|results| results.of(stage)) {
            // What is there was checked when it was made; its facts are whole.
            for (output, record) in outputs {
                self.certain.insert(format!("{}.{output}", stage.id), record.facts.clone());
                self.expected.insert(format!("{}.{output}", stage.id), record.facts);
            }
            return;
        }
        let inputs = of_inputs(stage, &self.certain);
        let survey = local.map(|local| stage.bound.survey(&inputs, &local, stage.span)).unwrap_or_default();
        let ahead = stage.preflight(&of_inputs(stage, &self.expected));
        let checked = stage.bound.check(&inputs, stage.span);
        for problem in survey.problems.into_iter().chain(checked).chain(ahead.warnings) {
            self.report(problem.placed(&stage.field_spans));
        }
        let mut expected = ahead.outputs;
        for (output, facts) in survey.outputs {
            expected.entry(output.clone()).or_default().extend(facts.clone());
            self.certain.insert(format!("{}.{output}", stage.id), facts);
        }
        for (output, mut facts) in expected {
            facts.insert(EXPECTED.to_owned(), true.into());
            self.expected.insert(format!("{}.{output}", stage.id), facts);
        }
    }

    fn report(&mut self, problem: Problem) {
        let said = |said: &Problem| said.says_the_same(&problem);
        if !self.plan.warnings.iter().any(said) && !self.problems.iter().any(said) {
            self.problems.push(problem);
        }
    }

    /// The files that a stage reads; nothing where some are missing, which is reported.
    fn local_files(&mut self, stage: &PlannedStage) -> Option<LocalFiles> {
        let mut local = LocalFiles::default();
        let mut missing = false;
        for outside in stage.bound.outside() {
            let Outside::Files { role, pattern, span } = outside else { continue };
            match keys::find_files(&keys::folder_of(self.plan, span), &pattern, span) {
                Ok(files) => {
                    let named = |(path, relative): (PathBuf, String)| LocalFile {
                        name: shown(&path, &self.base),
                        path,
                        relative,
                    };
                    local.0.insert(role, files.into_iter().map(named).collect());
                }
                Err(problem) => {
                    missing = true;
                    self.report(*problem);
                }
            }
        }
        (!missing).then_some(local)
    }
}

/// A path as seen from the pipeline file.
fn shown(path: &Path, base: &Path) -> String {
    let plain: PathBuf = path.components().collect();
    plain.strip_prefix(base).unwrap_or(&plain).display().to_string()
}

/// The facts of a stage's inputs, as far as there are any.
fn of_inputs(stage: &PlannedStage, facts: &InputFacts) -> InputFacts {
    let names = stage.inputs.iter().map(|input| format!("{}.{}", input.stage, input.output));
    names.filter_map(|name| Some((name.clone(), facts.get(&name)?.clone()))).collect()
}

/// Results in a home, found by keys that need no file to be hashed: those of downloads that are pinned, and what was made of them.
struct Results {
    store: Store,
    lock: LockFile,
    /// By `stage.output`.
    identities: BTreeMap<String, Digest>,
}

impl Results {
    fn open(home: &Home) -> Option<Self> {
        let store = Store::look(home.store()).ok()??;
        let lock = LockFile::read(&home.lock_file()).ok()?;
        Some(Self { store, lock, identities: BTreeMap::new() })
    }

    fn of(&mut self, stage: &PlannedStage) -> Option<BTreeMap<String, OutputRecord>> {
        let mut outside = StageOutside::default();
        for read in stage.bound.outside() {
            let Outside::Pin(request) = read else { return None };
            outside.pins.insert(lock_file::name(&request), self.lock.get(&request)?.to_owned());
        }
        let known = |input: &ResolvedInput| self.identities.get(&format!("{}.{}", input.stage, input.output)).copied();
        let key = stage_key(stage, &outside, known);
        let record = (key.unknown == 0).then(|| self.store.result(&key.document.result_key()).ok().flatten())??;
        for (output, made) in &record.outputs {
            self.identities.insert(format!("{}.{output}", stage.id), made.identity);
        }
        Some(record.outputs)
    }
}
