//! File to plan: each step reports all it finds, and the plan exists only where nothing was found.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::env::VarError;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::libc;

use super::declared::File as PipelineFile;
use super::entry::{self, Document, StageEntry};
use super::expand::expand;
use super::fields::{field_spans, point_below_with};
use super::include::qualify;
use super::order::LeftOuts;
use super::resolve::bind;
use super::resolve::{Bound, Why, resolve};
use super::smoke::{self, Scale};
use super::{Plan, PlannedStage, Reads, Rejected, ResolvedInput, Wanted, as_written, expand, gate, include, matrix};
use super::{order, publish, resources};
use crate::file::foreign::foreign_file;
use crate::file::interpolate::{Interpolated, interpolate};
use crate::file::overrides;
use crate::file::parse::{MAX_BYTES, parse};
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
    load_with(path, &text, overrides, registry, scale, &|name| std::env::var(name))
}

/// [`load`] with the text of the file given.
///
/// # Errors
/// As there.
pub fn load_text(path: &Path, text: &str, overrides: &[String], registry: &Registry) -> Result<Plan, Rejected> {
    load_with(path, text, overrides, registry, Scale::Full, &|name| std::env::var(name))
}

/// [`load_text`] with the environment given.
pub(super) fn load_with(
    path: &Path,
    text: &str,
    overrides: &[String],
    registry: &Registry,
    scale: Scale,
    env: &dyn Fn(&str) -> Result<String, VarError>,
) -> Result<Plan, Rejected> {
    suggest::limited(|| load_limited(path, text, overrides, registry, scale, env))
}

fn load_limited(
    path: &Path,
    text: &str,
    overrides: &[String],
    registry: &Registry,
    scale: Scale,
    env: &dyn Fn(&str) -> Result<String, VarError>,
) -> Result<Plan, Rejected> {
    // Neither records nor jobs could hold it.
    if std::path::absolute(path).is_ok_and(|path| path.to_str().is_none()) {
        let help = Some("rename the file, or the folder that it is in".to_owned());
        return Err(unread(path, "file-unreadable", format!("the path of `{}` is not UTF-8", path.display()), help));
    }
    let mut sources = Sources::default();
    let source = sources.add(path.display().to_string(), text);
    let mut problems = Vec::new();
    let mut root = match parse(source, text, &mut problems) {
        Ok(root) => root,
        Err(problem) => return Err(Rejected::new(sources, vec![*problem])),
    };
    let name = path.display().to_string();
    let start = Span { source, offset: 0, len: 0 };
    if let Some(problem) = not_a_pipeline(&root, start).or_else(|| foreign_file(&root, &name)) {
        problems.push(problem);
        return Err(Rejected::new(sources, in_order(problems)));
    }
    let takes_one_value = |uses: &str, path: &[&str]| matrix::takes_one_value(registry, uses, path);
    include::lengthen(&mut root);
    let (of_includes, overrides): (Vec<String>, Vec<String>) = overrides
        .iter()
        .cloned()
        .partition(|text| ["include.", "include="].iter().any(|start| text.trim_start().starts_with(start)));
    let mut replaced = overrides::apply(&mut root, &of_includes, &takes_one_value, &mut sources, &mut problems);
    let mut scopes = include::expand(&mut root, path, &mut sources, &mut problems);
    replaced.extend(overrides::apply(&mut root, &overrides, &takes_one_value, &mut sources, &mut problems));
    as_written::keep(&mut root, registry, &sources);
    let kinds = |uses: &str| placeholders(registry, uses);
    let variables = RefCell::new(BTreeMap::new());
    let env = |name: &str| {
        let value = env(name);
        variables.borrow_mut().insert(name.to_owned(), value.clone().ok());
        value
    };
    let interpolated = interpolate(&mut root, (&mut scopes, &replaced), &sources, &env, &kinds, &mut problems);
    if !scopes.is_empty() {
        qualify(&mut root, registry);
    }

    if scale == Scale::Smoke {
        smoke::shrink(&mut root, registry);
    }

    let mut found = Vec::new();
    let file = PipelineFile { root: &root, registry, scale, of_axes: &interpolated.of_axes };
    let checked = check(&file, &mut found);
    interpolated.refine(&mut found);
    problems.extend(found);
    overrides::quote_for_shell(&mut problems, &sources);
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
    registry.get(uses).map_or(&[], |kind| kind.placeholders)
}

/// A file in which every reference is resolved, and the order of its stages.
struct Checked {
    document: Document,
    bound: Vec<Bound>,
    gates: Vec<super::Gate>,
    publish: Vec<super::Publish>,
    order: Vec<usize>,
    left_out: LeftOuts,
}

/// Checks the tree; `None` where nothing was left to make a plan of.
fn check(file: &PipelineFile<'_>, problems: &mut Vec<Problem>) -> Option<Checked> {
    let mut reader = Reader::default();
    let mut document = entry::read(file.root, &mut reader);
    point_below_with(file.root, file.registry, &mut reader.problems);
    problems.append(&mut reader.problems);
    let bind = |stage| {
        let bound = bind(&stage, file.registry);
        (stage, bound)
    };
    let candidates = document.stages.into_iter().map(bind).collect();
    let (candidates, unread) = expand(candidates, file, problems);
    let (stages, mut bound): (Vec<StageEntry>, Vec<Bound>) = candidates.into_iter().unzip();
    document.stages = stages;
    resolve(&document.stages, &mut bound);
    resources::check_slots(&document, problems);
    for (stage, bound) in document.stages.iter().zip(&mut bound) {
        if let Some(stage_kind) = &bound.kind {
            let mut found = stage_kind.check(&InputFacts::new(), stage.with.span);
            let device = stage.resources.device.into_iter();
            found.extend(device.flat_map(|device| stage_kind.check_on(device, stage.with.span)));
            if found.iter().any(|problem| problem.field.is_some()) {
                let spans = field_spans(&stage.with);
                bound.problems.extend(found.into_iter().map(|problem| problem.placed(&spans)));
            } else {
                bound.problems.extend(found);
            }
        }
    }
    problems.extend(expand::problems_of_children(&document.stages, &mut bound));
    let targets = publish::Targets::new(&document.stages, &bound);
    let publish = publish::resolve(&document, &targets, (file.of_axes, &unread), problems);
    let gates = gate::resolve(&document, &targets, problems);
    gate::check(&gates, &document.stages, &bound, problems);
    let order = order::order(&document.stages, &bound, problems)?;
    let left_out = LeftOuts::find(&document.stages, &bound, &order);
    order::warn_unused(&document.stages, &bound, (&publish, &gates), &left_out, file.registry, problems);
    Some(Checked { document, bound, gates, publish, order, left_out })
}

impl Checked {
    /// Leaves the stages whose parameters are without a mistake.
    fn keep_readable(&mut self, mistakes: &Mistakes<'_>) {
        let stages = self.document.stages.iter().zip(&self.bound);
        let kept: Vec<bool> = stages.map(|(stage, bound)| bound.kind.is_some() && !mistakes.touch(stage)).collect();
        self.order.retain(|place| kept[*place]);
        for bound in &mut self.bound {
            bound.waits_for.retain(|wait| kept[wait.stage]);
            bound.inputs.retain(|input| kept[input.position]);
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
        let mut positions = vec![usize::MAX; self.bound.len()];
        self.order.iter().enumerate().for_each(|(position, place)| positions[*place] = position);
        let reads = reads(&self.document.stages, &self.bound);
        let left_out = self.left_out.into_list(&self.document.stages, &mut self.publish);
        let name = self.document.name.map(|name| name.text);
        let name = name.unwrap_or_else(|| path.file_stem().unwrap_or_default().to_string_lossy().into_owned());
        let mut declared: Vec<Option<(StageEntry, Bound)>> =
            self.document.stages.into_iter().zip(self.bound.drain(..)).map(Some).collect();
        let in_order = self.order.iter().filter_map(|place| declared[*place].take());
        let stages = in_order.map(|(stage, bound)| planned(stage, bound, &positions)).collect();
        let slots = self.document.slots;
        let executor = self.document.executor;
        let publish = self.publish;
        let folder = folder_of(path);
        let remote = self.document.remote.and_then(|remote| remote.settings(&folder).ok());
        let track = self.document.track;
        let plan = Plan {
            name,
            file: path.to_owned(),
            folder,
            sources,
            stages,
            gates: self.gates,
            publish,
            withheld: Vec::new(),
            reads,
            slots,
            executor,
            left_out,
            remote,
            track,
            variables,
            warnings,
        };
        plan.withholding()
    }
}

/// The folder of a file, absolute.
pub(super) fn folder_of(file: &Path) -> PathBuf {
    let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    file.parent().map_or_else(|| PathBuf::from("/"), Path::to_owned)
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

/// A stage of the plan; `positions` has that of each place in the file.
fn planned(stage: StageEntry, bound: Bound, positions: &[usize]) -> PlannedStage {
    let needs = bound.waits_for.iter().filter(|wait| wait.why == Why::Needs).map(|wait| positions[wait.stage]);
    let in_plan = |input: ResolvedInput| ResolvedInput { position: positions[input.position], ..input };
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
        needs: needs.collect(),
        inputs: bound.inputs.into_iter().map(in_plan).collect(),
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
                format!("the file contains {}", root.describe()),
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

// Reading the file itself: that it is there, small enough, and UTF-8.

/// The text of a pipeline file, which the command line names and which may be a pipe.
pub(super) fn read_text(path: &Path) -> Result<String, Rejected> {
    text(path, File::open(path))
}

/// The text of a file that another one names: a pipe there has nobody who writes into it, and would be waited for.
pub(super) fn read_included(path: &Path) -> Result<String, Rejected> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).and_then(|file| {
        let kind = file.metadata()?.file_type();
        if kind.is_file() || kind.is_dir() { Ok(file) } else { Err(io::Error::other("it is no regular file")) }
    });
    text(path, opened)
}

fn text(path: &Path, opened: io::Result<File>) -> Result<String, Rejected> {
    let name = path.display();
    let bytes = opened.and_then(read_bytes).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            unread(path, "file-missing", format!("there is no file `{name}`"), instead_of_missing(path))
        }
        io::ErrorKind::IsADirectory => {
            unread(path, "file-unreadable", format!("`{name}` is a folder"), listed(&pipeline_files(path)))
        }
        _ => unread(path, "file-unreadable", format!("cannot read `{name}`: {error}"), None),
    })?;
    if bytes.len() > MAX_BYTES {
        let message = format!("`{name}` is too large: at most {MAX_BYTES} bytes are read");
        return Err(unread(path, "too-large", message, None));
    }
    String::from_utf8(bytes).map_err(|error| not_utf8(path, &error))
}

/// A pipe has no length beforehand, and some never end: one byte more than allowed tells.
fn read_bytes(file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A file of which there is no text to show.
fn unread(path: &Path, code: &'static str, message: String, help: Option<String>) -> Rejected {
    rejected(path, String::new(), |span| Problem::error(code, span, message, "").with_help_if(help))
}

/// What a file that is not there may have been meant for.
fn instead_of_missing(path: &Path) -> Option<String> {
    if path == Path::new("-") {
        return Some("standard input is `/dev/stdin`".to_owned());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let found = pipeline_files(folder);
    let near = suggest::nearest(&path.display().to_string(), &found);
    near.map(|near| format!("did you mean `{near}`?")).or_else(|| listed(&found))
}

/// The files of a folder that end as pipeline files do, in order.
fn pipeline_files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_pipeline = |path: &Path| path.extension().is_some_and(|ending| ending == "yaml" || ending == "yml");
    let mut found: Vec<String> = entries
        .map(|entry| entry.path())
        .filter(|path| is_pipeline(path))
        .map(|path| path.strip_prefix(".").unwrap_or(&path).display().to_string())
        .collect();
    found.sort();
    found
}

fn listed(files: &[String]) -> Option<String> {
    const MOST: usize = 6;
    let names: Vec<String> = files.iter().take(MOST).map(|name| format!("`{name}`")).collect();
    let more = if files.len() > MOST { ", …" } else { "" };
    (!names.is_empty()).then(|| format!("pipeline files there: {}{more}", names.join(", ")))
}

fn not_utf8(path: &Path, error: &std::string::FromUtf8Error) -> Rejected {
    let offset = error.utf8_error().valid_up_to();
    // The text is shown with a replacement character where the byte stood.
    let text = String::from_utf8_lossy(error.as_bytes()).into_owned();
    rejected(path, text, |start| {
        let span = Span { offset, len: char::REPLACEMENT_CHARACTER.len_utf8(), ..start };
        Problem::error("not-utf8", span, "the file is not UTF-8", "this byte").with_help("save it as UTF-8")
    })
}

fn rejected(path: &Path, text: String, problem: impl FnOnce(Span) -> Problem) -> Rejected {
    let mut sources = Sources::default();
    let source = sources.add(path.display().to_string(), text);
    let problem = problem(Span { source, offset: 0, len: 0 });
    Rejected::new(sources, vec![problem])
}

// What of a file with mistakes can still be checked further: stages with none in their own parameters.

/// Where a file is wrong.
pub(super) struct Mistakes<'a> {
    interpolated: &'a Interpolated,
    /// Where errors begin, by text, in order.
    begin: BTreeMap<u32, Vec<usize>>,
    spans: HashSet<Span>,
}

impl<'a> Mistakes<'a> {
    pub(super) fn of(problems: &[Problem], interpolated: &'a Interpolated) -> Self {
        let errors = problems.iter().filter(|problem| problem.severity == Severity::Error);
        let spans: HashSet<Span> = errors.map(|problem| problem.span).collect();
        let mut begin: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        spans.iter().for_each(|span| begin.entry(span.source.0).or_default().push(span.offset));
        begin.values_mut().for_each(|offsets| offsets.sort_unstable());
        Self { interpolated, begin, spans }
    }

    /// Whether one of them is in the parameters of a stage: what follows from it needs no saying.
    pub(super) fn touch(&self, stage: &StageEntry) -> bool {
        let whole = stage.with.span;
        let is_within = self.begin.get(&whole.source.0).is_some_and(|offsets| {
            let next = offsets.partition_point(|offset| *offset < whole.offset);
            offsets.get(next).is_some_and(|offset| *offset < whole.end())
        });
        // A key may come from the command line, and a value from there or from a variable.
        is_within || any(&stage.with, &|span| self.spans.contains(&span) || self.interpolated.is_unknown(&span))
    }
}

/// Whether something holds of the place of a value, or of a key or value in it.
fn any(node: &Node, holds: &dyn Fn(Span) -> bool) -> bool {
    let within = match &node.value {
        Value::Map(entries) => entries.iter().any(|entry| holds(entry.key_span) || any(&entry.value, holds)),
        Value::List(items) => items.iter().any(|item| any(item, holds)),
        _ => false,
    };
    within || holds(node.span)
}
