//! File to plan: each step reports all it finds, and the plan exists only where nothing was found.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use super::bind::bind;
use super::declared::File;
use super::entry::{self, Document, StageEntry};
use super::expand::expand;
use super::field_spans::field_spans;
use super::include;
use super::left_out::LeftOuts;
use super::of_children;
use super::one_value;
use super::order;
use super::publish;
use super::qualify::qualify;
use super::read_text::read_text;
use super::readable::Mistakes;
use super::resolve::{Bound, resolve};
use super::slots;
use super::smoke::{self, Scale};
use super::unused;
use super::{Plan, PlannedStage, Reads, Rejected, Wanted};
use crate::file::interpolate::interpolate;
use crate::file::overrides;
use crate::file::parse::parse;
use crate::file::problem::{Problem, Severity};
use crate::file::source::{Sources, Span};
use crate::file::tree::{Node, Value};
use crate::parameter::Reader;
use crate::stage::{InputFacts, Outside, Registry};
use crate::suggest;

/// Reads a pipeline file, puts the overrides into it and checks everything that can be checked without running.
///
/// # Errors
/// Every problem of the file at once; of a text that is not YAML, or not UTF-8, that one alone.
pub fn load(path: &Path, overrides: &[String], registry: &Registry) -> Result<Plan, Rejected> {
    let text = read_text(path)?;
    load_text(path, &text, overrides, registry)
}

/// [`load`] for a run of this scale.
///
/// # Errors
/// As there.
pub fn load_at(scale: Scale, path: &Path, overrides: &[String], registry: &Registry) -> Result<Plan, Rejected> {
    let text = read_text(path)?;
    load_with(path, &text, overrides, registry, scale, &|name| std::env::var(name).ok())
}

/// [`load`] with the text of the file given.
///
/// # Errors
/// As there.
pub fn load_text(path: &Path, text: &str, overrides: &[String], registry: &Registry) -> Result<Plan, Rejected> {
    load_with(path, text, overrides, registry, Scale::Full, &|name| std::env::var(name).ok())
}

/// [`load_text`] with the environment given.
pub(super) fn load_with(
    path: &Path,
    text: &str,
    overrides: &[String],
    registry: &Registry,
    scale: Scale,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Plan, Rejected> {
    suggest::limited(|| load_limited(path, text, overrides, registry, scale, env))
}

fn load_limited(
    path: &Path,
    text: &str,
    overrides: &[String],
    registry: &Registry,
    scale: Scale,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Plan, Rejected> {
    let mut sources = Sources::default();
    let source = sources.add(path.display().to_string(), text);
    let mut problems = Vec::new();
    let mut root = match parse(source, text, &mut problems) {
        Ok(root) => root,
        Err(problem) => return Err(Rejected::new(sources, vec![*problem])),
    };
    if let Some(problem) = not_a_pipeline(&root, Span { source, offset: 0, len: 0 }) {
        problems.push(problem);
        return Err(Rejected::new(sources, in_order(problems)));
    }
    let takes_one_value = |uses: &str, path: &[&str]| one_value::takes_one_value(registry, uses, path);
    include::lengthen(&mut root);
    let (of_includes, overrides): (Vec<String>, Vec<String>) =
        overrides.iter().cloned().partition(|text| text.trim_start().starts_with("include."));
    overrides::apply(&mut root, &of_includes, &takes_one_value, &mut sources, &mut problems);
    let mut scopes = include::expand(&mut root, path, &mut sources, &mut problems);
    overrides::apply(&mut root, &overrides, &takes_one_value, &mut sources, &mut problems);
    let kinds = |uses: &str| placeholders(registry, uses);
    let variables = RefCell::new(BTreeMap::new());
    let env = |name: &str| {
        let value = env(name);
        variables.borrow_mut().insert(name.to_owned(), value.clone());
        value
    };
    let interpolated = interpolate(&mut root, &mut scopes, &sources, &env, &kinds, &mut problems);
    if !scopes.is_empty() {
        qualify(&mut root, registry);
    }

    if scale == Scale::Smoke {
        smoke::shrink(&mut root, registry);
    }

    let mut found = Vec::new();
    let file = File { root: &root, registry, scale, of_axes: &interpolated.of_axes };
    let checked = check(&file, &mut found);
    interpolated.refine(&mut found);
    problems.extend(found);
    let problems = in_order(problems);
    let Some(mut checked) = checked else { return Err(Rejected::new(sources, problems)) };
    if problems.iter().all(|problem| problem.severity == Severity::Warning) {
        let plan = checked.into_plan(path, sources, variables.into_inner(), problems);
        return Ok(if scale == Scale::Smoke { smoke::marked(plan, registry) } else { plan });
    }
    checked.keep_readable(&Mistakes::of(&problems, &interpolated));
    let readable = checked.into_plan(path, sources.clone(), variables.into_inner(), problems.clone());
    Err(Rejected { sources, problems, readable: Some(Box::new(readable)) })
}

/// What a stage kind replaces in its texts itself.
fn placeholders(registry: &Registry, uses: &str) -> &'static [&'static str] {
    registry.get(uses).map_or(&[], |kind| kind.placeholders())
}

/// A file in which every reference is resolved, and the order of its stages.
struct Checked {
    document: Document,
    bound: Vec<Bound>,
    publish: Vec<super::Publish>,
    order: Vec<usize>,
    left_out: LeftOuts,
}

/// Checks the tree; `None` where nothing was left to make a plan of.
fn check(file: &File<'_>, problems: &mut Vec<Problem>) -> Option<Checked> {
    let mut reader = Reader::default();
    let mut document = entry::read(file.root, &mut reader);
    problems.append(&mut reader.problems);
    let bind = |stage| {
        let bound = bind(&stage, file.registry);
        (stage, bound)
    };
    let candidates = document.stages.into_iter().map(bind).collect();
    let (stages, mut bound): (Vec<StageEntry>, Vec<Bound>) = expand(candidates, file, problems).into_iter().unzip();
    document.stages = stages;
    resolve(&document.stages, &mut bound);
    slots::check(&document, problems);
    for (stage, bound) in document.stages.iter().zip(&mut bound) {
        if let Some(stage_kind) = &bound.kind {
            let found = stage_kind.check(&InputFacts::new(), stage.with.span);
            if found.iter().any(|problem| problem.field.is_some()) {
                let spans = field_spans(&stage.with);
                bound.problems.extend(found.into_iter().map(|problem| problem.placed(&spans)));
            } else {
                bound.problems.extend(found);
            }
        }
    }
    problems.extend(of_children::problems(&document.stages, &mut bound));
    let publish = publish::resolve(&document, &bound, file.of_axes, problems);
    let order = order::order(&document.stages, &bound, problems)?;
    let left_out = LeftOuts::find(&document.stages, &bound, &order);
    unused::warn(&document.stages, &bound, &publish, &left_out, file.registry, problems);
    Some(Checked { document, bound, publish, order, left_out })
}

impl Checked {
    /// Leaves the stages whose parameters are without a mistake.
    fn keep_readable(&mut self, mistakes: &Mistakes<'_>) {
        let stages = self.document.stages.iter().zip(&self.bound);
        let kept: Vec<bool> = stages.map(|(stage, bound)| bound.kind.is_some() && !mistakes.touch(stage)).collect();
        self.order.retain(|place| kept[*place]);
        for bound in &mut self.bound {
            bound.waits_for.retain(|wait| kept[wait.stage]);
        }
    }

    fn into_plan(
        mut self,
        path: &Path,
        sources: Sources,
        variables: BTreeMap<String, Option<String>>,
        warnings: Vec<Problem>,
    ) -> Plan {
        self.order.retain(|place| !self.left_out.has(*place));
        let graph = order::graph(&self.document.stages, &self.bound, &self.order);
        let reads = reads(&self.document.stages, &self.bound);
        let left_out = self.left_out.into_list(&self.document.stages, &mut self.publish);
        let name = self.document.name.map(|name| name.text);
        let name = name.unwrap_or_else(|| path.file_stem().unwrap_or_default().to_string_lossy().into_owned());
        let mut declared: Vec<Option<(StageEntry, Bound)>> =
            self.document.stages.into_iter().zip(self.bound.drain(..)).map(Some).collect();
        let stages =
            self.order.iter().filter_map(|at| declared[*at].take()).map(|(stage, bound)| planned(stage, bound));
        let stages = stages.collect();
        let slots = self.document.slots;
        let executor = self.document.executor;
        let publish = self.publish;
        let folder = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let remote = self.document.remote.and_then(|remote| remote.settings(folder.parent()?).ok());
        Plan {
            name,
            file: path.to_owned(),
            sources,
            stages,
            graph,
            publish,
            reads,
            slots,
            executor,
            left_out,
            remote,
            variables,
            warnings,
        }
    }
}

/// What the stages of the file read from outside.
fn reads(stages: &[StageEntry], bound: &[Bound]) -> Vec<Reads> {
    // The children of a sweep have much in common.
    let (mut reads, mut seen) = (Vec::new(), HashSet::new());
    for (stage, bound) in stages.iter().zip(bound) {
        for outside in bound.kind.iter().flat_map(|kind| kind.outside()) {
            let Outside::Files { pattern, span, .. } = outside else { continue };
            if seen.insert((pattern.clone(), span)) {
                reads.push(Reads { stage: stage.id.text.clone(), pattern, span });
            }
        }
    }
    reads
}

fn planned(stage: StageEntry, bound: Bound) -> PlannedStage {
    let measured = stage.axes.iter().filter(|axis| axis.measured).map(|axis| axis.name.clone()).collect();
    PlannedStage {
        id: stage.id.text,
        declared: stage.declared,
        axes: stage.axes.into_iter().map(|axis| (axis.name, axis.value)).collect(),
        measured,
        kind: bound.name,
        version: bound.version,
        bound: bound.kind.expect("a stage without problems has all its parameters"),
        parameters: stage.with.to_json(),
        outputs: bound.outputs.unwrap_or_default(),
        inputs: bound.inputs,
        needs: stage.needs.into_iter().map(|need| need.text).collect(),
        resources: stage.resources,
        retries: stage.retries,
        timeout: stage.timeout,
        executor: stage.executor,
        profile: stage.profile,
        smoke: false,
        wanted: Wanted::default(),
        span: stage.with.span,
        field_spans: field_spans(&stage.with),
    }
}

fn not_a_pipeline(root: &Node, start: Span) -> Option<Problem> {
    let help = "a pipeline file begins with `version: 1` and declares `stages:`";
    match &root.value {
        Value::Map(_) => None,
        Value::Null => Some(Problem::error("empty-file", start, "the file is empty", "nothing here").with_help(help)),
        _ => Some(
            Problem::error(
                "not-a-mapping",
                root.span,
                format!("the file holds {}", root.describe()),
                "expected a mapping",
            )
            .with_help(help),
        ),
    }
}

/// Sorted by place, each once.
fn in_order(mut problems: Vec<Problem>) -> Vec<Problem> {
    problems.sort_by_key(|problem| (problem.span.source.0, problem.span.offset, problem.span.len));
    let mut seen = HashSet::with_capacity(problems.len());
    problems.retain(|problem| seen.insert((problem.code, problem.span, problem.message.clone())));
    problems
}
