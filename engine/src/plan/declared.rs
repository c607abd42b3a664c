//! What a stage's own matrix makes of it: the stage once for each combination, before anything is known of what it
//! reads; and which of its axes change no result.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::child::{self, Setting};
use super::entry::{StageEntry, read_stage};
use super::join::FamilyAxis;
use super::matrix::{self, AxisValue, Matrix};
use super::resolve::Bound;
use super::resolve::bind;
use super::smoke::{Scale, shrink_stage};
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Entry, Node, Value};
use crate::parameter::{Reader, Reference};
use crate::stage::Registry;

/// A stage, and its kind with its parameters.
pub(super) type Candidate = (StageEntry, Bound);

/// What expansion needs to know of the file.
pub(super) struct File<'a> {
    pub root: &'a Node,
    pub registry: &'a Registry,
    pub scale: Scale,
    /// The texts that hold `${matrix.x}`.
    pub of_axes: &'a HashSet<Span>,
}

/// A stage of the file with what its own matrix makes of it.
pub(super) struct Declared<'a> {
    pub id: String,
    /// Where its id stands.
    pub span: Span,
    /// As its children are made of it.
    pub raw: Option<Cow<'a, Entry>>,
    pub axes: Vec<OwnAxis>,
    pub units: Vec<Unit>,
    /// What its matrix, in which something is wrong, may have been meant to be swept over.
    pub unread: HashSet<String>,
}

/// An axis of a stage's own matrix.
pub(super) struct OwnAxis {
    pub name: String,
    pub span: Span,
    pub measured: bool,
}

/// A stage with one combination of its own matrix.
pub(super) struct Unit {
    pub values: Vec<Rc<AxisValue>>,
    pub entry: StageEntry,
    pub bound: Bound,
}

impl Unit {
    pub(super) fn into_candidate(self) -> Candidate {
        (self.entry, self.bound)
    }
}

/// Applies the matrix of each stage that has one.
pub(super) fn declare<'a>(stages: Vec<Candidate>, file: &File<'a>, problems: &mut Vec<Problem>) -> Vec<Declared<'a>> {
    let raw: HashMap<&str, &Entry> = match file.root.get("stages").map(|stages| &stages.value) {
        Some(Value::Map(entries)) => entries.iter().map(|entry| (entry.key.as_str(), entry)).collect(),
        _ => HashMap::new(),
    };
    let declare = |(entry, mut bound): Candidate| {
        let raw = raw.get(entry.id.text.as_str()).copied();
        let (id, span) = (entry.declared.clone(), entry.id.span);
        let of_file = entry.matrix.as_ref().map(|node| matrix::read(node, problems));
        let (Some(Some(matrix)), Some(stage)) = (&of_file, raw) else {
            let mut unread = HashSet::new();
            if of_file.is_some() {
                // The matrix might have given what is missing.
                bound.problems.retain(|problem| problem.code != "missing-key");
                unread = raw.map(|raw| child::axes_named(raw, file.of_axes)).unwrap_or_default();
                if let Some(Value::Map(axes)) = entry.matrix.as_ref().map(|node| &node.value) {
                    unread.extend(axes.iter().map(|axis| axis.key.clone()));
                }
            }
            let units = vec![Unit { values: Vec::new(), entry, bound }];
            return Declared { id, span, raw: raw.map(Cow::Borrowed), axes: Vec::new(), units, unread };
        };
        let stage = child::without_matrix(stage, file.of_axes);
        let units = matrix.combinations.iter().map(|values| unit(&stage, matrix, values, file)).collect();
        let axes = own_axes(&stage, matrix, file);
        Declared { id, span, raw: Some(stage), axes, units, unread: HashSet::new() }
    };
    stages.into_iter().map(declare).collect()
}

fn own_axes(stage: &Entry, matrix: &Matrix, file: &File<'_>) -> Vec<OwnAxis> {
    let of = |(place, axis): (usize, &matrix::Axis)| OwnAxis {
        name: axis.name.clone(),
        span: axis.span,
        measured: is_measured(stage, matrix, place, file),
    };
    matrix.axes.iter().enumerate().map(of).collect()
}

/// Whether an axis changes no result of its stage: what it asks of the machine, or a parameter that is in no key.
fn is_measured(stage: &Entry, matrix: &Matrix, axis: usize, file: &File<'_>) -> bool {
    if matrix.axes[axis].name.starts_with("resources.") {
        return true;
    }
    let Some(first) = matrix.combinations.first() else { return false };
    let mut seen: HashSet<&str> = HashSet::from([first[axis].identity.as_str()]);
    // A smoke run gives some parameters values of its own; that does not make them change nothing.
    let file = &File { scale: Scale::Full, ..*file };
    let of_first = signature(&unit(stage, matrix, first, file).bound);
    let mut others = 0;
    for combination in &matrix.combinations {
        if !seen.insert(&combination[axis].identity) {
            continue;
        }
        others += 1;
        let mut values = first.clone();
        values[axis] = combination[axis].clone();
        if of_first.is_none() || signature(&unit(stage, matrix, &values, file).bound) != of_first {
            return false;
        }
    }
    others > 0
}

/// All that decides the result of a stage, as far as the file tells.
fn signature(bound: &Bound) -> Option<(cache::Digest, Vec<String>)> {
    // What is wrong with a value may be that nothing reads it.
    let kind = bound.kind.as_ref().filter(|_| bound.problems.is_empty())?;
    let mut document = cache::KeyDocument::default();
    let identity = |reference: &Reference, _: &'static [&'static str]| {
        let output = reference.output.as_deref().unwrap_or_default();
        Some(cache::Digest::of(format!("{}.{output}", reference.stage).as_bytes()))
    };
    kind.write_whole_key(&mut crate::parameter::KeyWriter::new(&mut document, &identity));
    let outside = kind.outside().into_iter().map(|outside| match outside {
        crate::stage::Outside::Files { role, pattern, .. } => format!("{role} {pattern}"),
        crate::stage::Outside::Pin(pin) => format!("{} {} {}", pin.kind, pin.name, pin.revision),
    });
    Some((document.result_key(), outside.collect()))
}

fn settings(matrix_axes: impl Iterator<Item = (String, Span)>, values: &[Rc<AxisValue>]) -> Vec<Setting> {
    let values = values.iter().cloned();
    matrix_axes.zip(values).map(|((axis, span), value)| Setting { axis, span, value, own: true }).collect()
}

/// The stage with one combination, before anything is known of what it reads.
fn unit(stage: &Entry, matrix: &Matrix, values: &[Rc<AxisValue>], file: &File<'_>) -> Unit {
    let settings = settings(matrix.axes.iter().map(|axis| (axis.name.clone(), axis.span)), values);
    let mut found = Vec::new();
    let with_values = child::with_values(stage, &settings, file.of_axes, &mut found);
    let (entry, bound) = read(with_values, file, found);
    Unit { values: values.to_vec(), entry, bound }
}

/// Reads a stage that was changed.
pub(super) fn read(mut stage: Entry, file: &File<'_>, found: Vec<Problem>) -> Candidate {
    if file.scale == Scale::Smoke {
        shrink_stage(&mut stage, file.registry);
    }
    let mut reader = Reader::default();
    reader.problems = found;
    let entry = read_stage(&stage, &mut reader);
    let mut bound = bind(&entry, file.registry);
    bound.problems.splice(..0, reader.problems);
    (entry, bound)
}

impl OwnAxis {
    pub(super) fn of_family(&self, place: usize) -> FamilyAxis {
        FamilyAxis { name: self.name.clone(), span: self.span, origins: vec![place] }
    }
}
