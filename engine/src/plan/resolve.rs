//! References: which stage and output each one means, and whether it fits.

use std::collections::HashMap;

use super::entry::{StageEntry, Text};
use super::fields::field_at;
use super::{DeviceCount, ResolvedInput, fields};
use crate::artifact::Output;
use crate::device;
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::parameter::{Named, Reader, Reference};
use crate::stage::{Registry, Stage, Workers};
use crate::suggest;

/// The kind of artefact that a measurement is read for.
const METRICS: &str = "metrics";

/// A stage's kind with its parameters, as far as they could be read, and what its references mean.
#[derive(Default)]
pub(super) struct Bound {
    pub name: &'static str,
    pub version: u32,
    /// Absent where the kind is unknown or the parameters are wrong.
    pub kind: Option<Box<dyn Stage>>,
    /// Absent where `kind` is.
    pub outputs: Option<Vec<Output>>,
    /// The references that its parameters hold.
    pub references: Vec<(Reference, &'static [&'static str])>,
    /// The same, and what `collect:` names, with their fields.
    pub named: Vec<Named>,
    /// What is wrong with it.
    pub problems: Vec<Problem>,
    /// Their positions are places in the file until there is a plan.
    pub inputs: Vec<ResolvedInput>,
    /// The stages it waits for.
    pub waits_for: Vec<Wait>,
}

/// One reason to wait for another stage.
pub(super) struct Wait {
    /// Its place in the file.
    pub stage: usize,
    pub why: Why,
    /// Where the file says so.
    pub span: Span,
}

/// Why one stage comes after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    /// It reads an output.
    Reads,
    /// The file says `needs:`.
    Needs,
}

/// Resolves the inputs and the `needs:` of every stage.
pub(super) fn resolve(stages: &[StageEntry], bound: &mut [Bound]) {
    let places = places(stages);
    for (place, reader) in stages.iter().enumerate() {
        let mut problems = Vec::new();
        let resolver = Resolver { stages, bound, places: &places, reader, problems: &mut problems };
        let (inputs, waits) = resolver.stage(&bound[place].references);
        bound[place].inputs = inputs;
        bound[place].waits_for = waits;
        bound[place].problems.extend(problems);
    }
}

/// The place of each stage in the file, by its id.
pub(super) fn places(stages: &[StageEntry]) -> HashMap<&str, usize> {
    stages.iter().enumerate().map(|(place, stage)| (stage.id.text.as_str(), place)).collect()
}

/// What a reference can name: the stages of the file, and where `children` is set those that a sweep made of them.
pub(super) fn names(stages: &[StageEntry], children: bool) -> Vec<&str> {
    let mut names: Vec<&str> = stages.iter().map(|stage| stage.declared.as_str()).collect();
    names.dedup();
    if children {
        names.extend(stages.iter().filter(|stage| !stage.axes.is_empty()).map(|stage| stage.id.text.as_str()));
    }
    names
}

struct Resolver<'a> {
    stages: &'a [StageEntry],
    bound: &'a [Bound],
    places: &'a HashMap<&'a str, usize>,
    /// The stage whose references are resolved.
    reader: &'a StageEntry,
    problems: &'a mut Vec<Problem>,
}

impl<'a> Resolver<'a> {
    fn stage(mut self, references: &[(Reference, &'static [&'static str])]) -> (Vec<ResolvedInput>, Vec<Wait>) {
        let (mut inputs, mut waits) = (Vec::new(), Vec::new());
        for (reference, kinds) in references {
            let Some(place) = self.place(&reference.stage, reference.span, "reads") else { continue };
            let output = self.output(place, reference, kinds);
            waits.push(Wait { stage: place, why: Why::Reads, span: reference.span });
            inputs.extend(output.map(|output| ResolvedInput {
                stage: reference.stage.clone(),
                position: place,
                output: output.name.clone(),
                kind: output.kind.clone(),
                span: reference.span,
            }));
        }
        for Text { text, span } in &self.reader.needs {
            if let Some(stage) = self.place(text, *span, "needs") {
                waits.push(Wait { stage, why: Why::Needs, span: *span });
            }
        }
        (inputs, waits)
    }

    /// The place of the stage that a reference names.
    fn place(&mut self, id: &str, span: Span, verb: &str) -> Option<usize> {
        let place = self.places.get(id).copied();
        if place.is_none() {
            let own = self.reader.declared.as_str();
            // Thousands of names are not gathered for each of thousands of problems.
            let stages = if suggest::is_spent() { &self.stages[..self.stages.len().min(8)] } else { self.stages };
            let others = names(stages, id.contains('[')).into_iter().filter(|other| *other != own);
            let others: Vec<&str> = others.collect();
            let what = if verb == "reads" { "which no stage produces" } else { "which is no stage" };
            self.problems.push(
                Problem::error(
                    "unknown-stage",
                    span,
                    format!("stage `{own}` {verb} `{id}`, {what}"),
                    "not declared by any stage",
                )
                .with_help_if(suggest::help(id, "declared stages", others.iter().copied())),
            );
        }
        place
    }

    /// The output that a reference means. Of a stage whose own parameters are wrong nothing can be said here: that has
    /// been said there.
    fn output(&mut self, place: usize, reference: &Reference, kinds: &[&str]) -> Option<&'a Output> {
        let outputs = self.bound[place].outputs.as_deref()?;
        match pick(reference, Some(kinds), outputs) {
            Ok(output) => {
                self.require_result(place, output, reference);
                Some(output)
            }
            Err(OutputError::WrongKind) => {
                self.problems.push(self.wrong_kind(reference, kinds, outputs));
                None
            }
            Err(misfit) => {
                self.problems.push(misfit.problem(reference, outputs));
                None
            }
        }
    }

    /// Refuses what is the same in all children of a measurement: it would be made once for each value of the axis, and
    /// read as if it were several.
    fn require_result(&mut self, place: usize, output: &Output, reference: &Reference) {
        let stage = &self.stages[place];
        let Some(axis) = stage.axes.iter().find(|axis| axis.measured) else { return };
        // What is left out reads nothing.
        if output.kind == METRICS || self.reader.left_out.is_some() {
            return;
        }
        let (own, declared) = (&self.reader.declared, &stage.declared);
        let message = format!(
            "`{own}` reads {} `{}` of `{declared}`, whose children only measure: `{}` changes no result",
            output.kind, output.name, axis.name
        );
        let problem = Problem::error("measurement", reference.span, message, "the same in all children");
        self.problems.push(problem.with_help(format!(
            "read its metrics, or declare a stage like `{declared}` without this axis to continue from; \
             `{own}.when=false` leaves this one out"
        )));
    }

    fn wrong_kind(&self, reference: &Reference, kinds: &[&str], outputs: &[Output]) -> Problem {
        let named = outputs.iter().filter(|output| reference.output.as_ref().is_none_or(|name| *name == output.name));
        let made = alternatives(named.map(|output| output.kind.as_str()), "and");
        let taken = if kinds.is_empty() { "an output".to_owned() } else { alternatives(kinds.iter().copied(), "or") };
        let field = field_at(&self.reader.with, reference.span).unwrap_or_else(|| self.reader.declared.clone());
        let what = match &reference.output {
            Some(output) => format!("`{}.{output}` is {made}", reference.stage),
            None if kinds.is_empty() => format!("stage `{}` makes none", reference.stage),
            None if outputs.is_empty() => format!("stage `{}` makes nothing", reference.stage),
            None => format!("stage `{}` makes {made}", reference.stage),
        };
        let help = match self.makers(kinds) {
            None => format!("expected {taken}"),
            Some(makers) if makers.is_empty() => format!("no stage of this file makes {taken}"),
            Some(few) if few.len() <= MOST_MAKERS => {
                format!("made by {}", alternatives(few.iter().map(|id| format!("`{id}`")), "and"))
            }
            Some(many) => {
                let first: Vec<String> = many[..MOST_MAKERS].iter().map(|id| format!("`{id}`")).collect();
                format!("made by {} and {} more", first.join(", "), many.len() - MOST_MAKERS)
            }
        };
        Problem::error(
            "wrong-kind",
            reference.span,
            format!("`{field}` reads {taken}, and {what}"),
            format!("expected {taken}"),
        )
        .with_help(help)
    }
}

/// Stages that are named as those that make something.
const MOST_MAKERS: usize = 40;

impl Resolver<'_> {
    /// The other stages that make one of these kinds; `None` where so much was looked for already that this would take
    /// too long.
    fn makers(&self, kinds: &[&str]) -> Option<Vec<&str>> {
        if !suggest::spend(1 + self.stages.len() / 16) {
            return None;
        }
        let stages = self.stages.iter().zip(self.bound);
        let makers = stages.filter(|(stage, bound)| stage.declared != self.reader.declared && makes(bound, kinds));
        let mut makers: Vec<&str> = makers.map(|(stage, _)| stage.declared.as_str()).collect();
        // Children of one stage stand side by side.
        makers.dedup();
        Some(makers)
    }
}

/// Why no output could be picked.
pub(super) enum OutputError {
    UnknownOutput,
    Ambiguous,
    WrongKind,
}

impl OutputError {
    /// What to say, where the kind is not what is wrong.
    pub(super) fn problem(&self, reference: &Reference, outputs: &[Output]) -> Problem {
        let Reference { stage, output, span } = reference;
        let names = outputs.iter().map(|output| output.name.as_str());
        match (self, output) {
            (Self::UnknownOutput, Some(output)) => Problem::error(
                "unknown-output",
                *span,
                format!("stage `{stage}` has no output `{output}`"),
                "not an output of this stage",
            )
            .with_help_if(suggest::help(output, "its outputs", names)),
            _ => Problem::error(
                "ambiguous-output",
                *span,
                format!("`{stage}` has more than one output that fits here"),
                "which one?",
            )
            .with_help(format!("write {}", alternatives(names.map(|name| format!("`{stage}.{name}`")), "or"))),
        }
    }
}

/// The output that a reference means among those of its stage: the named one, else the only one of the first kind in
/// `kinds` that the stage makes. Without `kinds`, or where that is empty, every kind fits.
pub(super) fn pick<'a>(
    reference: &Reference,
    kinds: Option<&[&str]>,
    outputs: &'a [Output],
) -> Result<&'a Output, OutputError> {
    let rank = |output: &Output| match kinds {
        None | Some([]) => Some(0),
        Some(kinds) => kinds.iter().position(|kind| *kind == output.kind),
    };
    if let Some(name) = &reference.output {
        let output = outputs.iter().find(|output| output.name == *name).ok_or(OutputError::UnknownOutput)?;
        return rank(output).map(|_| output).ok_or(OutputError::WrongKind);
    }
    let best = outputs.iter().filter_map(rank).min().ok_or(OutputError::WrongKind)?;
    let mut fitting = outputs.iter().filter(|output| rank(output) == Some(best));
    match (fitting.next(), fitting.next()) {
        (Some(output), None) => Ok(output),
        (None, _) => Err(OutputError::WrongKind),
        (Some(_), Some(_)) => Err(OutputError::Ambiguous),
    }
}

fn makes(bound: &Bound, kinds: &[&str]) -> bool {
    bound.outputs.iter().flatten().any(|output| kinds.is_empty() || kinds.contains(&output.kind.as_str()))
}

/// `a, b and c`.
fn alternatives(names: impl Iterator<Item = impl AsRef<str>>, word: &str) -> String {
    let names: Vec<_> = names.collect();
    let mut text = String::new();
    for (index, name) in names.iter().enumerate() {
        match index {
            0 => {}
            _ if index + 1 == names.len() => text.push_str(&format!(" {word} ")),
            _ => text.push_str(", "),
        }
        text.push_str(name.as_ref());
    }
    text
}

// A stage of the file and its kind: the kind reads the parameters.

/// Finds a stage's kind and lets it read its parameters.
pub(super) fn bind(stage: &StageEntry, registry: &Registry) -> Bound {
    let Some(uses) = &stage.uses else { return Bound::default() };
    let Some(kind) = registry.get(&uses.text) else {
        let names: Vec<&str> = registry.kinds().map(|kind| kind.name).collect();
        let problem = Problem::error(
            "unknown-kind",
            uses.span,
            format!("unknown stage kind `{}`", uses.text),
            "no kind of this name",
        );
        let meant = registry.kinds().find(|kind| kind.also_called.contains(&uses.text.as_str()));
        let help = meant.map(|kind| format!("it is `uses: {}` here: {}", kind.name, kind.about));
        let help = help.or_else(|| suggest::help(&uses.text, "known kinds", names.iter().copied()));
        let problem = problem.with_help_if(help);
        return Bound { problems: vec![problem], ..Bound::default() };
    };
    let mut reader = Reader::default();
    let read = kind.read(&stage.with, &mut reader);
    fields::point_to(kind, &stage.with, registry, &mut reader.problems);
    let references = read.as_ref().map_or(reader.references, |read| references_in(read.as_ref()));
    let outputs = read.as_ref().map(|read| read.outputs());
    let (named, problems) = (reader.named, reader.problems);
    let (name, version) = (kind.name, kind.version);
    let mut bound = Bound { name, version, kind: read, outputs, references, named, problems, ..Bound::default() };
    bound.problems.extend(unused_requests(stage, &bound));
    bound
}

/// The references to outputs of other stages, with the kinds that each accepts.
fn references_in(stage: &dyn Stage) -> Vec<(Reference, &'static [&'static str])> {
    let mut references = Vec::new();
    stage.visit_inputs(&mut |reference, kinds| references.push((reference.clone(), kinds)));
    references
}

// What a stage asks of the machine and its kind cannot use.

/// What a stage asks for and its kind has no use for, so that nobody counts on it.
fn unused_requests(stage: &StageEntry, bound: &Bound) -> Vec<Problem> {
    let Some(kind) = &bound.kind else { return Vec::new() };
    let (id, name, served) = (&stage.declared, bound.name, kind.devices());
    let device = stage.resource_spans.device.zip(stage.resources.device);
    let device = device.filter(|(_, wanted)| !served.contains(wanted)).map(|(span, wanted)| {
        let message =
            format!("{} is requested, and `{name}` computes on {}", wanted.in_words(), device::names(&served));
        let help = format!("leave it out, or run with `{id}.resources.device={}`", served[0]);
        Problem::warning("no-device", span, message, "not served by this kind of stage").with_help(help)
    });
    let several = !matches!(stage.resources.count, DeviceCount::Exactly(1));
    let count = stage.resource_spans.count.filter(|_| several && kind.workers() == Workers::One).map(|span| {
        let message = format!("`resources.count` has no effect: `{name}` computes on one device");
        Problem::warning("no-effect", span, message, "more than it can use")
    });
    device.into_iter().chain(count).collect()
}
