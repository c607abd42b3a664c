//! What is published, and where: each target is an output, each folder has one target.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops;
use std::path::{Component, Path, PathBuf};

use super::Publish;
use super::child::{self, unknown_axis};
use super::entry::{Document, PublishEntry, StageEntry, Text};
use super::resolve::{Bound, names, pick, places};
use crate::file::interpolate::with_axes;
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::Value;
use crate::keys::without_tilde;
use crate::parameter::{Json, Reference};
use crate::suggest;

/// Resolves the entries of `publish:`. A target that is swept is each of its children, with its values in the place of
/// `${matrix.x}`. A path that names no axis gets those in which the children differ behind it, so that a sweep on the
/// command line publishes next to what the file does: `./out/adapter-lora.rank=4`. Where axes are named is known of the
/// file, and which ones may stand in a matrix in which something is wrong.
pub(super) fn resolve(
    document: &Document,
    targets: &Targets<'_>,
    (of_axes, unread): (&HashSet<Span>, &HashSet<String>),
    problems: &mut Vec<Problem>,
) -> Vec<Publish> {
    let mut folders = Folders::default();
    let mut publish = Vec::new();
    for (entry, PublishEntry { target, path, link }) in document.publish.iter().enumerate() {
        let found = targets.find(target, problems);
        if found.is_empty() {
            // The path is checked all the same.
            folder(path, &path.text, problems);
        }
        let children: Vec<&StageEntry> = found.iter().map(|(place, _)| &document.stages[*place]).collect();
        for (place, output) in found {
            let stage = &document.stages[place];
            let names_axes = of_axes.contains(&path.span);
            let text = if names_axes {
                with_values(path, stage, unread, problems)
            } else {
                Some(apart(&path.text, stage, &children))
            };
            let Some(text) = text else { break };
            let Some(folder) = folder(path, &text, problems) else { break };
            if let Some(problem) =
                folders.add(folder, TargetFolder { entry, text: text.clone(), span: path.span, stage, names_axes })
            {
                problems.push(problem);
                break;
            }
            let (path_span, stage) = (path.span, stage.id.text.clone());
            let path = PathBuf::from(text);
            publish.push(Publish { stage, output, path, link: *link, span: target.span, path_span });
        }
    }
    publish
}

/// A path with the values of a child in it.
fn with_values(
    path: &Text,
    stage: &StageEntry,
    unread: &HashSet<String>,
    problems: &mut Vec<Problem>,
) -> Option<String> {
    let text = with_axes(&path.text, &mut |whole, axis| {
        let found = stage.axes.iter().find(|known| known.name == axis);
        // Of an axis of a matrix in which something is wrong, that is said.
        if found.is_none() && !unread.contains(axis) {
            let axes = stage.axes.iter().map(|axis| axis.name.as_str());
            problems.push(unknown_axis(&stage.declared, whole, axis, axes, path.span));
        }
        // A value in a path is one name of it, not several.
        found.map(|axis| Value::String(as_name(&axis.value)))
    })?;
    match text {
        Value::String(text) => Some(text),
        _ => None,
    }
}

/// A path with the axes behind it that tell a child from the others.
fn apart(path: &str, child: &StageEntry, children: &[&StageEntry]) -> String {
    let value = |stage: &StageEntry, name: &str| {
        stage.axes.iter().find(|axis| axis.name == name).map(|axis| axis.value.clone())
    };
    let differs = |name: &str| children.iter().any(|other| value(other, name) != value(child, name));
    let axes = child.axes.iter().filter(|axis| differs(&axis.name));
    let axes: Vec<String> = axes.map(|axis| format!("{}={}", axis.name, as_name(&axis.value))).collect();
    match axes.is_empty() {
        true => path.to_owned(),
        false => format!("{}-{}", path.trim_end_matches('/'), axes.join(",")),
    }
}

/// A value as a part of a path.
fn as_name(value: &Json) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let name: String = text.chars().map(|c| if c == '/' || c.is_control() { '_' } else { c }).collect();
    if name.starts_with('.') { name.replacen('.', "_", 1) } else { name }
}

/// What can be published, and what gates can ask for.
pub(super) struct Targets<'a> {
    stages: &'a [StageEntry],
    places: HashMap<&'a str, usize>,
    /// The places of the children of each stage of the file.
    children: HashMap<&'a str, Vec<usize>>,
    bound: &'a [Bound],
}

impl<'a> Targets<'a> {
    pub(super) fn new(stages: &'a [StageEntry], bound: &'a [Bound]) -> Self {
        let mut children: HashMap<&str, Vec<usize>> = HashMap::new();
        for (place, stage) in stages.iter().enumerate() {
            children.entry(&stage.declared).or_default().push(place);
        }
        Self { stages, places: places(stages), children, bound }
    }

    /// The stages that a target means, by place, with the output of each; none where there is something wrong, which is
    /// said.
    fn find(&self, target: &Text, problems: &mut Vec<Problem>) -> Vec<(usize, String)> {
        let Some(reference) = Reference::parse(&target.text, target.span) else {
            let message = format!("`{}` is not a reference", target.text);
            problems.push(Problem::error("bad-value", target.span, message, "expected `stage` or `stage.output`"));
            return Vec::new();
        };
        let meant = self.places_of(&reference.stage, ("publish", target.span), problems);
        let mut found = Vec::with_capacity(meant.len());
        for place in meant {
            let Some(outputs) = self.bound[place].outputs.as_deref() else { continue };
            match pick(&reference, None, outputs) {
                Ok(output) => found.push((place, output.name.clone())),
                Err(misfit) => {
                    problems.push(if outputs.is_empty() {
                        let message = format!("stage `{}` makes nothing to publish", reference.stage);
                        Problem::error("wrong-kind", target.span, message, "it has no outputs")
                    } else {
                        misfit.problem(&reference, outputs)
                    });
                    return Vec::new();
                }
            }
        }
        found
    }

    /// The ids of the stages that a name under a key of the file means; none where there is no such stage, which is
    /// said.
    pub(super) fn named(&self, name: &str, at: (&str, Span), problems: &mut Vec<Problem>) -> Vec<&'a str> {
        let places = self.places_of(name, at, problems);
        places.into_iter().map(|place| self.stages[place].id.text.as_str()).collect()
    }

    fn places_of(&self, name: &str, (key, span): (&str, Span), problems: &mut Vec<Problem>) -> Vec<usize> {
        let meant = self.meant(name);
        if meant.is_empty() {
            let stages = if suggest::is_spent() { &self.stages[..self.stages.len().min(8)] } else { self.stages };
            let names = names(stages, name.contains('['));
            let message = format!("`{key}` names `{name}`, which no stage produces");
            problems.push(
                Problem::error("unknown-stage", span, message, "not declared by any stage")
                    .with_help_if(suggest::help(name, "declared stages", names.iter().copied())),
            );
        }
        meant
    }

    fn meant(&self, name: &str) -> Vec<usize> {
        if let Some(place) = self.places.get(name) {
            return vec![*place];
        }
        let declared = child::split(name).map_or(name, |(declared, _)| declared);
        let children = self.children.get(declared).map_or(&[][..], Vec::as_slice);
        let meant = |place: &usize| {
            let stage = &self.stages[*place];
            let axes = stage.axes.iter().map(|axis| (axis.name.as_str(), &axis.value));
            child::is_meant_by(&stage.declared, axes, name)
        };
        children.iter().copied().filter(meant).collect()
    }
}

/// The folder to write, without `.` and `..` where they can be resolved. It is replaced as a whole, so it cannot be one
/// that holds the pipeline file.
fn folder(path: &Text, text: &str, problems: &mut Vec<Problem>) -> Option<PathBuf> {
    if text.len() > LONGEST_PATH {
        let message = format!("a path of {} bytes is longer than any file system accepts", text.len());
        problems.push(Problem::error("bad-value", path.span, message, format!("at most {LONGEST_PATH} bytes")));
        return None;
    }
    if let Some(whole) = without_tilde(text) {
        let message = format!("`{text}`: `~` is not expanded");
        problems.push(
            Problem::error("bad-value", path.span, message, "a folder of the name `~`")
                .with_help(format!("write `{whole}`, or `./{text}` for that folder")),
        );
        return None;
    }
    let mut folder = PathBuf::new();
    for component in Path::new(text).components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir if matches!(folder.components().next_back(), Some(Component::Normal(_))) => {
                folder.pop();
            }
            other => folder.push(other),
        }
    }
    let has_name = matches!(folder.components().next_back(), Some(Component::Normal(_)));
    if !has_name {
        let message = format!("`{text}` cannot be published to: the folder is replaced as a whole");
        problems.push(Problem::error(
            "bad-value",
            path.span,
            message,
            "expected a separate folder, such as `./out/model`",
        ));
    }
    has_name.then_some(folder)
}

/// Bytes of the longest path that Linux takes.
const LONGEST_PATH: usize = 4096;

/// Who is published where. In the order of paths a folder stands right before those in it.
#[derive(Default)]
struct Folders<'a>(BTreeMap<PathBuf, TargetFolder<'a>>);

/// A folder as the file gives it.
struct TargetFolder<'a> {
    /// Which entry of `publish:`.
    entry: usize,
    text: String,
    span: Span,
    stage: &'a StageEntry,
    /// Whether the path has values of `matrix` where the user wants them.
    names_axes: bool,
}

impl<'a> Folders<'a> {
    /// Adds a folder; the problem where it is another's, or one is in the other.
    fn add(&mut self, folder: PathBuf, place: TargetFolder<'a>) -> Option<Problem> {
        let around = folder.ancestors().find_map(|around| Some((around, self.0.get(around)?)));
        let inside = || {
            let next = self.0.range::<Path, _>((ops::Bound::Included(folder.as_path()), ops::Bound::Unbounded)).next();
            next.filter(|(other, _)| other.starts_with(&folder)).map(|(other, place)| (other.as_path(), place))
        };
        let Some((other, first)) = around.or_else(inside) else {
            self.0.insert(folder, place);
            return None;
        };
        let message = if folder == other {
            format!("two targets are published to `{}`", place.text)
        } else {
            format!("`{}` and `{}` overlap", place.text, first.text)
        };
        let problem = Problem::error("duplicate-path", place.span, message, "each target needs a separate folder");
        Some(if first.entry == place.entry {
            of_children(problem, &place, first)
        } else {
            problem.with_related(first.span, "the other one")
        })
    }
}

/// Says of two children of one stage what would tell their folders apart.
fn of_children(problem: Problem, place: &TargetFolder<'_>, first: &TargetFolder<'_>) -> Problem {
    let axes = place.stage.axes.iter().zip(&first.stage.axes);
    let differ = axes.filter(|(a, b)| a.value != b.value).map(|(axis, _)| format!("${{matrix.{}}}", axis.name));
    let names: Vec<String> = differ.collect();
    if let (true, [one], [other]) = (place.names_axes, &*place.stage.axes, &*first.stage.axes) {
        return problem.with_help(format!(
            "`{}` and `{}` are written alike in a path, where `/` and the like become `_`: give the children values that \
             differ in letters or digits",
            other.value, one.value
        ));
    }
    problem.with_help(format!(
        "the children of a sweep need a folder each: `{}/{}`",
        place.text.trim_end_matches('/'),
        names.join("-")
    ))
}
