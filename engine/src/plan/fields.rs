//! Unknown keys of a stage that are known elsewhere: a level deeper (`learning_rate` is `optimizer.learning_rate`), a
//! level up (`dtype` of `scheduler` is `dtype`), below `with:`, or in another kind (`max_seq_len` belongs to
//! `tokenize`). All are common with files that were written for other programs, whose keys and values a kind lists.

use crate::file::problem::Problem;
use crate::file::source::Span;
use crate::file::tree::{Node, Value};
use crate::parameter::{Json, dotted};
use crate::stage::{Kind, Registry};
use crate::suggest;

/// What it costs to gather the keys of a kind, in names that could be looked at meanwhile.
const COST_OF_KEYS: usize = 100;

/// How a help line begins that has a suggestion.
const SUGGESTION: &str = "did you mean";

/// Says of unknown keys below a stage's `with:` where they are known, and of values of other programs what to write.
pub(super) fn point_to(kind: &Kind, with: &Node, registry: &Registry, problems: &mut [Problem]) {
    let is_unknown = |problem: &Problem| problem.code == "unknown-key";
    for problem in problems.iter_mut().filter(|problem| !is_unknown(problem) && problem.help.is_none()) {
        problem.help = instead_of_value(kind, with, problem.span).map(str::to_owned);
    }
    if !problems.iter().any(is_unknown) || !suggest::spend(COST_OF_KEYS) {
        return;
    }
    let (paths, missing) = (paths_of(kind), missing_keys(problems));
    for problem in problems.iter_mut().filter(|problem| is_unknown(problem)) {
        if !suggest::spend(COST_OF_KEYS) {
            return;
        }
        let Some((inside, key)) = key_at(with, problem.span, "") else { continue };
        let unknown = UnknownKey { kind, paths: &paths, missing: &missing, inside: &inside, key };
        let has_suggestion = problem.help.as_deref().is_some_and(|said| said.starts_with(SUGGESTION));
        if let Some(help) = unknown.help(has_suggestion, registry) {
            problem.help = Some(help);
        }
    }
}

/// Says of unknown keys of a stage which of them are parameters of its kind: their `with:` is not above them.
pub(super) fn point_below_with(root: &Node, registry: &Registry, problems: &mut [Problem]) {
    let Some(Value::Map(stages)) = root.get("stages").map(|stages| &stages.value) else { return };
    for problem in problems.iter_mut().filter(|problem| problem.code == "unknown-key") {
        if !suggest::spend(COST_OF_KEYS + stages.len()) {
            return;
        }
        let found = stages.iter().find_map(|stage| Some((&stage.value, own_key_at(&stage.value, problem.span)?)));
        let Some((stage, key)) = found else { continue };
        let Some(Value::String(uses)) = stage.get("uses").map(|uses| &uses.value) else { continue };
        let is_parameter = |kind: &&Kind| paths_of(kind).iter().any(|path| path == key);
        if let Some(kind) = registry.get(uses).filter(is_parameter) {
            let of = format!("`{key}` is a parameter of `{}`", kind.name);
            problem.help = Some(format!("{of}: it belongs below `with:`, indented deeper"));
        }
    }
}

/// A key below `with:` that the mapping around it does not have.
struct UnknownKey<'a> {
    kind: &'a Kind,
    /// The keys of the kind, nested ones with dots.
    paths: &'a [String],
    /// Required keys that are missing, as `paths` has them.
    missing: &'a [String],
    /// The path of the mapping around the key; empty for `with:` itself.
    inside: &'a str,
    key: &'a str,
}

impl UnknownKey<'_> {
    /// What to say of it; `None` where nothing better is known than what is said already. What the kind lists comes
    /// first, and what is only spelled alike last.
    fn help(&self, has_suggestion: bool, registry: &Registry) -> Option<String> {
        let listed = instead_of(self.kind, &dotted(self.inside, self.key));
        listed
            .map(str::to_owned)
            .or_else(|| self.further_up())
            .or_else(|| self.missing_beside().map(|path| self.suggest(path)))
            .or_else(|| spelled_out(self.paths, self.key).map(|path| self.suggest(path)))
            .or_else(|| nearest_after_group(self.paths, self.key).map(|path| self.suggest(&path)))
            .or_else(|| if has_suggestion { None } else { self.otherwise(registry) })
    }

    /// What to say of it where nothing near is a key of its own mapping.
    fn otherwise(&self, registry: &Registry) -> Option<String> {
        let listed = instead_of(self.kind, self.key).map(str::to_owned);
        listed
            .or_else(|| misspelled(self.paths, self.key).map(|path| self.suggest(path)))
            .or_else(|| of_other_kinds(self.kind, self.key, registry))
    }

    /// Suggests a key, by its path from the mapping that the unknown one is in.
    fn suggest(&self, path: &str) -> String {
        let here = path.strip_prefix(self.inside).and_then(|rest| rest.strip_prefix('.'));
        format!("{SUGGESTION} `{}`?", here.unwrap_or(path))
    }

    /// Where a mapping around its own has the key. What is in a list is a thing of its own.
    fn further_up(&self) -> Option<String> {
        if self.inside.contains('[') {
            return None;
        }
        let (mut beside, mut levels) = (self.inside, 1);
        while !beside.is_empty() {
            let (around, name) = beside.rsplit_once('.').unwrap_or(("", beside));
            if self.paths.contains(&dotted(around, self.key)) {
                let levels = if levels == 1 { "one level".to_owned() } else { format!("{levels} levels") };
                return Some(format!("`{}` belongs {levels} up, beside `{name}`", self.key));
            }
            (beside, levels) = (around, levels + 1);
        }
        None
    }

    /// The key near to it that is missing in the same mapping.
    fn missing_beside(&self) -> Option<&str> {
        let outer = |path: &str| path.rsplit_once('.').map_or(0, |(outer, _)| outer.len());
        let beside = self.missing.iter().filter(|path| path[..outer(path)] == *self.inside);
        suggest::nearest(self.key, beside.map(|path| last(path)))
    }
}

/// What a kind lists for a key, or for a key with a value, of another program.
fn instead_of(kind: &Kind, written: &str) -> Option<&'static str> {
    kind.keys_elsewhere.iter().find(|(listed, _)| *listed == written).map(|(_, instead)| *instead)
}

/// What a kind lists for the value at a place, of a key of its own: for this very value, or for any of its type.
fn instead_of_value(kind: &Kind, with: &Node, span: Span) -> Option<&'static str> {
    let listed = kind.keys_elsewhere.iter();
    let mut values = listed.filter_map(|(written, instead)| Some((written.split_once(": ")?, *instead)));
    let forms = |node: &Node| [node.to_json().to_string(), format!("<{}>", node.describe())];
    let is_meant = |node: &Node, value: &str| node.span == span && forms(node).iter().any(|form| form == value);
    values.find(|((key, value), _)| with.get(key).is_some_and(|node| is_meant(node, value))).map(|(_, instead)| instead)
}

/// The keys that were reported as missing, nested ones with dots.
fn missing_keys(problems: &[Problem]) -> Vec<String> {
    let missing = problems.iter().filter(|problem| problem.code == "missing-key");
    missing.filter_map(|problem| problem.field.clone()).collect()
}

/// The one nested key that is called so, alone or with the key around it: `learning_rate`, `lora_alpha`, `lora_r`.
fn spelled_out<'a>(paths: &'a [String], key: &str) -> Option<&'a str> {
    let is = |path: &&String| path.contains('.') && (last(path) == key || path.replace('.', "_") == key);
    if let Some(path) = only_shallowest(paths.iter().filter(is)) {
        return Some(path);
    }
    // `lora_r` stands for `lora.rank`: the rest begins a key of the mapping that the first word names.
    let begins = |path: &&String| {
        let (Some((outer, rest)), Some((group, name))) = (key.split_once('_'), path.split_once('.')) else {
            return false;
        };
        outer == group && name.starts_with(rest)
    };
    paths.iter().filter(begins).min_by_key(|path| path.len()).map(String::as_str)
}

/// The nearest key of the mapping that the unknown one begins with: `lora.dropout` for `lora_drpout`.
fn nearest_after_group(paths: &[String], key: &str) -> Option<String> {
    let nested = || paths.iter().filter_map(|path| path.split_once('.'));
    let rest_after = |group: &str| key.strip_prefix(group)?.strip_prefix('_');
    let (group, rest) = nested().find_map(|(group, _)| Some((group, rest_after(group)?)))?;
    let names = nested().filter(|(other, _)| *other == group).map(|(_, name)| name);
    suggest::nearest(rest, names).map(|name| format!("{group}.{name}"))
}

/// The one nested key whose last name is misspelled.
fn misspelled<'a>(paths: &'a [String], key: &str) -> Option<&'a str> {
    let nested = || paths.iter().filter(|path| path.contains('.'));
    let near = suggest::misspelled(key, nested().map(|path| last(path)))?;
    only_shallowest(nested().filter(|path| last(path) == near))
}

/// The path with the fewest levels, where it is the only one with so few.
fn only_shallowest<'a>(paths: impl Iterator<Item = &'a String>) -> Option<&'a str> {
    let levels = |path: &String| path.matches('.').count();
    let mut paths: Vec<&String> = paths.collect();
    paths.sort_by_key(|path| levels(path));
    match paths[..] {
        [path] => Some(path.as_str()),
        [path, other, ..] if levels(path) < levels(other) => Some(path.as_str()),
        _ => None,
    }
}

/// The other kinds that have such a key.
fn of_other_kinds(kind: &Kind, key: &str, registry: &Registry) -> Option<String> {
    if !suggest::spend(registry.kinds().count() * COST_OF_KEYS) {
        return None;
    }
    let has = |other: &&Kind| paths_of(other).iter().any(|path| path == key);
    let having: Vec<String> = registry.kinds().filter(has).map(|other| format!("`{}`", other.name)).collect();
    (!having.is_empty()).then(|| format!("`{}` has no such key; {} has one", kind.name, having.join(", ")))
}

/// The keys of a kind, nested ones with dots.
fn paths_of(kind: &Kind) -> Vec<String> {
    let mut paths = Vec::new();
    collect(&(kind.schema)(), "", &mut paths);
    paths.sort();
    paths.dedup();
    paths
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// The paths of a schema's properties.
fn collect(schema: &Json, prefix: &str, paths: &mut Vec<String>) {
    for alternative in schema["anyOf"].as_array().into_iter().flatten() {
        collect(alternative, prefix, paths);
    }
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        collect(property, &path, paths);
        paths.push(path);
    }
}

/// The key of a mapping that is at a place.
fn own_key_at(node: &Node, span: Span) -> Option<&str> {
    let Value::Map(entries) = &node.value else { return None };
    entries.iter().find(|entry| entry.key_span == span).map(|entry| entry.key.as_str())
}

/// The key that is at a place, and the path of the mapping that holds it, in which `[]` is any item of a list.
fn key_at<'n>(node: &'n Node, span: Span, path: &str) -> Option<(String, &'n str)> {
    match &node.value {
        Value::Map(entries) => entries.iter().find_map(|entry| match entry.key_span == span {
            true => Some((path.to_owned(), entry.key.as_str())),
            false => key_at(&entry.value, span, &dotted(path, &entry.key)),
        }),
        Value::List(items) => items.iter().find_map(|item| key_at(item, span, &format!("{path}[]"))),
        _ => None,
    }
}

// Where the fields of a stage's `with:` stand, under the paths that its key spells.

/// Every value below a node, by its path.
pub(super) fn field_spans(node: &Node) -> Vec<(String, Span)> {
    let mut spans = Vec::new();
    visit(node, "", &mut |path, node| {
        spans.push((path.to_owned(), node.span));
    });
    spans
}

/// The path of the value at a place.
pub(super) fn field_at(node: &Node, span: Span) -> Option<String> {
    let mut found = None;
    visit(node, "", &mut |path, node| {
        if node.span == span && found.is_none() {
            found = Some(path.to_owned());
        }
    });
    found
}

fn visit(node: &Node, path: &str, see: &mut dyn FnMut(&str, &Node)) {
    if !path.is_empty() {
        see(path, node);
    }
    match &node.value {
        Value::Map(entries) => {
            for entry in entries {
                visit(&entry.value, &dotted(path, &entry.key), see);
            }
        }
        Value::List(items) => {
            for (index, item) in items.iter().enumerate() {
                visit(item, &format!("{path}[{index}]"), see);
            }
        }
        _ => {}
    }
}
