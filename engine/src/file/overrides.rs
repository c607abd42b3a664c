//! Overrides: `adapter.optimizer.learning_rate=1e-4` on the command line, put into the tree before anything is checked.
//!
//! Each override is a text of its own with places of its own, so what it sets wrong is reported as in the file.

use super::parse;
use super::problem::Problem;
use super::scalar;
use super::source::{SourceId, Sources, Span};
use super::tree::{Entry, Node, Value};
use crate::suggest;

/// What the text of an override is called in messages.
pub const COMMAND_LINE: &str = "command line";

/// Keys of a stage itself; every other path of an override goes below its `with:`.
pub const STAGE_KEYS: [&str; 6] = ["uses", "with", "needs", "resources", "retries", "timeout"];

/// Keys of the file that an override can reach beside the stages.
const FILE_KEYS: [&str; 4] = ["vars", "name", "publish", "slots"];

/// Puts each override into the tree, in order; what cannot be put there is reported and left out.
pub fn apply(root: &mut Node, overrides: &[String], sources: &mut Sources, problems: &mut Vec<Problem>) {
    for text in overrides {
        let source = sources.add(COMMAND_LINE, text.as_str());
        if let Err(problem) = apply_one(root, source, text, problems) {
            problems.push(*problem);
        }
    }
}

/// One name of a path.
#[derive(Clone)]
struct Segment {
    name: String,
    span: Span,
}

fn apply_one(root: &mut Node, source: SourceId, text: &str, problems: &mut Vec<Problem>) -> Result<(), Box<Problem>> {
    let whole = Span { source, offset: 0, len: text.len() };
    let Some((path, value)) = text.split_once('=') else {
        return Err(
            Problem::error("bad-override", whole, "an override sets a value", "expected `stage.path=value`").into()
        );
    };
    let segments = split(path, source)?;
    let value = read_value(source, text, text.len() - value.len(), problems)?;
    let path = locate(root, segments)?;
    set(root, &path, value)
}

fn split(path: &str, source: SourceId) -> Result<Vec<Segment>, Box<Problem>> {
    let mut segments = Vec::new();
    let mut offset = 0;
    for name in path.split('.') {
        let span = Span { source, offset, len: name.len() };
        if name.trim().is_empty() {
            let whole = Span { source, offset: 0, len: path.len() };
            let expected = "expected `stage.path=value`";
            return Err(Problem::error("bad-override", whole, "the path has an empty name", expected).into());
        }
        segments.push(Segment { name: name.trim().to_owned(), span });
        offset += name.len() + 1;
    }
    Ok(segments)
}

/// A list, a mapping or a text in quotes is read as YAML; anything else is one plain scalar, whatever it holds.
fn read_value(source: SourceId, text: &str, start: usize, problems: &mut Vec<Problem>) -> Result<Node, Box<Problem>> {
    let value = &text[start..];
    let trimmed = value.trim();
    if !trimmed.starts_with(['[', '{', '"', '\'']) {
        let offset = start + (value.len() - value.trim_start().len());
        let plain = match scalar::plain(trimmed) {
            // The shell has taken its quotes away: what blanks are left belong to the text, such as the end of a template.
            Value::String(_) => Value::String(value.to_owned()),
            other => other,
        };
        return Ok(Node { span: Span { source, offset, len: trimmed.len() }, value: plain });
    }
    let first = problems.len();
    let parsed = parse::parse(source, value, problems).map_err(|problem| Box::new(shifted(*problem, start)));
    for problem in &mut problems[first..] {
        *problem = shifted(problem.clone(), start);
    }
    let mut node = parsed?;
    shift(&mut node, start);
    Ok(node)
}

/// The place of a path in the tree: below `stages`, and below `with:` where it names no key of the stage itself.
fn locate(root: &Node, mut segments: Vec<Segment>) -> Result<Vec<Segment>, Box<Problem>> {
    let stages = keys_of(root, "stages");
    let first = segments[0].clone();
    let below = |name: &str| Segment { name: name.to_owned(), span: first.span };
    if stages.contains(&first.name.as_str()) {
        if segments.get(1).is_some_and(|second| !STAGE_KEYS.contains(&second.name.as_str())) {
            segments.insert(1, below("with"));
        }
        segments.insert(0, below("stages"));
        return Ok(segments);
    }
    if first.name == "publish" && segments.len() > 2 {
        // A target may be `stage.output`, which is one key.
        let name = segments[1..].iter().map(|segment| segment.name.as_str()).collect::<Vec<_>>().join(".");
        let (from, to) = (segments[1].span, segments[segments.len() - 1].span);
        let span = Span { len: to.end() - from.offset, ..from };
        return Ok(vec![first, Segment { name, span }]);
    }
    if first.name == "vars" {
        declared(root, &segments)?;
    }
    if FILE_KEYS.contains(&first.name.as_str()) {
        return Ok(segments);
    }
    let known: Vec<&str> = stages.into_iter().chain(FILE_KEYS).collect();
    Err(Problem::error(
        "unknown-stage",
        first.span,
        format!("the override sets `{}`, which is no stage", first.name),
        "not declared by any stage",
    )
    .with_help_if(suggest::help(&first.name, "an override begins with one of", known.iter().copied()))
    .into())
}

/// A variable that the file does not declare is read by nothing: setting it would change nothing in silence.
fn declared(root: &Node, segments: &[Segment]) -> Result<(), Box<Problem>> {
    let names = keys_of(root, "vars");
    match segments.get(1) {
        Some(variable) if !names.contains(&variable.name.as_str()) => {
            let message = format!("the file declares no variable `{}`", variable.name);
            let problem = Problem::error("unknown-variable", variable.span, message, "not declared under `vars:`");
            Err(problem.with_help_if(suggest::help(&variable.name, "declared variables", names.iter().copied())).into())
        }
        _ => Ok(()),
    }
}

fn keys_of<'a>(root: &'a Node, key: &str) -> Vec<&'a str> {
    match root.get(key).map(|node| &node.value) {
        Some(Value::Map(entries)) => entries.iter().map(|entry| entry.key.as_str()).collect(),
        _ => Vec::new(),
    }
}

/// Sets the value at a path; keys that are absent are created, and checked with all the others later.
fn set(node: &mut Node, path: &[Segment], value: Node) -> Result<(), Box<Problem>> {
    let Some((segment, rest)) = path.split_first() else {
        *node = value;
        return Ok(());
    };
    if node.value == Value::Null {
        *node = Node { span: segment.span, value: Value::Map(Vec::new()) };
    }
    let found = node.describe();
    match &mut node.value {
        Value::Map(entries) => {
            let at = entries.iter().position(|entry| entry.key == segment.name).unwrap_or_else(|| {
                let absent = Node { span: segment.span, value: Value::Null };
                entries.push(Entry { key: segment.name.clone(), key_span: segment.span, value: absent });
                entries.len() - 1
            });
            set(&mut entries[at].value, rest, value)
        }
        Value::List(items) => {
            let at = index(segment, items.len())?;
            if at == items.len() {
                items.push(Node { span: segment.span, value: Value::Null });
            }
            set(&mut items[at], rest, value)
        }
        _ => Err(Problem::error(
            "wrong-type",
            segment.span,
            format!("`{}` cannot be set: what holds it is {found}", segment.name),
            "expected a mapping or a list above this",
        )
        .with_related(node.span, "this value")
        .into()),
    }
}

/// The item of a list that a name of a path means; the one behind the last adds to the list.
fn index(segment: &Segment, len: usize) -> Result<usize, Box<Problem>> {
    match segment.name.parse::<usize>() {
        Ok(at) if at <= len => Ok(at),
        _ => Err(Problem::error(
            "bad-index",
            segment.span,
            format!("`{}` is no item of a list of {len}", segment.name),
            format!("expected 0 to {len}"),
        )
        .into()),
    }
}

fn shift(node: &mut Node, by: usize) {
    node.span.offset += by;
    match &mut node.value {
        Value::List(items) => items.iter_mut().for_each(|item| shift(item, by)),
        Value::Map(entries) => {
            for entry in entries {
                entry.key_span.offset += by;
                shift(&mut entry.value, by);
            }
        }
        _ => {}
    }
}

fn shifted(mut problem: Problem, by: usize) -> Problem {
    problem.span.offset += by;
    for (span, _) in &mut problem.related {
        span.offset += by;
    }
    problem
}
