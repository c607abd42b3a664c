//! Overrides: `adapter.optimizer.learning_rate=1e-4` on the command line, put into the tree before anything is checked.
//!
//! Each override is a text of its own with places of its own, so what it sets wrong is reported as in the file. Several
//! values for a parameter that takes one (`adapter.lora.rank=4,8`) become an axis of the stage's `matrix:`.

use super::parse;
use super::problem::Problem;
use super::scalar;
use super::source::{SourceId, Sources, Span};
use super::tree::{Entry, Node, Value};
use crate::parameter::QUOTES;
use crate::suggest;

/// What the text of an override is called in messages.
pub const COMMAND_LINE: &str = "command line";

/// Keys of a stage itself; every other path of an override goes below its `with:`.
pub const STAGE_KEYS: [&str; 10] =
    ["uses", "with", "needs", "resources", "retries", "timeout", "executor", "profile", "matrix", "when"];

/// What a value begins with that is read as YAML.
const YAML: [char; 4] = ['[', '{', '"', '\''];

/// Keys of the file that an override can reach beside the stages.
const FILE_KEYS: [&str; 8] = ["vars", "name", "gates", "publish", "slots", "executor", "include", "track"];

/// Whether the parameter at a path of a stage's `with:` or `resources:`, by the stage's kind, takes one value that can
/// hold no comma.
pub type TakesOneValue<'a> = &'a dyn Fn(&str, &[&str]) -> bool;

/// Puts each override into the tree, in order; what cannot be put there is reported and left out. Returns what was in
/// their places.
pub fn apply(
    root: &mut Node,
    overrides: &[String],
    takes_one_value: TakesOneValue<'_>,
    sources: &mut Sources,
    problems: &mut Vec<Problem>,
) -> Vec<Node> {
    let mut replaced = Vec::new();
    for text in overrides {
        let source = sources.add(COMMAND_LINE, text.as_str());
        match apply_one(root, source, text, takes_one_value, problems) {
            Ok(node) => replaced.push(node),
            Err(problem) => problems.push(*problem),
        }
    }
    replaced
}

/// Shows how a value of the command line is put in quotes: a shell takes away those that are around it.
pub fn quote_for_shell(problems: &mut [Problem], sources: &Sources) {
    let to_quote = |problem: &&mut Problem| problem.help.as_deref() == Some(QUOTES);
    for problem in problems.iter_mut().filter(to_quote) {
        let Some(source) = sources.get(problem.span.source).filter(|source| source.name == COMMAND_LINE) else {
            continue;
        };
        if let Some((path, value)) = source.text.split_once('=')
            && sources.text(problem.span) == Some(value.trim())
        {
            problem.help = Some(format!("put it in quotes that the shell leaves: '{path}=\"{}\"'", value.trim()));
        }
    }
}

/// One name of a path.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub name: String,
    /// Where it stands.
    pub span: Span,
}

fn apply_one(
    root: &mut Node,
    source: SourceId,
    text: &str,
    takes_one_value: TakesOneValue<'_>,
    problems: &mut Vec<Problem>,
) -> Result<Node, Box<Problem>> {
    let whole = Span { source, offset: 0, len: text.len() };
    let Some((path, value)) = text.split_once('=') else {
        let help = format!("`pipeline run FILE --until {text}` runs a stage and what it needs");
        let is_stage = root.get("stages").is_some_and(|stages| stages.get(text).is_some());
        let problem = Problem::error("bad-override", whole, "an override sets a value", "expected `stage.path=value`");
        return Err(problem.with_help_if(is_stage.then_some(help)).into());
    };
    let segments = split(path, source)?;
    let start = text.len() - value.len();
    let located = locate(root, segments)?;
    let (path, value) = match axis(root, &located, value, takes_one_value) {
        Some(path) => (path, read_axis(source, text, start, problems)?),
        None => (located, read_value(source, text, start, problems)?),
    };
    set(root, &path, value)
}

/// The axis of a stage's matrix that an override sets, if it sets one: an axis itself, a parameter that the stage is
/// swept over already, or several values for a parameter that takes one.
fn axis(root: &Node, path: &[Segment], value: &str, takes_one_value: TakesOneValue<'_>) -> Option<Vec<Segment>> {
    let [stages, id, key, below @ ..] = path else { return None };
    if stages.name != "stages" || below.is_empty() {
        return None;
    }
    let names: Vec<&str> = below.iter().map(|segment| segment.name.as_str()).collect();
    let joined = names.join(".");
    let at = |axis: String| {
        let key = |name: &str, span| Segment { name: name.to_owned(), span };
        let (from, to) = (below[0].span, below[below.len() - 1].span);
        let span = Span { len: to.end() - from.offset, ..from };
        Some(vec![stages.clone(), id.clone(), key("matrix", from), key(&axis, span)])
    };
    let stage = root.get("stages")?.get(&id.name)?;
    match key.name.as_str() {
        "matrix" if ["exclude", "include"].contains(&names[0]) => None,
        "matrix" => at(joined),
        "with" | "resources" => {
            let long = format!("{}.{joined}", key.name);
            let short = if key.name == "with" { joined } else { long.clone() };
            let swept = stage.get("matrix").and_then(|matrix| match (matrix.get(&short), matrix.get(&long)) {
                (Some(_), _) => Some(short.clone()),
                (None, Some(_)) => Some(long.clone()),
                (None, None) => None,
            });
            if swept.is_some() {
                return at(swept?);
            }
            let several = value.split(',').count() > 1 && value.split(',').all(|part| !part.trim().is_empty());
            let plain = !value.trim_start().starts_with(YAML);
            let uses = stage.get("uses").map_or("", |uses| match &uses.value {
                Value::String(uses) => uses,
                _ => "",
            });
            let path: Vec<&str> = std::iter::once(key.name.as_str()).chain(names.iter().copied()).collect();
            let reserved =
                key.name == "with" && (["exclude", "include"].contains(&names[0]) || names[0] == "resources");
            let name = if reserved { long } else { short };
            (several && plain && takes_one_value(uses, &path)).then(|| at(name)).flatten()
        }
        _ => None,
    }
}

/// The values of an axis: a list, or plain values with commas between them.
fn read_axis(source: SourceId, text: &str, start: usize, problems: &mut Vec<Problem>) -> Result<Node, Box<Problem>> {
    let value = &text[start..];
    if value.trim_start().starts_with(YAML) {
        let node = read_value(source, text, start, problems)?;
        let span = node.span;
        return Ok(match node.value {
            Value::List(_) | Value::Null => node,
            _ => Node { span, value: Value::List(vec![node]) },
        });
    }
    let trimmed = value.trim();
    let span = Span { source, offset: start + (value.len() - value.trim_start().len()), len: trimmed.len() };
    if scalar::plain(trimmed) == Value::Null {
        return Ok(Node { span, value: Value::Null });
    }
    let mut items = Vec::new();
    let mut offset = start;
    for part in value.split(',') {
        let plain = part.trim();
        let at = offset + (part.len() - part.trim_start().len());
        let (span, value) = (Span { source, offset: at, len: plain.len() }, scalar::plain(plain));
        problems.extend(parse::lost_number(plain, &value, span));
        items.push(Node { span, value });
        offset += part.len() + 1;
    }
    Ok(Node { span, value: Value::List(items) })
}

fn split(path: &str, source: SourceId) -> Result<Vec<Segment>, Box<Problem>> {
    if let Some((stage, _)) = path.split_once('[').filter(|(stage, _)| !stage.contains('.')) {
        let whole = Span { source, offset: 0, len: path.len() };
        let message = format!("an override reaches all children of `{stage}`, not one of them");
        let problem = Problem::error("bad-override", whole, message, "names one child");
        let help = format!(
            "give one combination other values with `{stage}.matrix.include=[{{...}}]`, or take one away with `{stage}.matrix.exclude=[{{...}}]`"
        );
        return Err(problem.with_help(help).into());
    }
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
    if !trimmed.starts_with(YAML) {
        let offset = start + (value.len() - value.trim_start().len());
        let plain = match scalar::plain(trimmed) {
            // The shell has taken its quotes away: what blanks are left belong to the text, such as the end of a
            // template.
            Value::String(_) => Value::String(value.to_owned()),
            other => other,
        };
        let span = Span { source, offset, len: trimmed.len() };
        problems.extend(parse::lost_number(trimmed, &plain, span));
        return Ok(Node { span, value: plain });
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
    if first.name == "gates" && segments.len() > 3 {
        // And so is the figure of a gate, whose key comes last.
        let last = segments.len() - 1;
        let name = segments[1..last].iter().map(|segment| segment.name.as_str()).collect::<Vec<_>>().join(".");
        let (from, to) = (segments[1].span, segments[last - 1].span);
        let span = Span { len: to.end() - from.offset, ..from };
        return Ok(vec![first, Segment { name, span }, segments.remove(last)]);
    }
    if first.name == "vars" {
        declared(root, &segments)?;
    }
    if FILE_KEYS.contains(&first.name.as_str()) {
        return Ok(segments);
    }
    let has_field = |stage: &&&str| {
        let with = root.get("stages").and_then(|stages| stages.get(stage)?.get("with"));
        with.is_some_and(|with| with.get(&first.name).is_some())
    };
    let path = segments.iter().map(|segment| segment.name.as_str()).collect::<Vec<_>>().join(".");
    let meant = stages.iter().find(has_field).map(|stage| format!("did you mean `{stage}.{path}`?"));
    let known: Vec<&str> = stages.into_iter().chain(FILE_KEYS).collect();
    let help = meant.or_else(|| suggest::help(&first.name, "an override begins with one of", known.iter().copied()));
    Err(Problem::error(
        "unknown-stage",
        first.span,
        format!("the override sets `{}`, which is no stage", first.name),
        "not declared by any stage",
    )
    .with_help_if(help)
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

/// Sets the value at a path and returns the one before; keys that are absent are created, and checked with all the
/// others later.
pub(crate) fn set(node: &mut Node, path: &[Segment], value: Node) -> Result<Node, Box<Problem>> {
    let Some((segment, rest)) = path.split_first() else { return Ok(std::mem::replace(node, value)) };
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
        .with_help("set the whole value in its place, as a mapping")
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
