//! One child of a sweep: the stage as the file declares it, with the values of one combination put in.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use super::matrix::{AxisValue, means};
use crate::file::interpolate::{only_axis, replaced_at, with_axes};
use crate::file::overrides::{Segment, set};
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Entry, Node, Value};
use crate::parameter::{COLLECT, Collected, Json, dotted};
use crate::suggest;

/// The value of an axis, in a child.
#[derive(Debug, Clone)]
pub(super) struct Setting {
    pub axis: String,
    /// Where the axis is declared.
    pub span: Span,
    pub value: Rc<AxisValue>,
    /// Whether the stage itself declares the axis; else a stage before it does.
    pub own: bool,
}

/// What the children of stages are called.
pub(super) fn id(declared: &str, settings: &[Setting]) -> String {
    if settings.is_empty() {
        return declared.to_owned();
    }
    let values: Vec<String> =
        settings.iter().map(|setting| format!("{}={}", setting.axis, setting.value.label)).collect();
    format!("{declared}[{}]", values.join(","))
}

/// The declared stage and the values in a name such as `adapter[lora.rank=4]`; a comma inside brackets belongs to its
/// value.
pub(super) fn split(name: &str) -> Option<(&str, Vec<(&str, &str)>)> {
    let (declared, values) = name.strip_suffix(']')?.split_once('[')?;
    let mut settings = Vec::new();
    let (mut depth, mut start) = (0_usize, 0);
    let ends = values.char_indices().chain([(values.len(), ',')]);
    for (at, letter) in ends {
        match letter {
            '[' | '{' => depth += 1,
            ']' | '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 || at == values.len() => {
                settings.push(values[start..at].split_once('=')?);
                start = at + 1;
            }
            _ => {}
        }
    }
    Some((declared, settings))
}

/// Whether a name means this child: the stage of the file, or that with some of the child's values.
pub fn is_meant_by<'a>(declared: &str, axes: impl Iterator<Item = (&'a str, &'a Json)> + Clone, name: &str) -> bool {
    if name == declared {
        return true;
    }
    let Some((stage, values)) = split(name) else { return false };
    stage == declared
        && values.iter().all(|(axis, text)| axes.clone().any(|(own, value)| own == *axis && means(text, value)))
}

/// The path that an axis sets in a stage, from the stage's own keys on.
pub(super) fn path(axis: &str) -> Vec<&str> {
    let below_with = !(axis.starts_with("with.") || axis.starts_with("resources."));
    below_with.then_some("with").into_iter().chain(axis.split('.')).collect()
}

/// A stage with the values of some axes in it: of its own axes at their paths, of all of them in the place of
/// `${matrix.x}`. An axis that the stage names so sets nothing else.
///
/// `of_axes` are the places of the texts that hold `${matrix.x}`; axes that are not set stay in them by name.
pub(super) fn with_values(
    declared: &Entry,
    settings: &[Setting],
    of_axes: &HashSet<Span>,
    problems: &mut Vec<Problem>,
) -> Entry {
    let mut stage = declared.clone();
    let named = axes_named(declared, of_axes);
    for setting in settings.iter().filter(|setting| setting.own && !named.contains(&setting.axis)) {
        let segment = |name: &str| Segment { name: name.to_owned(), span: setting.span };
        let path: Vec<Segment> = path(&setting.axis).into_iter().map(segment).collect();
        if let Err(problem) = set(&mut stage.value, &path, setting.value.node.clone()) {
            problems.push(*problem);
        }
    }
    if !named.is_empty() {
        each_text(&mut stage.value, of_axes, &mut |node| put_values(node, settings));
    }
    stage
}

/// The axes that a stage names by `${matrix.x}`.
pub(super) fn axes_named(stage: &Entry, of_axes: &HashSet<Span>) -> HashSet<String> {
    let mut named = HashSet::new();
    if of_axes.is_empty() {
        return named;
    }
    see_texts(&stage.value, of_axes, &mut |text, _| {
        with_axes(text, &mut |_, axis| {
            named.insert(axis.to_owned());
            Some(Value::Null)
        });
    });
    named
}

/// A stage as its children are made of it: without its `matrix:`, which may be long, unless a text in that names an
/// axis.
pub(super) fn without_matrix<'a>(stage: &'a Entry, of_axes: &HashSet<Span>) -> Cow<'a, Entry> {
    let Value::Map(entries) = &stage.value.value else { return Cow::Borrowed(stage) };
    let mut names_axes = false;
    let matrix = entries.iter().filter(|entry| entry.key == "matrix");
    matrix.for_each(|entry| see_texts(&entry.value, of_axes, &mut |_, _| names_axes = true));
    if names_axes {
        return Cow::Borrowed(stage);
    }
    let others = entries.iter().filter(|entry| entry.key != "matrix").cloned().collect();
    let value = Node { span: stage.value.span, value: Value::Map(others) };
    Cow::Owned(Entry { key: stage.key.clone(), key_span: stage.key_span, value })
}

/// Each `${matrix.x}` of an axis that the child does not have, with the axis and what is to be said of it.
pub(super) fn unknown_axes(stage: &Entry, settings: &[Setting], of_axes: &HashSet<Span>) -> Vec<(String, Problem)> {
    let mut problems = Vec::new();
    see_texts(&stage.value, of_axes, &mut |text, span| {
        with_axes(text, &mut |whole, axis| {
            if !settings.iter().any(|setting| setting.axis == axis) {
                let axes = settings.iter().map(|setting| setting.axis.as_str());
                problems.push((axis.to_owned(), unknown_axis(&stage.key, whole, axis, axes, span)));
            }
            Some(Value::Null)
        });
    });
    problems
}

/// The problem of a `${matrix.x}` where there is no axis `x`.
pub(super) fn unknown_axis<'a>(
    stage: &str,
    whole: &str,
    axis: &str,
    axes: impl Iterator<Item = &'a str> + Clone,
    span: Span,
) -> Problem {
    let message = format!("`{whole}`: stage `{stage}` is not swept over `{axis}`");
    let help =
        suggest::help(axis, "its axes", axes).or_else(|| Some("it has no `matrix:`, nor has what it reads".into()));
    Problem::error("unknown-variable", span, message, "no axis of this name").with_help_if(help)
}

fn put_values(node: &mut Node, settings: &[Setting]) {
    let Value::String(text) = &node.value else { return };
    let mut has_one = false;
    let value = with_axes(text, &mut |whole, axis| {
        let setting = settings.iter().find(|setting| setting.axis == axis);
        has_one |= setting.is_some();
        Some(setting.map_or_else(|| Value::String(whole.to_owned()), |setting| setting.value.node.value.clone()))
    });
    if let Some(value) = value.filter(|_| has_one) {
        // Where all of it is the value of an axis, a problem with it is one of that value.
        let axis = only_axis(text);
        let setting = axis.and_then(|axis| settings.iter().find(|setting| setting.axis == axis));
        let span = setting.map_or(node.span, |setting| setting.value.node.span);
        *node = Node { span, value: replaced_at(value, span) };
    }
}

/// Looks at the texts that hold `${matrix.x}`, each with its place.
fn see_texts(node: &Node, of_axes: &HashSet<Span>, see: &mut dyn FnMut(&str, Span)) {
    match &node.value {
        Value::String(text) if of_axes.contains(&node.span) => see(text, node.span),
        Value::List(items) => items.iter().for_each(|item| see_texts(item, of_axes, see)),
        Value::Map(entries) => entries.iter().for_each(|entry| see_texts(&entry.value, of_axes, see)),
        _ => {}
    }
}

/// Visits the texts that hold `${matrix.x}`, to change them.
fn each_text(node: &mut Node, of_axes: &HashSet<Span>, see: &mut dyn FnMut(&mut Node)) {
    match &mut node.value {
        Value::String(_) if of_axes.contains(&node.span) => see(node),
        Value::List(items) => items.iter_mut().for_each(|item| each_text(item, of_axes, see)),
        Value::Map(entries) => entries.iter_mut().for_each(|entry| each_text(&mut entry.value, of_axes, see)),
        _ => {}
    }
}

/// What becomes of a place that names a swept stage.
pub(super) enum Edit {
    /// The name of one child.
    Name(String),
    /// A list of all, for `{ collect: stage }`.
    List(Vec<String>, Collected),
}

/// Puts the names of children where a stage's parameters name swept stages; `edits` is by field, as keys spell it.
pub(super) fn rename(node: &mut Node, path: &str, edits: &HashMap<String, Edit>) {
    match (&mut node.value, edits.get(path)) {
        (Value::String(text), Some(Edit::Name(name))) => text.clone_from(name),
        (Value::Map(_), Some(Edit::List(names, place))) => node.value = Value::List(items(node, names, *place)),
        (Value::Map(entries), _) => {
            for entry in entries {
                rename(&mut entry.value, &dotted(path, &entry.key), edits);
            }
        }
        (Value::List(list), _) => {
            let mut longer = Vec::with_capacity(list.len());
            for (index, mut item) in std::mem::take(list).into_iter().enumerate() {
                let path = format!("{path}[{index}]");
                if let Some(Edit::List(names, place)) = edits.get(&path) {
                    longer.extend(items(&item, names, *place));
                } else {
                    rename(&mut item, &path, edits);
                    longer.push(item);
                }
            }
            *list = longer;
        }
        _ => {}
    }
}

/// The items that a `{ collect: stage }` stands for; what else it holds goes into each of them.
fn items(node: &Node, names: &[String], place: Collected) -> Vec<Node> {
    let Value::Map(entries) = &node.value else { return Vec::new() };
    let span = node.get(COLLECT).map_or(node.span, |stage| stage.span);
    let item = |name: &String| {
        let name = Node { span, value: Value::String(name.clone()) };
        let Collected::Field(field) = place else { return name };
        let reference = Entry { key: field.to_owned(), key_span: span, value: name };
        let others = entries.iter().filter(|entry| entry.key != COLLECT && entry.key != field).cloned();
        Node { span: node.span, value: Value::Map([reference].into_iter().chain(others).collect()) }
    };
    names.iter().map(item).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_splits_into_its_values() {
        assert_eq!(split("a"), None);
        assert_eq!(split("a[]"), None);
        assert_eq!(split("a[x]"), None);
        assert_eq!(split("a[x=1]"), Some(("a", vec![("x", "1")])));
        assert_eq!(split("a[x=1,y.z=b=c]"), Some(("a", vec![("x", "1"), ("y.z", "b=c")])));
        assert_eq!(split("a[m=[q,v],x={a:[1,2]}]"), Some(("a", vec![("m", "[q,v]"), ("x", "{a:[1,2]}")])));
    }
}
