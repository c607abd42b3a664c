//! The checks of a plan before anything runs: the same ones, on the same facts, for `validate`, `plan` and `run`.
//!
//! Facts flow from stage to stage: those of results that are there, of local files, and of what servers said about what
//! is pinned ([`crate::metadata`]). Each stage without a result is checked against those of its inputs. Nothing is run,
//! fetched or written here, and of each file little is read.

mod known;

use std::collections::{BTreeMap, HashSet};
use std::env::VarError;
use std::path::{Path, PathBuf};

use cache::{Digest, SeenResult, StatCache};

use crate::executor::ExecutorKind;
use crate::file::problem::{Problem, Severity};
use crate::file::source::Span;
use crate::forecast::KnownFacts;
use crate::home::Home;
use crate::keys::{self, Reads, StageOutside};
use crate::local_files::{Extent, LocalFile, LocalFiles, PINNED};
use crate::pin::Pinned;
use crate::plan::{Plan, Rejected, Wanted};
use known::{Known, KnownStage};

/// What the checks of a plan found.
#[derive(Debug, Default)]
pub struct Findings {
    /// By the place of the stage in the plan; without one where it is about the plan as a whole.
    found: Vec<(Option<usize>, Problem)>,
    /// Stages of which a server could tell more.
    pub(crate) unseen: Vec<Unseen>,
    pub(crate) seen: AlreadySeen,
}

/// What was learnt of source files and of results by the way: who goes on to run the plan need not look at them again.
#[derive(Debug, Default)]
pub(crate) struct AlreadySeen {
    pub files: StatCache,
    /// What each stage reads from outside, in the order of the plan, where it is as it was when it was last read.
    pub outside: Vec<Option<StageOutside>>,
    /// The result of each stage, in the order of the plan, where the store has one.
    pub results: Vec<Option<SeenResult>>,
}

/// A stage without a result whose pinned files nobody has looked at: facts of them are still to be had.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Unseen {
    /// Its place in the plan.
    pub stage: usize,
    /// The key of its result.
    pub key: Digest,
    pub pinned: Pinned,
}

/// Checks a plan. `home` is where results are, if there is one; `executor` is where the command line wants stages to
/// run, if it says so. What the plan itself has said already is not said again.
pub fn check(plan: &Plan, home: Option<&Home>, executor: Option<ExecutorKind>) -> Findings {
    let mut flow = Flow::new(plan, home.map(Known::open), executor);
    // What a check of the plan as a whole finds is said here, by `flow.report(None, problem)`.
    (0..plan.stages.len()).for_each(|stage| flow.stage(stage));
    flow.findings.seen.files = flow.known.map(|known| known.files).unwrap_or_default();
    flow.findings
}

/// Adds to the problems of a file what its data flow shows, as far as a plan could be made of it: one look at the file
/// tells all.
pub fn complete(mut rejected: Rejected, home: Option<&Home>) -> Rejected {
    if let Some(plan) = rejected.readable.take() {
        rejected.problems.extend(check(&plan, home, None).into_problems());
        rejected.problems.sort_by_key(Problem::place);
    }
    rejected
}

impl Findings {
    /// Whether nothing keeps the plan from being run.
    pub fn are_fine(&self) -> bool {
        self.found.iter().all(|(_, problem)| problem.severity == Severity::Warning)
    }

    /// All that was found, in the order of the text.
    pub fn into_problems(self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self.found.into_iter().map(|(_, problem)| problem).collect();
        problems.sort_by_key(Problem::place);
        problems
    }

    /// What was found about each stage, by its place in the plan.
    pub fn by_stage(&self, plan: &Plan) -> Vec<Vec<Problem>> {
        let mut of_stages = vec![Vec::new(); plan.stages.len()];
        for (stage, problem) in self.found.iter().filter_map(|(stage, problem)| Some(((*stage)?, problem))) {
            of_stages[stage].push(problem.clone());
        }
        of_stages
    }
}

/// The way through a plan.
struct Flow<'a> {
    plan: &'a Plan,
    known: Option<Known>,
    executor: Option<ExecutorKind>,
    facts: KnownFacts,
    /// What was said already, here or with the plan.
    said: HashSet<(&'static str, Span, String)>,
    findings: Findings,
}

impl<'a> Flow<'a> {
    fn new(plan: &'a Plan, known: Option<Known>, executor: Option<ExecutorKind>) -> Self {
        Self {
            plan,
            known,
            executor,
            facts: KnownFacts::default(),
            said: plan.warnings.iter().map(identity).collect(),
            findings: Findings::default(),
        }
    }

    fn stage(&mut self, at: usize) {
        let stage = &self.plan.stages[at];
        let reads = keys::look_outside(stage, self.plan);
        let known = self.known.as_mut().map(|known| known.look_up(stage, &reads));
        let known = known.unwrap_or_default();
        let is_made = known.outputs().is_some();
        if let Some(outputs) = known.outputs() {
            // What is there was checked when it was made; its facts are whole.
            self.facts.made(&stage.id, outputs);
        }
        let KnownStage { result, key, outside, .. } = known;
        self.findings.seen.outside.push(outside);
        self.findings.seen.results.push(result);
        if is_made {
            return;
        }
        let is_whole = reads.problems.is_empty();
        reads.problems.iter().for_each(|problem| self.report(Some(at), problem.clone()));
        if stage.wanted == Wanted::Given {
            return;
        }
        self.machine(at);
        let files = if is_whole { self.files(at, reads, key) } else { LocalFiles::default() };
        self.facts(at, &files);
    }

    /// Checks a stage against the facts of its inputs, and says what is known of its outputs.
    fn facts(&mut self, at: usize, files: &LocalFiles) {
        let stage = &self.plan.stages[at];
        let inputs = self.facts.of_inputs(stage);
        let forecast = stage.forecast(&inputs.ahead(files, stage.span));
        let checked = stage.bound.check(&inputs.certain, stage.span);
        for problem in forecast.problems.into_iter().chain(checked) {
            self.report(Some(at), problem);
        }
        self.facts.foretold(&stage.id, &forecast.outputs);
    }

    /// What a stage needs of the place where it is started, and does not find there.
    fn machine(&mut self, at: usize) {
        let stage = &self.plan.stages[at];
        for secret in stage.bound.secrets() {
            let name = &secret.variable;
            let (Some(field), Err(error)) = (secret.field, std::env::var(name)) else { continue };
            let variable = format!("the environment variable `{name}`, which `{field}` names,");
            let problem = match error {
                VarError::NotUnicode(_) => {
                    let message = format!("{variable} is set to what is not UTF-8");
                    Problem::error("bad-value", stage.span, message, "not UTF-8")
                }
                VarError::NotPresent => {
                    let message = format!("{variable} is not set");
                    let file = self.plan.file.display();
                    Problem::error("unknown-variable", stage.span, message, "not set")
                        .with_help(format!("set it where the program is started: `{name}=… pipeline run {file}`"))
                }
            };
            self.report(Some(at), problem.at(field));
        }
        if self.plan.executor_of(at, self.executor).0 == ExecutorKind::Local {
            for problem in stage.bound.lacks(stage.span) {
                self.report(Some(at), problem);
            }
        }
    }

    /// What a stage reads from outside: the files on this machine, and those on a server as far as their metadata is
    /// here.
    fn files(&mut self, at: usize, reads: Reads, key: Option<Digest>) -> LocalFiles {
        let mut files: BTreeMap<String, Vec<LocalFile>> = BTreeMap::new();
        for (role, found) in reads.files {
            let named = |(path, relative): (PathBuf, String)| LocalFile {
                name: shown(&path, &self.plan.folder),
                path,
                extent: Extent::Whole,
                relative,
            };
            files.insert(role, found.into_iter().map(named).collect());
        }
        if let (Some(known), Some(key), [request]) = (&self.known, key, reads.pins.as_slice()) {
            match (known.metadata.look(&key, request), known.pinned(request)) {
                (Some(seen), _) => drop(files.insert(PINNED.to_owned(), seen)),
                (None, Some(pinned)) => self.findings.unseen.push(Unseen { stage: at, key, pinned: pinned.clone() }),
                (None, None) => {}
            }
        }
        LocalFiles(files)
    }

    /// Says what is wrong with a stage, by its place, or with the plan; once.
    fn report(&mut self, at: Option<usize>, problem: Problem) {
        let problem = match at {
            Some(at) => problem.placed(&self.plan.stages[at].field_spans),
            None => problem,
        };
        if self.said.insert(identity(&problem)) {
            self.findings.found.push((at, problem));
        }
    }
}

/// What tells one problem from another: see [`Problem::says_the_same`].
fn identity(problem: &Problem) -> (&'static str, Span, String) {
    (problem.code, problem.span, problem.message.clone())
}

/// A path as seen from the pipeline file.
fn shown(path: &Path, base: &Path) -> String {
    let plain: PathBuf = path.components().collect();
    plain.strip_prefix(base).unwrap_or(&plain).display().to_string()
}
