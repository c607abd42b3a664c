//! `matrix:` of a stage: its axes, and the combinations of their values that are wanted.
//!
//! It leaves to others: what a combination does to the stage ([`super::child`]), and which stages follow
//! ([`super::expand`]).

use std::collections::HashSet;
use std::rc::Rc;

use cache::Digest;
use serde_json::Value as Json;

use super::resources::ResourceKeys;
use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Entry, Node, Value};
use crate::parameter::{Parameter, unknown_key};
use crate::stage::Registry;

/// How many children a stage may have.
pub(super) const MOST_CHILDREN: usize = 2000;

/// The key that takes combinations away; no axis has this name. A parameter that has it is written `with.exclude`.
const EXCLUDE: &str = "exclude";

/// The key that adds combinations.
const INCLUDE: &str = "include";

/// The longest text that stands for a value in the id of a child.
const LONGEST_LABEL: usize = 48;

/// What a stage is swept over.
#[derive(Debug)]
pub(super) struct Matrix {
    pub axes: Vec<Axis>,
    /// For each child the values, in the order of the axes.
    pub combinations: Vec<Vec<Rc<AxisValue>>>,
}

#[derive(Debug)]
pub(super) struct Axis {
    /// What it sets, or the name that `${matrix.name}` has.
    pub name: String,
    /// Where the name stands.
    pub span: Span,
}

#[derive(Debug)]
pub(super) struct AxisValue {
    pub node: Node,
    pub json: Json,
    /// Equal for values that are the same, such as `8` and `8.0`.
    pub identity: String,
    /// What stands for it in the id of a child.
    pub label: String,
    /// Its place in the axis, for the order of the children.
    pub place: usize,
}

impl AxisValue {
    fn new(node: &Node, place: usize) -> Self {
        let json = node.to_json();
        Self { node: node.clone(), label: label(&json), identity: identity(&json), json, place }
    }
}

/// Whether a text in the id of a child means a value.
pub(super) fn means(text: &str, value: &Json) -> bool {
    let plain = || Node { span: Span::default(), value: crate::file::scalar::plain(text) }.to_json();
    label(value) == text || identity(value) == identity(&plain())
}

/// Reads a matrix; `None` where nothing can be made of it, which has been said.
pub(super) fn read(node: &Node, problems: &mut Vec<Problem>) -> Option<Matrix> {
    let Value::Map(entries) = &node.value else {
        let message = format!("`matrix`: expected a mapping, found {}", node.describe());
        problems.push(
            Problem::error("wrong-type", node.span, message, "expected a mapping")
                .with_help("write `matrix: { lora.rank: [4, 8] }`"),
        );
        return None;
    };
    let given: Vec<&Entry> = entries.iter().filter(|entry| entry.value.value != Value::Null).collect();
    let axes: Vec<&Entry> = given.iter().copied().filter(|entry| !is_rule(&entry.key)).collect();
    let of = |key| given.iter().copied().find(|entry| entry.key == key);
    let first = problems.len();
    let (names, mut values): (Vec<Axis>, Vec<Vec<Rc<AxisValue>>>) =
        axes.iter().filter_map(|entry| axis(entry, problems)).unzip();
    let names = match (names.is_empty(), of(INCLUDE)) {
        (true, Some(include)) => {
            let names = axes_of_include(include);
            values = names.iter().map(|_| Vec::new()).collect();
            names
        }
        _ => names,
    };
    if problems.len() > first {
        return None;
    }
    let mut combinations = product(&values, node, problems)?;
    if let Some(exclude) = of(EXCLUDE) {
        self::exclude(exclude, &names, &mut combinations, problems);
    }
    if let Some(include) = of(INCLUDE) {
        self::include(include, &names, &mut values, &mut combinations, problems);
    }
    if combinations.is_empty() && problems.len() == first {
        problems.push(
            Problem::error("bad-matrix", node.span, "the matrix has no combination", "nothing is left of it")
                .with_help("leave `matrix:` out for a stage that runs once"),
        );
    }
    if combinations.len() > MOST_CHILDREN {
        problems.push(too_many(node.span, combinations.len()));
    }
    let wrong = problems[first..].iter().any(|problem| problem.severity == crate::file::problem::Severity::Error);
    (!wrong).then_some(Matrix { axes: names, combinations })
}

/// The problem of a stage that would have more children than any machine runs.
pub(super) fn too_many(span: Span, count: usize) -> Problem {
    let message = format!("the matrix makes {count} children of this stage, and the maximum is {MOST_CHILDREN}");
    Problem::error("too-many-stages", span, message, "too many combinations")
        .with_help("shorten an axis, or list the combinations that matter under `include:`")
}

fn is_rule(key: &str) -> bool {
    key == EXCLUDE || key == INCLUDE
}

fn axis(entry: &Entry, problems: &mut Vec<Problem>) -> Option<(Axis, Vec<Rc<AxisValue>>)> {
    let name = &entry.key;
    if name.split('.').any(|part| part.trim().is_empty()) {
        let message = format!("`{name}` cannot be an axis");
        problems.push(
            Problem::error("bad-matrix", entry.key_span, message, "a name is empty")
                .with_help("an axis is the path of a parameter, such as `lora.rank`"),
        );
        return None;
    }
    let Value::List(items) = &entry.value.value else {
        let message = format!("axis `{name}`: expected a list of values, found {}", entry.value.describe());
        let help = match &entry.value.value {
            Value::Map(inner) => inner
                .first()
                .map_or_else(|| "give it values".to_owned(), |first| format!("write `{name}.{}: [...]`", first.key)),
            _ => format!("write `{name}: [{}]`", label(&entry.value.to_json())),
        };
        problems.push(Problem::error("wrong-type", entry.value.span, message, "expected a list").with_help(help));
        return None;
    };
    if items.is_empty() {
        let message = format!("axis `{name}` has no values");
        problems.push(Problem::error("bad-matrix", entry.value.span, message, "the list is empty"));
        return None;
    }
    let mut values: Vec<Rc<AxisValue>> = Vec::with_capacity(items.len());
    let mut known: HashSet<String> = HashSet::with_capacity(items.len());
    for (place, item) in items.iter().enumerate() {
        let value = AxisValue::new(item, place);
        if known.insert(value.identity.clone()) {
            values.push(Rc::new(value));
            continue;
        }
        let message = format!("axis `{name}` has the value `{}` twice", value.label);
        let problem = Problem::error("bad-matrix", item.span, message, "the second time");
        let before = values.iter().find(|other| other.identity == value.identity);
        problems.push(match before {
            Some(before) => problem.with_related(before.node.span, "the first time"),
            None => problem,
        });
    }
    Some((Axis { name: name.clone(), span: entry.key_span }, values))
}

/// The combinations of all values, the last axis changing first.
fn product(values: &[Vec<Rc<AxisValue>>], node: &Node, problems: &mut Vec<Problem>) -> Option<Vec<Vec<Rc<AxisValue>>>> {
    if values.iter().any(Vec::is_empty) || values.is_empty() {
        return Some(Vec::new());
    }
    // `exclude:` may take most away again, but not so many that they cannot be listed.
    let count = values.iter().fold(1_usize, |count, values| count.saturating_mul(values.len()));
    if count > MOST_CHILDREN * 10 {
        problems.push(too_many(node.span, count));
        return None;
    }
    let mut combinations = vec![Vec::new()];
    for values in values {
        let longer = combinations.iter().flat_map(|combination: &Vec<Rc<AxisValue>>| {
            values.iter().map(move |value| combination.iter().cloned().chain([value.clone()]).collect())
        });
        combinations = longer.collect();
    }
    Some(combinations)
}

/// Takes away the combinations that have all the values of one of the rules.
fn exclude(rules: &Entry, axes: &[Axis], combinations: &mut Vec<Vec<Rc<AxisValue>>>, problems: &mut Vec<Problem>) {
    for (rule, node) in self::rules(rules, axes, problems) {
        let before = combinations.len();
        combinations.retain(|combination| {
            !rule.iter().all(|(axis, value)| combination[*axis].identity == identity(&value.to_json()))
        });
        if combinations.len() == before {
            let message = "this excludes no combination";
            problems.push(Problem::warning("no-effect", node.span, message, "no combination has these values"));
        }
    }
}

/// Adds the combinations that are listed, each with a value for every axis.
fn include(
    rules: &Entry,
    axes: &[Axis],
    values: &mut [Vec<Rc<AxisValue>>],
    combinations: &mut Vec<Vec<Rc<AxisValue>>>,
    problems: &mut Vec<Problem>,
) {
    for (rule, node) in self::rules(rules, axes, problems) {
        let given: HashSet<usize> = rule.iter().map(|(axis, _)| *axis).collect();
        if let Some((_, missing)) = axes.iter().enumerate().find(|(axis, _)| !given.contains(axis)) {
            let message = format!("a combination that is included needs a value for `{}`", missing.name);
            problems.push(
                Problem::error("bad-matrix", node.span, message, "an axis has no value here")
                    .with_related(missing.span, "the axis"),
            );
            continue;
        }
        let mut combination: Vec<Option<Rc<AxisValue>>> = vec![None; axes.len()];
        for (axis, value) in rule {
            let new = AxisValue::new(value, values[axis].len());
            let known = values[axis].iter().find(|known| known.identity == new.identity).cloned();
            combination[axis] = Some(known.unwrap_or_else(|| {
                let new = Rc::new(new);
                values[axis].push(new.clone());
                new
            }));
        }
        let combination: Vec<Rc<AxisValue>> = combination.into_iter().flatten().collect();
        let is_new =
            !combinations.iter().any(|other| other.iter().zip(&combination).all(|(a, b)| a.identity == b.identity));
        if is_new {
            combinations.push(combination);
        } else {
            let message = "this combination exists already";
            problems.push(Problem::warning("no-effect", node.span, message, "included twice"));
        }
    }
}

/// The axes of a matrix that has `include:` alone.
fn axes_of_include(include: &Entry) -> Vec<Axis> {
    let Value::List(items) = &include.value.value else { return Vec::new() };
    let Some(Value::Map(entries)) = items.first().map(|item| &item.value) else { return Vec::new() };
    entries.iter().map(|entry| Axis { name: entry.key.clone(), span: entry.key_span }).collect()
}

/// A list of combinations, as places of axes with values; what cannot be read is reported and left out.
fn rules<'a>(entry: &'a Entry, axes: &[Axis], problems: &mut Vec<Problem>) -> Vec<(Vec<(usize, &'a Node)>, &'a Node)> {
    let Value::List(items) = &entry.value.value else {
        let message = format!("`{}`: expected a list of combinations, found {}", entry.key, entry.value.describe());
        problems.push(
            Problem::error("wrong-type", entry.value.span, message, "expected a list")
                .with_help(format!("write `{}: [{{ lora.rank: 4 }}]`", entry.key)),
        );
        return Vec::new();
    };
    let mut rules = Vec::with_capacity(items.len());
    for item in items {
        let Value::Map(entries) = &item.value else {
            let message = format!("`{}`: expected a mapping of axes, found {}", entry.key, item.describe());
            problems.push(Problem::error("wrong-type", item.span, message, "expected a mapping"));
            continue;
        };
        let mut rule = Vec::with_capacity(entries.len());
        let mut known = true;
        for Entry { key, key_span, value } in entries {
            match axes.iter().position(|axis| axis.name == *key) {
                Some(axis) => rule.push((axis, value)),
                None => {
                    known = false;
                    problems.push(unknown_key(key, *key_span, axes.iter().map(|axis| &axis.name)));
                }
            }
        }
        if known {
            rules.push((rule, item));
        }
    }
    rules
}

/// Equal texts for equal values: an integer is the same in either form.
fn identity(value: &Json) -> String {
    // Integers beyond those that a float holds are apart all the same.
    const EXACT: u64 = 1 << 53;
    match (value.as_i64(), value.as_f64()) {
        (Some(integer), _) if integer.unsigned_abs() > EXACT => integer.to_string(),
        (_, Some(number)) => format!("{number:?}"),
        (_, None) => value.to_string(),
    }
}

/// What stands for a value in the id of a child: its text, cut where it is long.
fn label(value: &Json) -> String {
    let text = text(value);
    let plain = text.chars().all(|c| !c.is_control());
    if plain && text.chars().count() <= LONGEST_LABEL {
        return text;
    }
    let start: String = text.chars().filter(|c| !c.is_control()).take(LONGEST_LABEL - 16).collect();
    format!("{start}~{}", Digest::of(text.as_bytes()).short())
}

/// A value as a person writes it, without blanks.
fn text(value: &Json) -> String {
    match value {
        Json::String(text) => match crate::file::scalar::plain(text) {
            Value::String(_) => text.clone(),
            // A text that looks like a number is another value than that number.
            _ => Json::from(text.as_str()).to_string(),
        },
        Json::Array(items) => format!("[{}]", items.iter().map(text).collect::<Vec<_>>().join(",")),
        Json::Object(map) => {
            let entries: Vec<String> = map.iter().map(|(key, value)| format!("{key}:{}", self::text(value))).collect();
            format!("{{{}}}", entries.join(","))
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => value.to_string(),
    }
}

// Which parameters take one value, and none that holds a comma: several values with commas between them are then
// several settings.

/// Whether the parameter at a path below a stage's own keys is a number, a boolean, a name out of a few, a time or
/// a size.
pub(super) fn takes_one_value(registry: &Registry, uses: &str, path: &[&str]) -> bool {
    match path {
        ["resources", below @ ..] => find(&ResourceKeys::schema(), below).is_some_and(|field| is_one_value(&field)),
        ["with", below @ ..] => {
            let field = registry.get(uses).and_then(|kind| find(&(kind.schema)(), below));
            field.is_some_and(|field| is_one_value(&field))
        }
        _ => false,
    }
}

fn find(schema: &Json, path: &[&str]) -> Option<Json> {
    let [first, rest @ ..] = path else { return Some(schema.clone()) };
    let of_property = schema["properties"].get(first).or_else(|| schema.get("additionalProperties"));
    if let Some(found) = of_property.and_then(|field| find(field, rest)) {
        return Some(found);
    }
    let alternatives = schema["anyOf"].as_array()?;
    alternatives.iter().find_map(|alternative| find(alternative, path))
}

fn is_one_value(schema: &Json) -> bool {
    if let Some(alternatives) = schema["anyOf"].as_array() {
        return alternatives.iter().all(is_one_value);
    }
    match schema["type"].as_str() {
        _ if schema.get("enum").is_some() => true,
        Some("integer" | "number" | "boolean") => true,
        // Free text may hold commas; what has to look like something does not.
        Some("string") => schema.get("pattern").is_some(),
        _ => false,
    }
}
