//! `${vars.x}` and `${env.X}` in strings, replaced before anything is checked.
//!
//! A value that is one whole reference becomes what it refers to, with its type. `$${` stands for `${` itself.
//! `${matrix.x}` stands for another value in each child of a sweep: it is left in place, for who knows the children.
//! `when:` of a stage becomes true or false.

use std::collections::{HashMap, HashSet};
use std::env::VarError;

use super::condition::{self, ConditionError};
use super::problem::Problem;
use super::source::{SourceId, Sources, Span};
use super::tree::{Entry, Node, Value};
use crate::suggest;

/// How many bytes references may add up to: enough to share a block between all stages, far from variables that double
/// each other until the memory is full.
const MAX_REPLACED_BYTES: usize = 16 << 20;

/// What was replaced, for the problems found later.
#[derive(Debug, Default)]
pub struct Interpolated {
    /// Where the value that is at a place was given.
    origins: HashMap<Span, Span>,
    /// Values whose reference leads nowhere: that has been said, and what follows from it needs no saying.
    unknown: HashSet<Span>,
    /// Texts that hold `${matrix.x}`, for [`with_axes`].
    pub of_axes: HashSet<Span>,
}

impl Interpolated {
    /// Whether the value at a place, or the one that it was given, holds a reference that leads nowhere.
    pub fn is_unknown(&self, span: &Span) -> bool {
        let origin = self.origins.get(span);
        self.unknown.contains(span) || origin.is_some_and(|origin| self.unknown.contains(origin))
    }

    /// Adds to each problem where its value was given, and drops those that only follow from an unknown reference.
    pub fn refine(&self, problems: &mut Vec<Problem>) {
        problems.retain(|problem| !self.unknown.contains(&problem.span));
        for problem in problems {
            if let Some(origin) = self.origins.get(&problem.span) {
                problem.related.push((*origin, "its value is given here".to_owned()));
            }
        }
    }
}

/// Replaces every reference in the tree. A variable may use those declared above it. `placeholders` gives, for the name
/// of a stage kind, the first names of references that it replaces itself (`inputs` of `${inputs.rows}`): in its
/// parameters those stay as they are.
///
/// `replaced` is what overrides have taken the place of: variables that it names are no unused ones.
///
/// In the stages of an included file its own variables hold, with the values that it was given; those are read as the
/// file that gives them reads its own.
pub fn interpolate(
    root: &mut Node,
    (scopes, replaced): (&mut [Scope], &[Node]),
    sources: &Sources,
    env: &dyn Fn(&str) -> Result<String, VarError>,
    placeholders: &dyn Fn(&str) -> &'static [&'static str],
    problems: &mut Vec<Problem>,
) -> Interpolated {
    let Value::Map(entries) = &mut root.value else { return Interpolated::default() };
    let mut walk = Walk {
        vars: Variables::default(),
        used: HashSet::new(),
        replaced: HashSet::new(),
        bytes_left: Some(MAX_REPLACED_BYTES),
        left_alone: &[],
        may_name_axes: false,
        sources,
        env,
        problems,
        place_from: (Span::default(), Some(0)),
        done: Interpolated::default(),
    };
    replaced.iter().for_each(|node| see_variables(node, &mut walk.replaced));
    if let Some(vars) = entries.iter_mut().find(|entry| entry.key == "vars")
        && let Value::Map(vars) = &mut vars.value.value
    {
        walk.declare(vars);
    }
    for entry in entries.iter_mut().filter(|entry| !["vars", "include"].contains(&entry.key.as_str())) {
        match entry.key.as_str() {
            "stages" => walk.stages(&mut entry.value, "", placeholders),
            "publish" => walk.naming_axes(&mut entry.value),
            _ => walk.node(&mut entry.value),
        }
    }
    walk.given_by(None, scopes);
    walk.report_unused();
    // Each file comes before those that it includes.
    for at in 0..scopes.len() {
        walk.vars = Variables::default();
        walk.used.clear();
        walk.declare_with(&mut scopes[at]);
        if let Some(stages) = entries.iter_mut().find(|entry| entry.key == "stages") {
            walk.stages(&mut stages.value, &scopes[at].prefix, placeholders);
        }
        walk.given_by(Some(at), scopes);
        walk.report_unused();
    }
    walk.done
}

struct Walk<'a> {
    /// The variables so far, replaced.
    vars: Variables,
    /// The names of those that something refers to.
    used: HashSet<String>,
    /// Those that values named in the place of which there are others now, by the files of these values.
    replaced: HashSet<(SourceId, String)>,
    /// `None` once there were too many, which has been said.
    bytes_left: Option<usize>,
    /// The first names of references that the present stage's kind replaces.
    left_alone: &'static [&'static str],
    /// Whether `${matrix.x}` has a meaning here.
    may_name_axes: bool,
    sources: &'a Sources,
    env: &'a dyn Fn(&str) -> Result<String, VarError>,
    problems: &'a mut Vec<Problem>,
    /// The text in which a reference was looked for last, and where the next one is; `None` where one was not found.
    place_from: (Span, Option<usize>),
    done: Interpolated,
}

/// Variables in their order, found by name.
#[derive(Default)]
struct Variables {
    entries: Vec<Entry>,
    places: HashMap<String, usize>,
}

impl Variables {
    /// Adds one; of two that are called alike the first holds.
    fn push(&mut self, entry: Entry) {
        self.places.entry(entry.key.clone()).or_insert(self.entries.len());
        self.entries.push(entry);
    }

    fn get(&self, name: &str) -> Option<&Node> {
        self.places.get(name).map(|place| &self.entries[*place].value)
    }
}

/// A piece of a string.
enum TemplatePart<'t> {
    Text(&'t str),
    /// The whole `${…}` and the name in it.
    Reference(&'t str, &'t str),
    /// A `${` that nothing closes.
    Open(&'t str),
}

/// The variables of an included file.
#[derive(Debug, Clone)]
pub struct Scope {
    /// What the ids of its stages begin with: `data/`.
    pub prefix: String,
    /// The file that includes it; none is the pipeline file.
    pub parent: Option<usize>,
    /// Those that it declares, in its order.
    pub vars: Vec<Entry>,
    /// Values in the place of its own.
    pub given: Vec<Entry>,
}

impl Scope {
    /// Whether a stage is one of its own, and not of a file that it includes.
    fn has(prefix: &str, id: &str) -> bool {
        id.strip_prefix(prefix).is_some_and(|own| !own.contains('/'))
    }
}

impl Walk<'_> {
    fn declare(&mut self, vars: &mut [Entry]) {
        for entry in vars {
            self.node(&mut entry.value);
            self.vars.push(entry.clone());
        }
    }

    /// Declares the variables of an included file; a value that was given has been read already.
    fn declare_with(&mut self, scope: &mut Scope) {
        let given: HashMap<&str, &Node> =
            scope.given.iter().rev().map(|given| (given.key.as_str(), &given.value)).collect();
        for var in &mut scope.vars {
            match given.get(var.key.as_str()) {
                Some(given) => var.value = (*given).clone(),
                None => self.node(&mut var.value),
            }
            self.vars.push(var.clone());
        }
    }

    /// The values that a file gives to those that it includes.
    fn given_by(&mut self, parent: Option<usize>, scopes: &mut [Scope]) {
        for scope in scopes.iter_mut().filter(|scope| scope.parent == parent) {
            scope.given.iter_mut().for_each(|given| self.node(&mut given.value));
        }
    }

    /// The stages of one file: those whose ids have its prefix and no other.
    fn stages(&mut self, node: &mut Node, prefix: &str, placeholders: &dyn Fn(&str) -> &'static [&'static str]) {
        let Value::Map(stages) = &mut node.value else { return self.node(node) };
        for stage in stages.iter_mut().filter(|stage| Scope::has(prefix, &stage.key)) {
            if let Some(Value::String(uses)) = stage.value.get("uses").map(|uses| &uses.value) {
                self.left_alone = placeholders(uses);
            }
            self.stage(&mut stage.value);
            self.left_alone = &[];
        }
    }

    fn stage(&mut self, stage: &mut Node) {
        let Value::Map(keys) = &mut stage.value else { return self.node(stage) };
        for entry in keys {
            match entry.key.as_str() {
                "with" => self.naming_axes(&mut entry.value),
                "when" => self.condition(&mut entry.value),
                _ => self.node(&mut entry.value),
            }
        }
    }

    fn naming_axes(&mut self, node: &mut Node) {
        self.may_name_axes = true;
        self.node(node);
        self.may_name_axes = false;
    }

    /// Puts its truth in the place of a condition.
    fn condition(&mut self, node: &mut Node) {
        let Value::String(text) = &node.value else { return };
        let (text, span) = (text.clone(), node.span);
        let value = condition::evaluate(&text, &mut |whole, name| {
            let variable = name.strip_prefix("env.").filter(|_| !is_secret(name));
            if variable.is_some_and(|variable| (self.env)(variable) == Err(VarError::NotPresent)) {
                return Some(Value::Null);
            }
            Some(self.resolve(whole, name, span)?.value)
        });
        match value {
            Ok(truth) => node.value = Value::Bool(truth),
            Err(error) => {
                self.done.unknown.insert(span);
                if let ConditionError::Wrong(what, part) = error {
                    let message = format!("this is no condition: {what}");
                    let problem = self.report("bad-condition", &part, span, &message, "here");
                    problem.help =
                        Some("write `${vars.x}`, or compare: `${vars.size} == large and not ${env.CI}`".into());
                }
            }
        }
    }

    fn node(&mut self, node: &mut Node) {
        match &mut node.value {
            Value::List(items) => items.iter_mut().for_each(|item| self.node(item)),
            Value::Map(entries) => entries.iter_mut().for_each(|entry| self.node(&mut entry.value)),
            Value::String(text) if text.contains("${") => {
                let text = std::mem::take(text);
                node.value = match self.string(&text, node.span) {
                    Some(value) => value,
                    None => {
                        self.done.unknown.insert(node.span);
                        Value::String(text)
                    }
                };
            }
            _ => {}
        }
    }

    /// The value of a string with references; `None` where one of them leads nowhere.
    fn string(&mut self, text: &str, span: Span) -> Option<Value> {
        let pieces = self.pieces(text);
        if self.may_name_axes && pieces.iter().any(is_axis) {
            return self.text_of_axes(pieces, span);
        }
        if let [TemplatePart::Reference(whole, name)] = pieces.as_slice() {
            let target = self.resolve(whole, name, span)?;
            self.done.origins.extend(target.given.map(|given| (span, given)));
            return Some(replaced_at(target.value, span));
        }
        let mut result = Some(String::with_capacity(text.len()));
        for piece in pieces {
            let part = match piece {
                TemplatePart::Text(text) => Some(text.to_owned()),
                TemplatePart::Reference(whole, name) => self.part(whole, name, span),
                TemplatePart::Open(rest) => {
                    self.report("bad-reference", rest, span, "`${` is not closed", "expected `}`");
                    None
                }
            };
            result = result.zip(part).map(|(result, part)| result + &part);
        }
        result.map(Value::String)
    }

    /// The pieces of a text, in which a reference that is left alone is plain text.
    fn pieces<'t>(&self, text: &'t str) -> Vec<TemplatePart<'t>> {
        let is_left_alone =
            |name: &str| name.split_once('.').is_some_and(|(first, _)| self.left_alone.contains(&first));
        let piece = |piece| match piece {
            TemplatePart::Reference(whole, name) if is_left_alone(name) => TemplatePart::Text(whole),
            other => other,
        };
        pieces(text).into_iter().map(piece).collect()
    }

    /// A text that holds `${matrix.x}`, with all else in it replaced.
    fn text_of_axes(&mut self, pieces: Vec<TemplatePart<'_>>, span: Span) -> Option<Value> {
        let mut result = Some(String::new());
        for piece in pieces {
            let part = match piece {
                TemplatePart::Reference(whole, _) if is_axis(&piece) => Some(whole.to_owned()),
                TemplatePart::Text(text) => Some(escaped(text)),
                TemplatePart::Reference(whole, name) => self.part(whole, name, span).map(|text| escaped(&text)),
                TemplatePart::Open(rest) => {
                    self.report("bad-reference", rest, span, "`${` is not closed", "expected `}`");
                    None
                }
            };
            result = result.zip(part).map(|(result, part)| result + &part);
        }
        self.done.of_axes.insert(span);
        result.map(Value::String)
    }

    /// A reference inside a longer text.
    fn part(&mut self, whole: &str, name: &str, span: Span) -> Option<String> {
        match self.resolve(whole, name, span)?.value {
            Value::String(text) => Some(text),
            Value::Integer(number) => Some(number.to_string()),
            Value::Float(number) => Some(number.to_string()),
            Value::Bool(truth) => Some(truth.to_string()),
            value @ (Value::Null | Value::List(_) | Value::Map(_)) => {
                let what = Node { span, value }.describe();
                let message = format!("`{name}` is {what} and cannot be part of a string");
                self.report("wrong-type", whole, span, &message, "expected a string or a number");
                None
            }
        }
    }

    fn resolve(&mut self, whole: &str, name: &str, span: Span) -> Option<Target> {
        if let Some(name) = name.strip_prefix("vars.") {
            return self.variable(whole, name, span);
        }
        if let Some(name) = name.strip_prefix("env.") {
            return self.environment(whole, name, span);
        }
        if name.starts_with("matrix.") {
            let message = format!("`{whole}` has no meaning here: an axis has a value in each child of a stage");
            self.report("bad-reference", whole, span, &message, "only under `with:` and in paths of `publish:`");
            return None;
        }
        let message = format!("`{whole}` is no reference");
        let problem = self.report("bad-reference", whole, span, &message, "expected `vars.NAME` or `env.NAME`");
        problem.help = Some("write `$${` for a string that contains `${`".to_owned());
        None
    }

    fn variable(&mut self, whole: &str, name: &str, span: Span) -> Option<Target> {
        let mut path = name.split('.');
        let first = path.next().unwrap_or_default();
        self.used.insert(first.to_owned());
        let declared = self.vars.get(first);
        let found = path.fold(declared, |node, key| node.and_then(|node| node.get(key)));
        if let Some(node) = found {
            // A variable that leads nowhere itself has been reported where it is declared.
            if self.done.unknown.contains(&node.span) {
                return None;
            }
            let left = left_after(self.bytes_left?, &node.value);
            let target = left.map(|_| Target { value: node.value.clone(), given: Some(node.span) });
            return self.spend(left, whole, span).then_some(target).flatten();
        }
        let all = &self.vars.entries;
        let gathered = if suggest::is_spent() { all.len().min(4) } else { all.len() };
        let names: Vec<String> = all[..gathered].iter().map(|entry| format!("vars.{}", entry.key)).collect();
        let help = suggest::help(&format!("vars.{name}"), "variables declared above this", &names);
        let problem = self.report(
            "unknown-variable",
            whole,
            span,
            &format!("no variable `{name}`"),
            "not declared under `vars:`",
        );
        problem.help = help.or_else(|| Some("declare it under `vars:`, above where it is used".to_owned()));
        None
    }

    /// Says nothing where a reference leads nowhere: it may be what should have used the variable.
    fn report_unused(&mut self) {
        let leads_nowhere = ["unknown-variable", "bad-reference", "bad-condition"];
        if self.problems.iter().any(|problem| leads_nowhere.contains(&problem.code)) {
            return;
        }
        let is_used = |entry: &Entry| {
            self.used.contains(&entry.key) || self.replaced.contains(&(entry.key_span.source, entry.key.clone()))
        };
        for entry in self.vars.entries.iter().filter(|entry| !is_used(entry)) {
            let message = format!("variable `{}` is not used", entry.key);
            self.problems.push(Problem::warning("unused-variable", entry.key_span, message, "nothing refers to it"));
        }
    }

    fn environment(&mut self, whole: &str, name: &str, span: Span) -> Option<Target> {
        if is_secret(name) {
            let message = format!("`{name}` is a secret, and a secret never enters a pipeline");
            let problem = self.report("secret-in-file", whole, span, &message, "its value would be written down");
            let help = "leave it out: what needs a token (the Hub: HF_TOKEN) reads it from the environment itself";
            problem.help = Some(help.to_owned());
            return None;
        }
        let value = match (self.env)(name) {
            Ok(value) => Value::String(value),
            Err(VarError::NotPresent) => {
                let message = format!("environment variable `{name}` is not set");
                let problem = self.report("unknown-variable", whole, span, &message, "not set");
                problem.help = Some(format!("set it where the program is started: `{name}=… pipeline …`"));
                return None;
            }
            Err(VarError::NotUnicode(_)) => {
                let message = format!("environment variable `{name}` is set to what is not UTF-8");
                self.report("bad-value", whole, span, &message, "not UTF-8");
                return None;
            }
        };
        let left = left_after(self.bytes_left?, &value);
        self.spend(left, whole, span).then_some(Target { value, given: None })
    }

    /// Takes a reference's bytes from those that are left; false, and said, where they do not suffice.
    fn spend(&mut self, left: Option<usize>, whole: &str, span: Span) -> bool {
        self.bytes_left = left;
        if left.is_none() {
            let message = format!("references stand for more than {} MiB", MAX_REPLACED_BYTES >> 20);
            self.report("too-large", whole, span, &message, "the limit is reached here");
        }
        left.is_some()
    }

    fn report(&mut self, code: &'static str, whole: &str, span: Span, message: &str, label: &str) -> &mut Problem {
        let place = self.place(whole, span);
        self.problems.push(Problem::error(code, place, message, label));
        self.problems.last_mut().expect("a problem was just added")
    }

    /// Where a reference stands inside the text of its value.
    ///
    /// A text may hold thousands of them: each is looked for behind the one before, and none where one was not found,
    /// which is written otherwise than it is read.
    fn place(&mut self, whole: &str, span: Span) -> Span {
        if self.place_from.0 != span {
            self.place_from = (span, Some(0));
        }
        let Some(from) = self.place_from.1 else { return span };
        let text = self.sources.get(span.source).and_then(|source| source.text.get(span.offset..span.end()));
        let text = text.filter(|_| !whole.is_empty());
        let found = text.and_then(|text| Some(from + text.get(from..)?.find(whole)?));
        let found = found.or_else(|| text?.find(whole));
        self.place_from.1 = found;
        match found {
            Some(at) => Span { offset: span.offset + at, len: whole.len(), ..span },
            None => span,
        }
    }
}

/// The variables that a value names, with the file in which it does.
fn see_variables(node: &Node, seen: &mut HashSet<(SourceId, String)>) {
    match &node.value {
        Value::List(items) => items.iter().for_each(|item| see_variables(item, seen)),
        Value::Map(entries) => entries.iter().for_each(|entry| see_variables(&entry.value, seen)),
        Value::String(text) => {
            let variable = |piece| match piece {
                TemplatePart::Reference(_, name) => name.strip_prefix("vars.")?.split('.').next(),
                TemplatePart::Text(_) | TemplatePart::Open(_) => None,
            };
            seen.extend(pieces(text).into_iter().filter_map(variable).map(|name| (node.span.source, name.to_owned())));
        }
        Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Float(_) => {}
    }
}

/// How many bytes are left after a copy of a value, if that many are; every value counts, or empty lists would be free.
fn left_after(left: usize, value: &Value) -> Option<usize> {
    let left = left.checked_sub(size_of::<Node>())?;
    match value {
        Value::String(text) => left.checked_sub(text.len()),
        Value::List(items) => items.iter().try_fold(left, |left, item| left_after(left, &item.value)),
        Value::Map(entries) => entries
            .iter()
            .try_fold(left, |left, entry| left_after(left.checked_sub(entry.key.len())?, &entry.value.value)),
        Value::Null | Value::Bool(_) | Value::Integer(_) | Value::Float(_) => Some(left),
    }
}

/// What a reference stands for, and where that was given.
struct Target {
    value: Value,
    given: Option<Span>,
}

/// A text that holds `${matrix.x}`, with the values of one child in it; `value_of` gives them, by the whole reference
/// and the name of the axis, or has said that there is none.
pub fn with_axes(text: &str, value_of: &mut dyn FnMut(&str, &str) -> Option<Value>) -> Option<Value> {
    let pieces = pieces(text);
    if let [TemplatePart::Reference(whole, name)] = pieces.as_slice() {
        return value_of(whole, axis_of(name));
    }
    let mut result = Some(String::with_capacity(text.len()));
    for piece in pieces {
        let part = match piece {
            TemplatePart::Text(text) | TemplatePart::Open(text) => Some(text.to_owned()),
            TemplatePart::Reference(whole, name) => value_of(whole, axis_of(name)).map(|value| match value {
                Value::String(text) => text,
                other => Node { span: Span::default(), value: other }.to_json().to_string(),
            }),
        };
        result = result.zip(part).map(|(result, part)| result + &part);
    }
    result.map(Value::String)
}

/// The axis that a text stands for, if it is one whole `${matrix.x}`.
pub fn only_axis(text: &str) -> Option<&str> {
    match pieces(text).as_slice() {
        [TemplatePart::Reference(_, name)] => Some(axis_of(name)),
        _ => None,
    }
}

fn axis_of(name: &str) -> &str {
    name.strip_prefix("matrix.").unwrap_or(name).trim()
}

/// Whether a piece is `${matrix.x}`.
fn is_axis(piece: &TemplatePart<'_>) -> bool {
    matches!(piece, TemplatePart::Reference(_, name) if name.starts_with("matrix."))
}

/// A text in which no reference is seen.
fn escaped(text: &str) -> String {
    text.replace("${", "$${")
}

fn pieces(text: &str) -> Vec<TemplatePart<'_>> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        if rest[..at].ends_with('$') {
            pieces.extend([TemplatePart::Text(&rest[..at - 1]), TemplatePart::Text("${")]);
            rest = &rest[at + 2..];
            continue;
        }
        if at > 0 {
            pieces.push(TemplatePart::Text(&rest[..at]));
        }
        let Some(end) = rest[at..].find('}') else {
            pieces.push(TemplatePart::Open(&rest[at..]));
            return pieces;
        };
        let whole = &rest[at..=at + end];
        pieces.push(TemplatePart::Reference(whole, whole[2..whole.len() - 1].trim()));
        rest = &rest[at + end + 1..];
    }
    if !rest.is_empty() {
        pieces.push(TemplatePart::Text(rest));
    }
    pieces
}

/// Whether an environment variable holds a secret, by its name.
pub fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase().replace("TOKENIZ", "");
    ["TOKEN", "KEY", "SECRET", "PASSWORD"].iter().any(|word| name.contains(word))
}

/// A value as it is at the place that refers to it.
pub(crate) fn replaced_at(mut value: Value, span: Span) -> Value {
    match &mut value {
        Value::List(items) => {
            for item in items {
                *item = Node { span, value: replaced_at(std::mem::replace(&mut item.value, Value::Null), span) };
            }
        }
        Value::Map(entries) => {
            for entry in entries {
                entry.key_span = span;
                entry.value =
                    Node { span, value: replaced_at(std::mem::replace(&mut entry.value.value, Value::Null), span) };
            }
        }
        _ => {}
    }
    value
}
